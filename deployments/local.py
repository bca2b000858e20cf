"""Serves the application on this machine, on a Ray of its own."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from deployments.local_dashboard import Dashboard, progress_of
from deployments.local_ports import HOST, Ports
from deployments.local_run import saved_run
from deployments.yaml_lines import read_yaml
from engine.errors import SluiceError

CONFIG = Path("cluster/config.yaml")
STATE = Path(".sluice")
DRAIN_S = 90.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except SluiceError as error:
        print(f"\n{error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted.", file=sys.stderr)
        return 130
    return status


def serve(options: argparse.Namespace) -> int:
    """Starts Ray, deploys the config file, waits and asks a first question. Exits with 0 when that was answered."""
    from deployments.local_serve import serve  # loads Ray Serve, which takes seconds: only for those who need it

    http_port = _http_port(options)
    ports = Ports(http_port, options.dashboard_port, options.ray_port, options.metrics_port)
    serve(options.config, ports, _file(http_port), options.timeout)
    return 0


def stop(options: argparse.Namespace) -> int:
    """Ends what `serve` started on this port, and nothing else. Exits with 0 also if there was nothing to end."""
    port = _http_port(options)
    run = saved_run(_file(port))
    if run is None:
        print(f"Nothing of ours runs on port {port}.")
        return 0
    if not options.now:
        with closing(Dashboard(run.ports.dashboard)) as dashboard:
            dashboard.drain(DRAIN_S)
    print(f"Stopped {run.stop()} processes; port {port} is free.")
    return 0


def status(options: argparse.Namespace) -> int:
    """Tells what runs on this port. Exits with 0 if every application runs, else with 3."""
    port = _http_port(options)
    run = saved_run(_file(port))
    if run is None:
        print(f"Nothing of ours runs on port {port}.")
        return 3
    with closing(Dashboard(run.ports.dashboard)) as dashboard:
        applications = dashboard.applications()
    print(f"API        http://{HOST}:{port}/v1\ndashboard  {dashboard.url}\nlogs       {run.logs}")
    print(f"processes  {len(run.find())}")
    for name, details in applications.items():
        print(f"{name:10} {details['status']}", *progress_of(details), sep="\n           ")
    return 0 if {details["status"] for details in applications.values()} == {"RUNNING"} else 3


def fetch(options: argparse.Namespace) -> int:
    """Fetches the config file's model, if it is not there yet, and prints its folder."""
    from deployments.local_serve import fetch  # see `serve`

    print(fetch(options.config))
    return 0


def _http_port(options: argparse.Namespace) -> int:
    """Of the option, or of the config file; what else is wrong with the file is for its check to say."""
    if options.http_port is not None:
        return int(options.http_port)
    data = read_yaml(options.config).data
    http = data.get("http_options") if isinstance(data, dict) else None
    port = http.get("port") if isinstance(http, dict) else None
    return port if isinstance(port, int) else 8000


def _file(http_port: int) -> Path:
    return STATE / f"run-{http_port}.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.local", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="serve|stop|status|fetch")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--config", type=Path, default=CONFIG, help="Serve config file (default: %(default)s)")
    common.add_argument("--http-port", type=int, help="port of the API (default: the config file's)")
    for command in (serve, stop, status, fetch):
        name, summary = command.__name__, (command.__doc__ or "").split(".")[0]
        own = commands.add_parser(name, parents=[common], help=summary, description=command.__doc__)
        own.set_defaults(command=command)
        if command is serve:
            _add_serve_options(own)
        if command is stop:
            own.add_argument("--now", action="store_true", help="do not wait for running answers to end")
    return parser


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    default = "(default: %(default)s)"
    parser.add_argument("--dashboard-port", type=int, default=8265, help=f"port of Ray's dashboard {default}")
    parser.add_argument("--ray-port", type=int, default=6379, help=f"port of Ray's control service {default}")
    parser.add_argument("--metrics-port", type=int, default=8266, help=f"port for Prometheus {default}")
    parser.add_argument("--timeout", type=float, default=600, help=f"seconds the replicas may take {default}")


if __name__ == "__main__":
    sys.exit(main())
