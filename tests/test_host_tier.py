"""The host tier, a rule per test: what goes down, what comes up, in which order, and who has to make room."""

from collections.abc import Sequence

import pytest

from engine.cache.events import EventLog, NoEvents
from engine.cache.host import HostMemory
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix
from engine.contract import Move, Route, Step
from engine.policies import Preemption, Retract
from engine.request import Request
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import endless, prompt

A, B, C, D = (bytes([letter]) * 16 for letter in range(4))


def memory(blocks: int) -> HostMemory:
    return HostMemory(blocks, NoEvents())


def counting(first: int = 100) -> "Taken":
    return Taken(first)


class Fickle:
    """Admits the first who waits, and thinks better of it."""

    kind, max_num_seqs = "fickle", 1

    def plan(self, step: Step) -> None:
        request = step.waiting[0]
        assert step.run(request, request.pending)
        step.evict(request)


class Taken:
    """Hands out block numbers nobody else has; `before` runs first, as a pool forgets before it hands out."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self, count: int) -> list[int]:
        start, self._next = self._next, self._next + count
        return list(range(start, self._next))


def test_what_the_device_forgets_is_copied_down_once() -> None:
    host = memory(2)
    host.keep(A, 7)
    host.keep(A, 8)
    assert list(host.take_moves()) == [Move(Route.DOWN, 7, 0)]
    assert list(host.take_moves()) == []


def test_the_least_recently_used_makes_room() -> None:
    host = memory(2)
    host.keep(A, 1)
    host.keep(B, 2)
    host.keep(A, 3)  # used again
    host.keep(C, 4)
    assert list(host.find([A])) == [A] and list(host.find([B])) == [] and list(host.find([C])) == [C]
    assert list(host.take_moves())[-1] == Move(Route.DOWN, 4, 1)


def test_a_block_that_came_up_is_the_most_recently_used() -> None:
    host = memory(2)
    host.keep(A, 1)
    host.keep(B, 2)
    assert host.bring_up([A], counting()) == [100]
    host.keep(C, 3)
    assert list(host.find([A])) == [A] and list(host.find([B])) == []


def test_a_run_ends_at_the_first_that_is_unknown() -> None:
    host = memory(3)
    for digest in (A, B, D):
        host.keep(digest, 1)
    assert list(host.find([A, B, C, D])) == [A, B]
    assert list(host.find([C, A])) == []
    assert list(host.find([])) == []


def test_blocks_on_their_way_up_are_not_pushed_out_by_those_that_go_down_for_them() -> None:
    """The only block here is wanted; taking a block on the device for it sends another down, which finds no room."""
    host = memory(1)
    host.keep(A, 1)
    host.take_moves()

    def take(count: int) -> list[int]:
        host.keep(B, 9)
        return [9]

    assert host.bring_up([A], take) == [9]
    assert list(host.take_moves()) == [Move(Route.UP, 0, 9)]
    assert list(host.find([A])) == [A] and list(host.find([B])) == []
    host.check()


def test_copies_down_come_before_the_copies_up_into_the_same_blocks() -> None:
    host = memory(2)
    host.keep(A, 1)
    host.take_moves()

    def take(count: int) -> list[int]:
        host.keep(B, 9)
        return [9]

    host.bring_up([A], take)
    assert list(host.take_moves()) == [Move(Route.DOWN, 9, 1), Move(Route.UP, 0, 9)]


def test_an_equal_block_that_comes_down_meanwhile_loses_nothing() -> None:
    host = memory(2)
    host.keep(A, 1)

    def take(count: int) -> list[int]:
        host.keep(A, 9)
        return [9]

    host.bring_up([A], take)
    host.check()
    assert list(host.find([A])) == [A]


def test_clearing_frees_every_block() -> None:
    host = memory(2)
    host.keep(A, 1)
    host.keep(B, 2)
    host.clear()
    host.check()
    assert list(host.find([A])) == []
    host.keep(C, 3)
    host.keep(D, 4)
    assert list(host.find([C, D])) == [C, D]


# Behind the cache


def tiered(usable: int, host_blocks: int) -> PagedKV:
    events = EventLog()
    return PagedKV(usable + 1, 16, HashedPrefix(), HostMemory(host_blocks, events), events)


def computed(kv: PagedKV, tokens: Sequence[int]) -> Request:
    made = Request("r", list(tokens), len(tokens))
    assert kv.reserve(made, len(tokens)), "no room"
    made.computed = len(tokens)
    kv.publish(made, made.computed)
    return made


def pushed_out(kv: PagedKV, tokens: range) -> None:
    """Computed once, and then the whole device was used for something else."""
    kv.release(computed(kv, tokens))
    kv.release(computed(kv, range(1000, 1000 + kv.capacity)))


def test_a_prefix_that_left_the_device_is_adopted_from_below() -> None:
    kv = tiered(usable=4, host_blocks=4)
    pushed_out(kv, range(40))
    again = Request("again", list(range(60)), 60)
    assert kv.cached(again) == 32
    assert kv.missing(again, 60) == 4  # blocks below are not blocks on the device
    assert kv.reserve(again, 60) == 28
    assert again.cached == again.computed == again.published == 32
    ups = [move for move in kv.take_moves() if move.route is Route.UP]
    assert [move.target for move in ups] == again.blocks[:2]


def test_a_prefix_may_begin_on_the_device_and_go_on_below() -> None:
    kv = tiered(usable=6, host_blocks=6)
    kv.release(computed(kv, range(64)))
    holder = computed(kv, range(32))  # its beginning is held
    kv.release(computed(kv, range(1000, 1060)))
    again = Request("again", list(range(64)), 64)
    assert kv.cached(again) == 48
    assert kv.reserve(again, 16) == 16
    assert again.blocks[:1] == holder.blocks[:1] and again.computed == 48
    kv.check([holder, again])


def test_a_refusal_brings_nothing_up() -> None:
    kv = tiered(usable=4, host_blocks=4)
    pushed_out(kv, range(40))
    holder = computed(kv, range(2000, 2030))
    kv.take_moves()
    assert kv.reserve(Request("again", list(range(60)), 60), 60) == 0
    assert list(kv.take_moves()) == []
    kv.check([holder])


def test_what_came_up_is_found_on_the_device_by_the_next() -> None:
    kv = tiered(usable=4, host_blocks=4)
    pushed_out(kv, range(20))
    first = Request("first", list(range(20)), 20)
    second = Request("second", list(range(20)), 20)
    assert kv.reserve(first, 20) and kv.reserve(second, 20)
    assert first.blocks[0] == second.blocks[0]


def test_a_flush_forgets_what_lies_below_too() -> None:
    kv = tiered(usable=4, host_blocks=4)
    pushed_out(kv, range(40))
    kv.clear()
    kv.check([])
    assert kv.cached(Request("again", list(range(60)), 60)) == 0


# In the engine


@pytest.mark.parametrize(
    "policy", [Preemption(max_num_batched_tokens=64, max_num_seqs=8), Retract(schedule_conservativeness=0.1)]
)
def test_an_evicted_request_resumes_by_a_copy(policy: Preemption | Retract) -> None:
    """The same load with and without the tier: with it, far fewer positions are computed twice."""
    recomputed = []
    for host_blocks in (0, 64):
        engine = Harness(policy, num_blocks=17, prefix=True, host_blocks=host_blocks)
        starts = [endless(i, 48, 60) for i in range(6)]
        for i, start in enumerate(starts):
            engine.add(f"r{i}", start, 60)
        engine.run()
        assert engine.tokens == {f"r{i}": expected_output(start, 60) for i, start in enumerate(starts)}
        assert engine.scheduler.num_evictions > 0
        ran = sum(length for step in engine.memory.steps for _, _, length in step)
        recomputed.append(ran - 6 * (48 + 59))
    assert recomputed[1] < recomputed[0] / 2


def test_copies_of_a_step_that_came_to_nothing_are_made_before_the_next() -> None:
    """A request is brought up, then withdrawn in the same plan: its blocks are findable, so their content must come."""
    engine = Harness(num_blocks=5, prefix=True, host_blocks=8, max_model_len=64)
    engine.add("first", prompt(1, 40), 2)
    engine.run()
    engine.add("other", prompt(2, 60), 2)
    engine.run()
    engine.add("again", prompt(1, 40), 2)
    usual, engine.scheduler.policy = engine.scheduler.policy, Fickle()
    assert engine.step() == []
    engine.scheduler.policy = usual
    engine.run()
    assert [move.route for move in engine.memory.moves].count(Route.UP) == 2
    assert engine.tokens["again"] == expected_output(prompt(1, 40), 2)
