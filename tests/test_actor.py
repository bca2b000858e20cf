"""The engine's actor as a plain object, on an engine without a model."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from deployments.actor import EngineActor, Outbox
from deployments.client import Submission
from engine.contract import Executor, Sampled, StepPlan
from engine.loop import EngineLoop
from engine.request import Request, SamplingParams
from tests.harness import Harness

pytestmark = pytest.mark.anyio


class Watched:
    """Keeps every request that an executor is asked to run, by id."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.requests: dict[str, Request] = {}

    def prepare(self, params: SamplingParams) -> None: ...

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        self.requests |= {chunk.request.id: chunk.request for chunk in plan}
        return self._inner.submit(plan)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"priority": -3, "cache_salt": "tenant"}, (-3, "tenant")), ({}, (0, ""))],
)
async def test_a_submission_reaches_the_scheduler_whole(options: dict[str, Any], expected: tuple[int, str]) -> None:
    harness, params = Harness(), SamplingParams(max_tokens=1, temperature=0.0, draft_tokens=5)
    watched = harness.core._executor = Watched(harness.memory)
    actor = EngineActor()
    actor._outbox = Outbox(asyncio.get_running_loop())
    actor._engine = EngineLoop(harness.core, actor._outbox.put)
    actor._engine.start()
    try:
        await actor.submit(Submission("a", [1, 2, 3], params, **options))
        (step,) = await asyncio.wait_for(actor.collect(), 30)
    finally:
        actor._engine.stop()
    (output,) = step
    request = watched.requests[output.request_id]
    assert (request.id, request.tokens[:3], request.params) == ("a", [1, 2, 3], params)
    assert (request.priority, request.cache_salt) == expected
