"""Processes that measure in turns: one order at a time, a JSON line in, a JSON line out."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Worker:
    """Its first line says that it is ready."""

    name: str
    process: "subprocess.Popen[str]"

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._read()

    def wait_until_ready(self) -> dict[str, Any]:
        return self._read()

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with exit code {self.process.wait()}; its messages are above.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def start(name: str, command: Sequence[str]) -> Worker:
    # Two engines take turns: one that spins while it waits would slow the other.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
    pipe = subprocess.PIPE
    return Worker(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment))


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", name, *arguments]
