"""The Ray actor that owns a device and runs one engine on a thread of its own. The only process that imports torch."""

import asyncio
import os
import time
from collections.abc import Iterable

from deployments.client import EngineInfo, Submission
from engine.config import EngineConfig
from engine.core import EngineCore, EngineStats
from engine.errors import EngineUnavailable
from engine.loop import EngineLoop
from engine.policies import PolicyConfig
from engine.request import StepOutput


class Outbox:
    """Outputs on their way from the engine's thread to one taker on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._steps: list[StepOutput] = []
        self._filled = asyncio.Event()

    def put(self, step: StepOutput) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._add, step)

    async def take(self) -> list[StepOutput]:
        """What the steps gave since the last call, in order; waits until there is something."""
        await self._filled.wait()
        self._filled.clear()
        steps, self._steps = self._steps, []
        return steps

    def _add(self, step: StepOutput) -> None:
        self._steps.append(step)
        self._filled.set()


class EngineActor:
    """The engine's verbs as messages. `load` comes first; as a constructor its errors would lose their type."""

    _outbox: Outbox
    _engine: EngineLoop

    async def load(self, config: EngineConfig) -> EngineInfo:
        """Raises ConfigError if the model cannot be had or does not fit."""
        _use_threads(config.threads)
        core = await asyncio.to_thread(_build, config)
        self._outbox = Outbox(asyncio.get_running_loop())
        self._engine = EngineLoop(core, self._outbox.put)
        self._engine.start()
        return EngineInfo(config.model, config.policy.kind, core.limits)

    async def submit(self, submission: Submission) -> None:
        self._engine.submit(
            submission.id,
            submission.prompt,
            submission.params,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
        )

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)

    async def collect(self) -> list[StepOutput]:
        """Everything the steps gave since the last call. Steps that end while a call is on its way share the next."""
        return await self._outbox.take()

    async def set_policy(self, policy: PolicyConfig) -> None:
        self._engine.set_policy(policy)

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable if the engine's thread has ended."""
        if not self._engine.alive:
            raise EngineUnavailable("The engine's thread has ended; the replica's log has the cause.")
        return self._engine.stats()


def _build(config: EngineConfig) -> EngineCore:
    from engine.build import build_core  # imports torch, which reads the environment that `_use_threads` sets

    return build_core(config, clock=time.perf_counter)


def _use_threads(threads: int | None) -> None:
    """Ray sets OMP_NUM_THREADS by the CPUs an actor reserves; here the engine's own setting counts.

    Threads that wait spin for some 50 µs, from one kernel to the next, which saves the 20 µs of waking them; then they
    sleep. Those that spin on steal the cores from the other engine and from the ingress: a barrier then takes 8 ms.
    """
    count = str(threads or os.cpu_count() or 1)
    os.environ.update(OMP_NUM_THREADS=count, MKL_NUM_THREADS=count, NUMBA_NUM_THREADS=count)
    os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="5000")
