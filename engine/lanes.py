"""Where a step computes: here and now, or on a thread of its own while the next step is planned.

Jobs on a lane run one after the other, in the order of submission: that is what the executor's contract promises.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Lane(Protocol):
    def submit(self, job: Callable[[], Result]) -> Callable[[], Result]:
        """The returned call waits for the job's result, and raises what the job raised."""
        ...


class Inline:
    """The caller's own thread: the result is there when `submit` returns."""

    def submit(self, job: Callable[[], Result]) -> Callable[[], Result]:
        result = job()
        return lambda: result


class WorkerLane:
    """One thread, so that planning and computing overlap. torch counts its threads for each thread anew."""

    def __init__(self, threads: int) -> None:
        self._worker = ThreadPoolExecutor(1, "forward", initializer=torch.set_num_threads, initargs=(threads,))

    def submit(self, job: Callable[[], Result]) -> Callable[[], Result]:
        return self._worker.submit(job).result
