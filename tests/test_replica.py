"""A replica shares out what its engine's steps give, and its engine hears of every request that leaves."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from deployments.client import EngineInfo, Submission
from deployments.inbox import Inbox, Inboxes, merge
from deployments.replica import EngineReplica, RemoteEngine
from engine.config import EngineConfig
from engine.core import EngineStats
from engine.errors import EngineUnavailable, RequestError
from engine.intake import Limits
from engine.policies.preemption import Preemption
from engine.request import FinishReason, Logprob, Output, SamplingParams, StepOutput

INFO = EngineInfo("model", "preemption", Limits(max_model_len=64, kv_tokens=64, vocab_size=100))
IDLE = EngineStats("preemption", 0, 0, 0, 10, 0, 0, 0, 0, {})
pytestmark = pytest.mark.anyio


class FakeActor:
    """The actor's verbs as Ray shows them. It knows which requests are open, and wants no abort before its submit."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.policies: list[Any] = []
        self.age_s = 0.0
        self.slow_submit: asyncio.Event | None = None
        self._steps: asyncio.Queue[StepOutput | Exception] = asyncio.Queue()
        for verb in ("submit", "abort", "collect", "set_policy", "stats"):
            setattr(self, verb, SimpleNamespace(remote=getattr(self, f"_{verb}")))

    def step(self, *outputs: Output) -> None:
        self._steps.put_nowait(StepOutput(others=list(outputs)))

    def die(self) -> None:
        self._steps.put_nowait(ActorDiedError())

    async def _submit(self, submission: Submission) -> None:
        if self.slow_submit is not None:
            await self.slow_submit.wait()
        self.open.add(submission.id)

    async def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.open.remove(request_id)
            self.aborted.append(request_id)

    async def _collect(self) -> list[StepOutput]:
        step = await self._steps.get()
        if isinstance(step, Exception):
            raise step
        return [step]

    async def _set_policy(self, policy: Any) -> None:
        self.policies.append(policy)

    async def _stats(self) -> EngineStats:
        return EngineStats("preemption", 1, 3, 5, 10, 0, 0, 0, 0, {}, self.age_s)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def started() -> AsyncGenerator[tuple[FakeActor, RemoteEngine], None]:
    actor: Any = FakeActor()
    engine = RemoteEngine(actor, INFO)
    yield actor, engine
    actor.die()  # ends the delivery
    await settle()


async def settle() -> None:
    """Lets everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


def request(request_id: str = "a") -> Submission:
    return Submission(request_id, [1, 2, 3], SamplingParams(max_tokens=8))


def token(value: int, request_id: str = "a", finish: FinishReason | None = None) -> Output:
    return Output(request_id, (value,), finish_reason=finish)


async def test_steps_that_came_meanwhile_are_one_output() -> None:
    async with started() as (actor, engine):
        outputs = engine.generate(request())
        actor.step(token(5, "other"))
        first = asyncio.ensure_future(anext(outputs))
        await settle()
        actor.step(token(5))
        assert (await first).tokens == (5,)
        actor.step(token(6), token(7, "other"))
        actor.step(token(7, finish=FinishReason.LENGTH))
        await settle()
        assert [output.tokens async for output in outputs] == [(6, 7)]
        assert actor.aborted == []


async def test_a_request_that_leaves_is_aborted() -> None:
    async with started() as (actor, engine):
        outputs = engine.generate(request())
        first = asyncio.ensure_future(anext(outputs))
        await settle()
        actor.step(token(5))
        await first
        await outputs.aclose()
        await settle()
        assert actor.aborted == ["a"]


async def test_a_request_that_leaves_before_its_submission_arrived_is_aborted_after_it() -> None:
    async with started() as (actor, engine):
        actor.slow_submit = asyncio.Event()
        waiting = asyncio.ensure_future(anext(engine.generate(request())))
        await settle()
        waiting.cancel()
        await settle()
        assert actor.aborted == []
        actor.slow_submit.set()
        await settle()
        assert actor.aborted == ["a"]
        assert not actor.open


async def test_a_request_that_could_never_run_does_not_reach_the_engine() -> None:
    async with started() as (actor, engine):
        with pytest.raises(RequestError, match="max_tokens"):
            await anext(engine.generate(Submission("a", [1] * 60, SamplingParams(max_tokens=8))))
        assert not actor.open


async def test_when_the_engine_dies_every_open_request_ends_at_once() -> None:
    async with started() as (actor, engine):
        waiting = [asyncio.ensure_future(anext(engine.generate(request(name)))) for name in "abc"]
        await settle()
        actor.die()
        for answer in waiting:
            with pytest.raises(EngineUnavailable):
                await asyncio.wait_for(answer, 1)
        assert actor.aborted == []


async def test_after_its_death_an_engine_takes_nothing_and_is_sick() -> None:
    async with started() as (actor, engine):
        actor.die()
        await settle()
        with pytest.raises(EngineUnavailable):
            await anext(engine.generate(request()))
        with pytest.raises(EngineUnavailable):
            await engine.stats()
        with pytest.raises(EngineUnavailable):
            _ = engine.info


async def test_tokens_that_came_before_the_death_are_still_delivered() -> None:
    async with started() as (actor, engine):
        outputs = engine.generate(request())
        first = asyncio.ensure_future(anext(outputs))
        await settle()
        actor.step(token(5))
        actor.die()
        assert (await first).tokens == (5,)
        with pytest.raises(EngineUnavailable):
            await anext(outputs)


async def test_a_new_policy_is_told_and_shown() -> None:
    async with started() as (actor, engine):
        policy = Preemption(max_num_seqs=3)
        await engine.set_policy(policy)
        assert actor.policies == [policy]
        assert engine.info.policy == policy.kind


async def test_a_replica_is_sick_when_work_waits_and_no_step_is_made() -> None:
    async with started() as (actor, engine):
        replica = EngineReplica(EngineConfig(), {}, stalled_after_s=10.0)
        replica._engine = engine
        actor.age_s = 9.0
        await replica.check_health()
        actor.age_s = 11.0
        with pytest.raises(EngineUnavailable, match="no step for 11 s"):
            await replica.check_health()


async def test_routing_stats_are_coarse() -> None:
    async with started() as (_, engine):
        replica = EngineReplica(EngineConfig(), {}, stalled_after_s=10.0)
        replica._engine = engine
        assert await replica.record_routing_stats() == {"policy": "preemption", "waiting": 3, "kv_used": 0.5}


async def test_a_replica_that_has_no_engine_yet_is_unavailable() -> None:
    replica = EngineReplica(EngineConfig(), {}, stalled_after_s=10.0)
    with pytest.raises(EngineUnavailable, match="loading"):
        await replica.describe()
    async with aclosing(replica.generate(request())) as outputs:
        with pytest.raises(EngineUnavailable, match="loading"):
            await anext(outputs)


def test_an_id_that_is_in_use_is_a_bug_of_ours() -> None:
    inboxes = Inboxes()
    inboxes.open("a")
    with pytest.raises(AssertionError, match="in use"):
        inboxes.open("a")
    inboxes.close("a")
    inboxes.open("a")


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=8), st.data())
def test_however_often_one_looks_nothing_is_lost_or_doubled(steps: list[list[int]], data: st.DataObject) -> None:
    asyncio.run(_look(steps, data))


async def _look(steps: list[list[int]], data: st.DataObject) -> None:
    inbox, seen = Inbox(), Output("a")
    outputs = inbox.outputs()
    for index, tokens in enumerate(steps):
        last = index == len(steps) - 1
        logprobs = [Logprob(value, -1.0) for value in tokens]
        inbox.put(Output("a", tuple(tokens), logprobs, finish_reason=FinishReason.STOP if last else None))
        if last or data.draw(st.booleans()):
            seen = merge(seen, await anext(outputs))
    assert seen.tokens == tuple(value for tokens in steps for value in tokens)
    assert [logprob.token for logprob in seen.logprobs or ()] == list(seen.tokens)
    assert seen.finish_reason is FinishReason.STOP
    assert [output async for output in outputs] == []


def test_merging_keeps_what_comes_once() -> None:
    first = Output("a", (1,), prompt_logprobs=[None], cached_tokens=16)
    second = Output("a", (2,), finish_reason=FinishReason.STOP, stop_token=2, cached_tokens=16)
    assert merge(first, second) == Output(
        "a", (1, 2), None, [None], FinishReason.STOP, stop_token=2, cached_tokens=16, error=None
    )
