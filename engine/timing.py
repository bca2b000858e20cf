"""Where a step's time goes: plan, prepare, forward, sample, publish. The clock is injected."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

PARTS = ("plan", "prepare", "forward", "sample", "publish")


class StepTimer:
    """Seconds spent in each part since the start, and the number of steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.steps = 0

    @property
    def now(self) -> float:
        return self._clock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - start

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)
