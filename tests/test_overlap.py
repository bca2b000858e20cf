"""Overlap: step n + 1 is planned while n runs. A rule per test, on the memory that runs steps in order and late."""

from collections.abc import Callable

import pytest

from engine.contract import Sampled, Step, StepPlan
from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.request import FinishReason, SamplingParams
from tests.fakes import EOS, Guesses, expected_output
from tests.harness import Harness
from tests.scenarios import endless, prompt

POLICIES: list[PolicyConfig] = [
    Preemption(max_num_batched_tokens=64, max_num_seqs=8),
    Preemption(max_num_batched_tokens=64, max_num_seqs=8, order="priority"),
    Retract(chunked_prefill_size=64, max_num_seqs=8),
    Static(max_num_seqs=4),
]


def stops_early(length: int) -> list[int]:
    """A prompt after which EOS comes as one of the first ten tokens, but not as the first two."""
    return next(
        start
        for seed in range(500)
        for start in [[seed % 60, seed // 60, *prompt(3, length - 2)]]
        if len(expected_output(start, 10)) > 2 and expected_output(start, 10)[-1] == EOS
    )


class Watched:
    """Writes down when a step is submitted and when its result is asked for."""

    def __init__(self, engine: Harness) -> None:
        self._memory = engine.memory
        self.log: list[str] = []
        self._steps = 0

    def prepare(self, params: SamplingParams) -> None: ...

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        number, self._steps = self._steps, self._steps + 1
        self.log.append(f"submit {number}")
        result = self._memory.submit(plan)

        def ask() -> Sampled:
            self.log.append(f"result {number}")
            return result()

        return ask


def test_a_step_is_submitted_before_the_result_of_the_one_before_is_asked_for() -> None:
    engine = Harness(depth=1)
    engine.core._executor = watched = Watched(engine)
    engine.add("a", endless(1, 10, 3), max_tokens=3)
    engine.run()
    assert watched.log == ["submit 0", "submit 1", "result 0", "submit 2", "result 1", "result 2"]


def test_without_overlap_each_result_comes_before_the_next_step() -> None:
    engine = Harness(depth=0)
    engine.core._executor = watched = Watched(engine)
    engine.add("a", endless(1, 10, 2), max_tokens=2)
    engine.run()
    assert watched.log == ["submit 0", "result 0", "submit 1", "result 1"]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.kind}")
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_no_position_is_computed_behind_the_end_that_max_tokens_makes_certain(
    policy: PolicyConfig, max_tokens: int
) -> None:
    engine = Harness(policy, depth=1)
    engine.add("a", prompt(1, 20), max_tokens, ignore_eos=True)
    engine.add("b", prompt(2, 30), max_tokens, ignore_eos=True)
    engine.run()
    computed = sum(length for step in engine.memory.steps for _, _, length in step)
    assert computed == 20 + 30 + 2 * (max_tokens - 1)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.kind}")
def test_an_end_that_nobody_foresaw_wastes_one_row_and_no_more(policy: PolicyConfig) -> None:
    engine = Harness(policy, depth=1)
    start = stops_early(20)
    engine.add("a", start, max_tokens=40)
    engine.run()
    output = expected_output(start, 40)
    computed = sum(length for step in engine.memory.steps for _, _, length in step)
    assert engine.tokens["a"] == output and engine.last["a"].finish_reason is FinishReason.STOP
    assert computed == 20 + len(output) - 1 + 1


def test_what_a_step_in_flight_gives_an_aborted_request_is_dropped() -> None:
    engine = Harness(depth=1)
    engine.add("a", endless(1, 20, 20), max_tokens=20)
    engine.add("b", endless(2, 20, 20), max_tokens=20)
    for _ in range(4):
        engine.step()
    delivered = list(engine.tokens["a"])
    engine.core.abort("a")
    engine.run()
    assert engine.tokens["a"] == delivered and len(delivered) == 3
    assert engine.tokens["b"] == expected_output(endless(2, 20, 20), 20)


def test_an_id_may_be_used_again_while_the_step_of_its_first_owner_is_in_flight() -> None:
    engine = Harness(depth=1)
    engine.add("a", endless(1, 20, 20), max_tokens=20)
    for _ in range(3):
        engine.step()
    engine.core.abort("a")
    del engine.last["a"]
    engine.add("a", endless(2, 30, 10), max_tokens=10)
    engine.run()
    assert engine.tokens["a"] == expected_output(endless(2, 30, 10), 10)


def test_blocks_of_a_step_in_flight_may_go_to_the_next_step() -> None:
    """The pool holds one request. Its step is in flight when it is aborted, and the next takes the same blocks."""
    engine = Harness(num_blocks=3, depth=1, max_model_len=32)
    engine.add("a", endless(1, 20, 8), max_tokens=8)
    engine.step()
    engine.step()
    held = set(engine.scheduler._running[0].blocks)
    engine.core.abort("a")
    engine.add("b", endless(2, 20, 8), max_tokens=8)
    engine.step()
    assert set(engine.scheduler._running[0].blocks) == held
    engine.run()
    assert engine.tokens["b"] == expected_output(endless(2, 20, 8), 8)


class EvictsOnce:
    """Policy preemption, but request a is evicted in the plan of step `number`, first or last thing."""

    kind, max_num_seqs = "preemption", 8

    def __init__(self, number: int, *, first: bool) -> None:
        self._usual = Preemption(max_num_batched_tokens=64, max_num_seqs=8).build()
        self._number = number
        self._first = first
        self._steps = 0

    def plan(self, step: Step) -> None:
        now = self._steps == self._number
        self._steps += 1
        if now and self._first:
            self._evict(step)
        self._usual.plan(step)
        if now and not self._first:
            self._evict(step)

    def _evict(self, step: Step) -> None:
        for request in tuple(step.running):
            if request.id == "a":
                step.evict(request)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("number", range(1, 26))
def test_an_eviction_at_any_moment_delivers_every_token_once(number: int, first: bool, depth: int) -> None:
    """Before the step's own chunk, or after it was granted and has to be withdrawn; with the last one in flight."""
    engine = Harness(depth=depth, prefix=True)
    engine.scheduler.policy = EvictsOnce(number, first=first)
    start = endless(1, 14, 24)
    engine.add("a", start, max_tokens=24)
    engine.add("b", endless(2, 10, 40), max_tokens=40)
    engine.run()
    assert engine.tokens["a"] == expected_output(start, 24)
    assert engine.tokens["b"] == expected_output(endless(2, 10, 40), 40)
    assert engine.scheduler.num_evictions == (number < 24 + depth)


def test_a_request_that_drafts_waits_for_its_own_tokens_and_others_do_not() -> None:
    engine = Harness(depth=1, drafts=Guesses(3, 99))
    engine.add("drafts", endless(1, 20, 24), max_tokens=24)
    params = SamplingParams(max_tokens=24, temperature=0.0, draft_tokens=0)
    engine.core.add("plain", endless(2, 20, 24), params)
    engine.tokens["plain"] = []
    engine.run()
    assert engine.tokens["drafts"] == expected_output(endless(1, 20, 24), 24)
    assert engine.tokens["plain"] == expected_output(endless(2, 20, 24), 24)
    rows = [sum(name == who for step in engine.memory.steps for name, _, _ in step) for who in ("drafts", "plain")]
    assert rows[0] < rows[1] == 24


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.kind}")
@pytest.mark.parametrize("usable", [12, 40])
def test_depth_changes_no_token(policy: PolicyConfig, usable: int) -> None:
    """Roomy, and so tight that requests are evicted while their step is in flight."""
    given = []
    for depth in (0, 1):
        engine = Harness(policy, num_blocks=usable + 1, prefix=True, depth=depth, max_model_len=160)
        for i in range(6):
            engine.add(f"r{i}", prompt(i, 20 + 5 * i), 60, priority=i % 3)
        engine.run()
        given.append(engine.tokens)
    assert given[0] == given[1] == {f"r{i}": expected_output(prompt(i, 20 + 5 * i), 60) for i in range(6)}
