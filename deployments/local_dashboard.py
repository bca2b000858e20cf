"""What Ray's dashboard tells of the application, as progress and causes of failure."""

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from deployments.local_ports import HOST
from engine.errors import EngineUnavailable

APPLICATIONS = "/api/serve/applications/"
POLL_S = 0.4
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """One deployment as Serve tells of it: `running` of `wanted` replicas are up. `failure`: why one did not start."""

    name: str
    status: str
    running: int
    wanted: int
    failure: str

    def __str__(self) -> str:
        return f"{self.name}: {self.status.lower()}, {self.running} of {self.wanted} replicas are up"


class Dashboard:
    """A client of the dashboard on this machine. Close it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://{HOST}:{port}"
        self._http = httpx.Client(base_url=self.url, timeout=10)

    def close(self) -> None:
        self._http.close()

    def applications(self) -> dict[str, dict[str, Any]]:
        """Serve's details of each application, by name; none if there is no Serve."""
        try:
            answer = self._http.get(APPLICATIONS).raise_for_status()
            details: dict[str, dict[str, Any]] = answer.json()["applications"]
        except (httpx.HTTPError, KeyError):
            return {}
        return details

    def drain(self, patience_s: float) -> None:
        """Ends all applications; running answers may end, within the graceful shutdown time of the config file.

        Serve's own shutdown would take the proxies away first, and with them the connections.
        """
        with contextlib.suppress(httpx.HTTPError):  # then it is beyond asking
            self._http.put(APPLICATIONS, json={"applications": []})
        deadline = time.monotonic() + patience_s
        while self.applications() and time.monotonic() < deadline:
            time.sleep(POLL_S)


def progress_of(details: dict[str, Any]) -> list[Progress]:
    return [
        Progress(
            name,
            deployment["status"],
            sum(replica["state"] == "RUNNING" for replica in deployment["replicas"]),
            deployment.get("target_num_replicas") or 1,
            _failure(deployment),
        )
        for name, deployment in details["deployments"].items()
    ]


def raise_failure(details: dict[str, Any]) -> None:
    """Raises EngineUnavailable with the cause if a replica failed to start, or the application could not be built."""
    failed = [progress for progress in progress_of(details) if progress.failure]
    causes = [f"{progress.name} did not start:\n{progress.failure}" for progress in failed]
    if not causes and details["status"] == "DEPLOY_FAILED":
        causes = [details["message"]]
    if causes:
        raise EngineUnavailable("\n".join(causes))


def _failure(deployment: dict[str, Any]) -> str:
    """In one sentence if it is an error of ours, else with all that Serve knows; "" if none failed."""
    message: str = deployment["message"]
    if "failed to start" not in message and "FAILED" not in deployment["status"]:
        return ""
    ours = re.findall(r"^engine\.errors\.\w+: (.+(?:\n.+)*)", message, re.MULTILINE)
    return ours[-1] if ours else message
