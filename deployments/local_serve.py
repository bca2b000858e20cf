"""From a config file to an answered request, on a Ray of our own. Whatever fails, nothing is left running."""

import shutil
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from deployments import local_ray
from deployments.config_file import ClusterConfig, load
from deployments.local_chat import QUESTION, ask, curl
from deployments.local_dashboard import Dashboard
from deployments.local_deploy import deploy, digest, render, wait_until_running
from deployments.local_ports import HOST, Ports, check_free
from deployments.local_run import Run, new_run, saved_run
from engine.catalogue import resolve


def serve(config_path: Path, ports: Ports, file: Path, timeout_s: float) -> None:
    """`file` is where the run is written down. Raises SluiceError, after what was started has been stopped."""
    config = load(config_path)
    _say(f"{config.path} is right: {config.app.model}, pools {', '.join(pool.name for pool in config.app.pools)}")
    run = saved_run(file)
    if run is None:
        check_free(ports)
        _start(config, new_run(file, ports), timeout_s)
    else:
        _say(f"Ray is up already on port {run.ports.ray}")
        _bring_up(config, run, timeout_s)


def fetch(config_path: Path) -> Path:
    """The folder of the config file's model, fetched if need be."""
    app = load(config_path).app
    return resolve(app.model, app.model_cache)


def _start(config: ClusterConfig, run: Run, timeout_s: float) -> None:
    run.save()
    try:
        starting = local_ray.start(run)
        _say(f"The model is in {resolve(config.app.model, config.app.model_cache)}")
        local_ray.wait(starting, run)
        _say(f"Ray is up on port {run.ports.ray}")
        _bring_up(config, run, timeout_s)
    except BaseException:  # also when the user has had enough
        try:
            kept = _keep_logs(run)
        finally:
            run.stop()
        _say(f"Stopped what had been started. Its logs are in {kept}")
        raise


def _bring_up(config: ClusterConfig, run: Run, timeout_s: float) -> None:
    path = render(config, run.ports.http, run.temp_dir)
    with closing(Dashboard(run.ports.dashboard)) as dashboard:
        details = dashboard.applications().get(config.application)
        if run.config_digest == digest(path) and details is not None and details["status"] == "RUNNING":
            _say(f"{config.application} runs already, with this very config")
        else:
            deploy(path, dashboard)
            _say(f"serve deploy {path}")
            wait_until_running(config.application, dashboard, timeout_s, _say)
    replace(run, config_digest=digest(path)).with_processes().save()
    _first_request(config, run)


def _first_request(config: ClusterConfig, run: Run) -> None:
    name, port = config.app.served_name, run.ports.http
    _say(f"{QUESTION}\n")
    for text in ask(name, port):
        print(text, end="", flush=True)
    print("\n")
    _say("It answers.")
    print(f"API        http://{HOST}:{port}/v1")
    print(f"dashboard  http://{HOST}:{run.ports.dashboard}")
    print(f"logs       {run.logs}\n\n{curl(name, port)}")


def _keep_logs(run: Run) -> Path:
    """Saves the logs from the temporary folder, which goes with the run."""
    kept = run.file.with_name(f"logs-{run.ports.http}")
    shutil.rmtree(kept, ignore_errors=True)
    with suppress(FileNotFoundError, shutil.Error):  # what its owner removes meanwhile is no loss
        shutil.copytree(run.logs, kept, ignore_dangling_symlinks=True)
    return kept


def _say(line: str) -> None:
    """With the seconds since this process began."""
    print(f"[{time.time() - psutil.Process().create_time():5.1f} s] {line}", flush=True)
