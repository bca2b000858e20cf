"""What one `serve` has started: written down at once, so that `stop` ends exactly that and nothing else.

Every process of a run inherits a token in its environment. Ray's workers overwrite theirs, but they descend from
processes that do not; and whoever was there when all was up is also known by process id and time of birth.
"""

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from uuid import uuid4

import psutil

from deployments.local_ports import Ports

TOKEN = "SLUICE_RUN"
TERM_S = 2.0
Born = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Run:
    """`file` is where this is kept. `temp_dir` is Ray's, and private. `processes` are (pid, time of birth)."""

    file: Path
    token: str
    temp_dir: Path
    ports: Ports
    config_digest: str = ""
    processes: tuple[Born, ...] = field(default=())

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self) | {"file": None}, default=str, indent=1)
        scratch = self.file.with_suffix(".part")
        scratch.write_text(text)
        scratch.rename(self.file)

    def with_processes(self) -> "Run":
        """Knows all processes that run now."""
        return replace(self, processes=tuple((process.pid, process.create_time()) for process in self.find()))

    @property
    def logs(self) -> Path:
        return self.temp_dir / "session_latest" / "logs"

    @property
    def alive(self) -> bool:
        return bool(self.find())

    def find(self) -> list[psutil.Process]:
        """All living processes of this run."""
        found = {process.pid: process for process in psutil.process_iter() if self._owns(process)}
        for process in list(found.values()):
            found.update((child.pid, child) for child in _children(process))
        return [process for process in found.values() if _lives(process)]

    def stop(self) -> int:
        """Ends them all, politely at first. How many there were."""
        count = 0
        while processes := self.find():
            count += len(processes)
            _end(processes)
        self.forget()
        return count

    def forget(self) -> None:
        shutil.rmtree(self.temp_dir, ignore_errors=True)
        self.file.unlink(missing_ok=True)

    def _owns(self, process: psutil.Process) -> bool:
        try:
            born = (process.pid, process.create_time())
            return born in self.processes or process.environ().get(TOKEN) == self.token
        except psutil.Error:
            return False


def new_run(file: Path, ports: Ports) -> Run:
    # Ray puts Unix sockets in there, whose paths may have 107 characters at most.
    temp_dir = Path(tempfile.mkdtemp(prefix="sluice-", dir="/tmp"))
    return Run(file, uuid4().hex, temp_dir, ports)


def saved_run(file: Path) -> Run | None:
    """The run written down in `file`, if its processes still live. What a dead one left is cleared away."""
    try:
        known = json.loads(file.read_text())
        ports = Ports(**known["ports"])
        processes = tuple((pid, born) for pid, born in known["processes"])
        run = Run(file, known["token"], Path(known["temp_dir"]), ports, known["config_digest"], processes)
    except FileNotFoundError:
        return None
    if run.alive:
        return run
    run.forget()
    return None


def _children(process: psutil.Process) -> Iterator[psutil.Process]:
    try:
        yield from process.children(recursive=True)
    except psutil.Error:
        return


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _end(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        _signal(process, kill=False)
    _, stubborn = psutil.wait_procs(list(processes), timeout=TERM_S)
    for process in stubborn:
        _signal(process, kill=True)
    psutil.wait_procs(stubborn, timeout=TERM_S)


def _signal(process: psutil.Process, *, kill: bool) -> None:
    try:
        process.kill() if kill else process.terminate()
    except psutil.Error:
        return
