"""The ports of one run on this machine, and the check that they are free."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from engine.errors import ConfigError

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Port:
    """A port someone outside may want to know. `variable` is the Makefile's name for `option`."""

    use: str
    number: int
    option: str
    variable: str


@dataclass(frozen=True, slots=True)
class Ports:
    http: int
    dashboard: int
    ray: int
    metrics: int

    def __iter__(self) -> Iterator[Port]:
        yield Port("the HTTP API", self.http, "--http-port", "HTTP_PORT")
        yield Port("the Ray dashboard", self.dashboard, "--dashboard-port", "DASHBOARD_PORT")
        yield Port("Ray's control service", self.ray, "--ray-port", "RAY_PORT")
        yield Port("Ray's metrics", self.metrics, "--metrics-port", "METRICS_PORT")


def check_free(ports: Ports) -> None:
    """Raises ConfigError that names every busy port, its holder, and the variable to change."""
    numbers = [port.number for port in ports]
    problems = [
        f"Port {port.number} is needed twice; give {port.use} another: {port.variable}=... ({port.option})."
        for index, port in enumerate(ports)
        if port.number in numbers[:index]
    ]
    problems += [
        f"Port {port.number} for {port.use} is in use by {holder(port.number)}. "
        f"Stop that, or choose another: {port.variable}={free_port()} ({port.option} {free_port()})."
        for port in ports
        if not is_free(port.number)
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def holder(port: int) -> str:
    """The process that listens on `port`, as far as we may see it."""
    try:
        listens = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        pid = next(c.pid for c in listens if c.laddr and c.laddr.port == port and c.pid is not None)
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())[:80] or 'name unknown'})"
    except (psutil.Error, StopIteration):
        return "a process we may not look at"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
