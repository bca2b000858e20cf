"""A Ray of our own on this machine: reachable from here only, its files in a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from deployments.local_ports import HOST, free_port
from deployments.local_run import TOKEN, Run
from engine.errors import EngineUnavailable

ROOT = Path(__file__).parents[1]
SETTINGS = {
    # All services listen on the loopback address only. The name is Ray's: it is how it behaves on a Mac or on Windows.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Nobody else can reach it, and so `serve deploy` needs no token.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers run at niceness 15 otherwise: any other process on the machine would starve the engines.
    "RAY_worker_niceness": "0",
    # A proxy that died is replaced after one second, not ten.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # A replica that is sick is no place to wait for running answers.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Halves what a streamed token costs between replica and ingress.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_START_HOOK": "deployments.local_ray.without_client_server",
}
OBJECT_STORE_BYTES = 120_000_000  # tokens are small; Ray would set a third of the memory aside


def environment(run: Run) -> dict[str, str]:
    """For every process of the run. A Ray that the user's shell points to is none of our business."""
    inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {TOKEN: run.token, "PYTHONPATH": path, "DASHBOARD_METRIC_PORT": str(free_port())}
    return inherited | SETTINGS | own | _prestart()


def _prestart() -> dict[str, str]:
    """Where cores are few, workers start while Ray does: eight seconds less. Where many, they would cost memory."""
    few = (os.cpu_count() or 1) <= 4
    return {"RAY_enable_worker_prestart": "1", "RAY_worker_maximum_startup_concurrency": "5"} if few else {}


def start(run: Run) -> subprocess.Popen[str]:
    """`ray start` on its way; it ends when Ray is up."""
    log = (run.temp_dir / "ray-start.log").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", "start", *_options(run)],
        env=environment(run),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C meant for us must not reach Ray's processes
        text=True,
    )


def wait(starting: subprocess.Popen[str], run: Run) -> None:
    """Raises EngineUnavailable with what Ray said if it did not come up."""
    if starting.wait() != 0:
        said = (run.temp_dir / "ray-start.log").read_text().strip().splitlines()
        raise EngineUnavailable("Ray did not start:\n" + "\n".join(said[-15:]))


def without_client_server(parameters: Any, head: bool) -> None:
    """Called by `ray start`. The Ray Client server would only cost memory, a port and two seconds."""
    parameters.ray_client_server_port = None


def _options(run: Run) -> list[str]:
    options: dict[str, Any] = {
        "--port": run.ports.ray,
        "--dashboard-host": HOST,
        "--dashboard-port": run.ports.dashboard,
        "--metrics-export-port": run.ports.metrics,
        "--dashboard-agent-listen-port": free_port(),
        "--min-worker-port": 0,
        "--max-worker-port": 0,
        "--temp-dir": run.temp_dir,
        "--object-store-memory": OBJECT_STORE_BYTES,
        "--include-log-monitor": "false",
    }
    return ["--head", "--no-monitor", *(str(part) for option in options.items() for part in option)]
