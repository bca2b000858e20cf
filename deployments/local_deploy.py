"""`serve deploy` to the local Ray, and the wait until all replicas are up."""

import contextlib
import hashlib
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from ray.serve.scripts import cli as serve_cli

from deployments.config_file import ClusterConfig
from deployments.local_dashboard import POLL_S, Dashboard, Say, progress_of, raise_failure
from engine.errors import EngineUnavailable


def render(config: ClusterConfig, http_port: int, folder: Path) -> Path:
    """The config file itself; or if the port is to be another, a copy in `folder` that differs in that alone."""
    if http_port == config.http_port:
        return config.path
    options = config.document.get("http_options", {}) | {"port": http_port}
    copy = folder / "config.yaml"
    copy.write_text(yaml.safe_dump(config.document | {"http_options": options}, sort_keys=False))
    return copy


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def deploy(path: Path, dashboard: Dashboard) -> None:
    """`serve deploy`, in this process, which has loaded Serve already. Raises EngineUnavailable."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            serve_cli.main(["deploy", str(path), "--address", dashboard.url], standalone_mode=False)
    except (click.ClickException, RuntimeError, ConnectionError) as error:
        raise EngineUnavailable(f"serve deploy {path} failed: {error}\n{said.getvalue()}") from error


def wait_until_running(application: str, dashboard: Dashboard, timeout_s: float, say: Say) -> None:
    """Tells of every change. Raises EngineUnavailable with the cause as soon as a replica failed to start."""
    told: dict[str, str] = {}
    for details in _polls(application, dashboard, timeout_s):
        for progress in progress_of(details):
            if told.get(progress.name) != str(progress):
                told[progress.name] = str(progress)
                say(str(progress))
        raise_failure(details)
        if details["status"] == "RUNNING":
            return
    waiting = ", ".join(told.values()) or "nothing was deployed"
    raise EngineUnavailable(f"Not ready after {timeout_s:.0f} s: {waiting}. Give it longer: --timeout.")


def _polls(application: str, dashboard: Dashboard, timeout_s: float) -> Iterator[dict[str, Any]]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (details := dashboard.applications().get(application)) is not None:
            yield details
        time.sleep(POLL_S)
