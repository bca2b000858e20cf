"""Policy `preemption`, a rule per test: who runs how many tokens, who is evicted for whom, who may pass whom."""

import pytest
from pydantic import ValidationError

from engine.policies import Preemption
from engine.request import FinishReason
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import Scene, evicted, prompt, ran, until

BY_PRIORITY = Preemption(order="priority")


def small_pool(**options: object) -> Harness:
    """10 usable blocks of 16 tokens."""
    policy = Preemption.model_validate({"max_num_batched_tokens": 200, "max_num_seqs": 8, **options})
    return Harness(policy, num_blocks=11, max_model_len=160)


def two_of_five_blocks(**options: object) -> Harness:
    """r0 and r1 fill the pool with 80 tokens each and are due to decode; r0 needs a sixth block."""
    engine = small_pool(**options)
    for name in ("r0", "r1"):
        engine.add(name, prompt(int(name[1]), 80), max_tokens=4, ignore_eos=True)
    assert engine.step() == [("r0", 0, 80), ("r1", 0, 80)]
    return engine


# The token budget


def test_a_step_serves_decode_prefill_rest_and_newcomer_from_one_budget() -> None:
    """Budget 64: a decodes, b has 68 positions to go and gets what is left; then c starts behind b's rest."""
    scene = Scene(Preemption(max_num_batched_tokens=64, max_num_seqs=8), usable=30)
    scene.runs("a", 39, 1)
    scene.prefills("b", 100, computed=32)
    scene.waits("c", 50)
    assert ran(scene.plan()) == [("a", 1), ("b", 63)]
    assert ran(scene.plan()) == [("a", 1), ("b", 5), ("c", 50)]


def test_a_budget_that_running_requests_use_up_admits_nobody() -> None:
    scene = Scene(Preemption(max_num_batched_tokens=3, max_num_seqs=3), usable=30)
    for name in "ab":
        scene.runs(name, 20, 1)
    scene.prefills("c", 40, computed=16)
    scene.waits("d", 5)
    assert ran(scene.plan()) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_spent_budget_ends_the_running_pass() -> None:
    scene = Scene(Preemption(max_num_batched_tokens=10, max_num_seqs=3), usable=30)
    scene.prefills("a", 40, computed=16)
    scene.runs("b", 20, 1)
    assert ran(scene.plan()) == [("a", 10)]


def test_seats_are_given_in_order_of_arrival_and_the_rest_waits() -> None:
    """Budget 1024, three seats: 800 whole, 224 of the next 800; then its rest and one short prompt."""
    policy = Preemption(max_num_batched_tokens=1024, max_num_seqs=3)
    engine = Harness(policy, num_blocks=200, max_model_len=2000)
    for name, length in (("r0", 800), ("r1", 800), ("r2", 10), ("r3", 10)):
        engine.add(name, prompt(int(name[1]), length), ignore_eos=True)
    assert engine.step() == [("r0", 0, 800), ("r1", 0, 224)]
    assert engine.step() == [("r0", 800, 1), ("r1", 224, 576), ("r2", 0, 10)]
    assert engine.scheduler.num_waiting == 1


def test_the_long_prefill_threshold_counts_those_who_wait_as_others() -> None:
    policy = Preemption(max_num_batched_tokens=512, max_num_seqs=1, long_prefill_token_threshold=100)
    scene = Scene(policy, usable=40)
    scene.waits("long", 500)
    scene.waits("other", 5)
    assert ran(scene.plan()) == [("long", 100)]
    scene.waiting.pop()
    assert ran(scene.plan()) == [("long", 400)]


def test_requests_come_and_go_through_the_queue_one_by_one() -> None:
    engine = Harness()
    for i in range(10):
        engine.add(f"r{i}", prompt(i, 10))
        assert engine.scheduler.num_waiting == i + 1
    for i in range(10):
        assert engine.core.abort(f"r{i}")
        assert engine.scheduler.num_waiting == 9 - i
    assert not engine.core.has_work


def test_an_abort_makes_room_in_the_next_step() -> None:
    engine = small_pool()
    engine.add("a", prompt(1, 140))
    engine.step()
    engine.add("b", prompt(2, 100))
    assert engine.step() == [("a", 140, 1)]
    assert engine.core.abort("a")
    assert engine.step() == [("b", 0, 100)]


def test_fewer_seats_under_a_new_policy_evict_nobody_and_admit_nobody() -> None:
    scene = Scene(Preemption(max_num_seqs=3), usable=30)
    for name in "abc":
        scene.runs(name, 20, 1)
    scene.waits("d", 5)
    scene.policy = Preemption(max_num_seqs=2).build()
    step = scene.plan()
    assert ran(step) == [("a", 1), ("b", 1), ("c", 1)]
    assert evicted(step) == []


# Eviction


def test_the_newest_goes_and_comes_back_with_its_output_in_front() -> None:
    engine = two_of_five_blocks()
    assert engine.step() == [("r0", 80, 1)]
    assert engine.scheduler.num_evictions == 1
    assert len(engine.tokens["r1"]) == 1
    assert until(engine, "r1") == [("r1", 0, 81)]
    engine.run()
    assert engine.tokens["r1"] == expected_output(prompt(1, 80), 4, ignore_eos=True)


def test_an_evicted_request_comes_back_when_its_whole_sequence_fits_and_not_before() -> None:
    """81 tokens are 6 blocks; 4 are free until r0 has made its fourth token."""
    engine = two_of_five_blocks()
    assert [engine.step() for _ in range(3)] == [[("r0", 80, 1)], [("r0", 81, 1)], [("r0", 82, 1)]]
    assert engine.last["r0"].finish_reason is FinishReason.LENGTH
    assert engine.step() == [("r1", 0, 81)]


def test_an_evicted_request_finds_its_blocks_again_but_for_those_that_were_reused() -> None:
    """r0 takes one block; that is r1's deepest. 64 of 81 tokens are still there."""
    engine = Harness(Preemption(max_num_batched_tokens=200), num_blocks=11, max_model_len=160, prefix=True)
    engine.add("r0", prompt(0, 80), max_tokens=4, ignore_eos=True)
    engine.add("r1", prompt(1, 80), max_tokens=4, ignore_eos=True)
    engine.step()
    assert engine.step() == [("r0", 80, 1)]
    assert until(engine, "r1") == [("r1", 64, 17)]
    engine.run()
    assert engine.tokens["r1"] == expected_output(prompt(1, 80), 4, ignore_eos=True)


@pytest.mark.parametrize(("usable", "gone", "others"), [(13, ["r2", "r1"], []), (15, ["r2"], [("r1", 1)])])
def test_no_more_are_evicted_than_needed_and_the_newest_first(
    usable: int, gone: list[str], others: list[tuple[str, int]]
) -> None:
    """r0 wants 11 blocks; 7 or 9 are free, and r1 and r2 hold two each."""
    scene = Scene(Preemption(), usable)
    scene.prefills("r0", 200, computed=32)
    scene.runs("r1", 20, 1)
    scene.runs("r2", 20, 1)
    step = scene.plan()
    assert evicted(step) == gone
    assert ran(step) == [("r0", 168), *others]


def test_several_victims_of_a_step_keep_their_order_in_the_queue() -> None:
    scene = Scene(Preemption(), usable=13)
    scene.prefills("r0", 200, computed=32)
    scene.runs("r1", 20, 1)
    scene.runs("r2", 20, 1)
    scene.waits("r3", 5)
    scene.plan()
    assert scene.names() == ["r1", "r2", "r3"]


@pytest.mark.parametrize(
    ("usable", "gone", "tokens"), [(9, [], [("r0", 1), ("r2", 1)]), (10, ["r2"], [("r0", 1), ("r1", 64)])]
)
def test_nobody_is_evicted_if_that_would_not_be_enough(
    usable: int, gone: list[str], tokens: list[tuple[str, int]]
) -> None:
    """r1 wants 4 blocks and r2, the only one it may evict, holds 2: that helps if 2 are free, not if 1 is."""
    scene = Scene(Preemption(), usable)
    scene.runs("r0", 50, 1)
    scene.prefills("r1", 96, computed=32)
    scene.runs("r2", 20, 1)
    step = scene.plan()
    assert evicted(step) == gone
    assert ran(step) == tokens


@pytest.mark.parametrize(("usable", "gone"), [(7, []), (8, ["b"])])
def test_blocks_that_a_victim_shares_do_not_count_as_gained(usable: int, gone: list[str]) -> None:
    """b holds 4 blocks, 3 of them together with a: to evict b gives only 1 of the 2 that the long one wants."""
    scene = Scene(Preemption(), usable)
    a = scene.runs("a", 54, 1)
    scene.kv.publish(a, 48)
    scene.prefills("long", 64, computed=32)
    b = scene.waits("b", 60)
    b.tokens[:48] = a.tokens[:48]
    scene.running.append(scene.waiting.pop())
    scene.kv.reserve(b, 60)
    b.computed, b.admitted_len = 59, 59
    step = scene.plan()
    assert evicted(step) == gone
    assert dict(ran(step)).get("long", 0) == (32 if gone else 0)


def test_the_last_one_evicts_itself_rather_than_an_older_one() -> None:
    scene = Scene(Preemption(), usable=4)
    scene.runs("old", 20, 1)
    scene.runs("new", 32, 1)
    step = scene.plan()
    assert evicted(step) == ["new"]
    assert ran(step) == [("old", 1)]


def test_a_self_eviction_does_not_end_the_pass() -> None:
    """x, the least urgent, stands in the middle and lacks a block; b behind it goes on in the same step."""
    scene = Scene(BY_PRIORITY, usable=6)
    scene.runs("a", 20, 1).priority = 1
    scene.runs("x", 32, 1).priority = 3
    scene.runs("b", 20, 1).priority = 1
    step = scene.plan()
    assert evicted(step) == ["x"]
    assert ran(step) == [("a", 1), ("b", 1)]


def test_nobody_is_admitted_in_a_step_that_evicted_though_the_next_would_fit() -> None:
    scene = Scene(BY_PRIORITY, usable=4)
    scene.runs("old", 20, 1)
    scene.runs("new", 32, 1).priority = 1
    scene.waits("tiny", 3)
    assert ran(scene.plan()) == [("old", 1)]
    assert ran(scene.plan()) == [("old", 1), ("tiny", 3)]


# Priority


def test_a_victim_already_scheduled_is_withdrawn_and_its_token_returns_to_the_budget() -> None:
    """Budget 12: low is granted 1 and loses it when high needs a block; so the long one gets 11 and not 10."""
    scene = Scene(Preemption(max_num_batched_tokens=12, max_num_seqs=8, order="priority"), usable=7)
    low = scene.runs("low", 20, 1)
    low.priority = 5
    scene.runs("high", 32, 1)
    scene.prefills("long", 200, computed=33).priority = 1
    step = scene.plan()
    assert evicted(step) == ["low"]
    assert ran(step) == [("high", 1), ("long", 11)]
    assert (low.computed, low.blocks, len(low.tokens)) == (0, [], 21)


def test_the_blocks_of_a_withdrawn_chunk_were_never_computed_and_are_not_found() -> None:
    """low's chunk of 32 tokens is planned and withdrawn in one step: only the 16 tokens before it are findable."""
    scene = Scene(BY_PRIORITY, usable=5)
    low = scene.prefills("low", 48, computed=16)
    low.priority = 5
    scene.kv.publish(low, 16)
    scene.runs("high", 32, 1)
    assert evicted(scene.plan()) == ["low"]
    assert scene.kv.cached(low) == 16


def test_low_priority_returns_with_its_output_when_the_urgent_one_is_done() -> None:
    """4 usable blocks; low has 30 + 2 tokens when high takes the third block and low must go."""
    engine = Harness(BY_PRIORITY, num_blocks=5, max_model_len=64)
    engine.add("low", prompt(1, 30), max_tokens=4, priority=5, ignore_eos=True)
    engine.step()
    engine.add("high", prompt(2, 32), max_tokens=3, priority=0, ignore_eos=True)
    assert engine.step() == [("low", 30, 1), ("high", 0, 32)]
    assert engine.step() == [("high", 32, 1)]
    assert engine.step() == [("high", 33, 1)]
    assert engine.step() == [("low", 0, 32)]
    engine.run()
    assert engine.tokens["low"] == expected_output(prompt(1, 30), 4, ignore_eos=True)


def test_priority_evicts_nobody_while_there_is_room() -> None:
    engine = Harness(BY_PRIORITY)
    for name, priority in (("a", 5), ("b", 5), ("c", 0)):
        engine.add(name, prompt(ord(name), 30), max_tokens=8, priority=priority, ignore_eos=True)
    for _ in range(8):
        assert len(engine.step()) == 3
    assert engine.scheduler.num_evictions == 0


def test_the_victim_is_the_least_urgent_and_among_equals_the_latest() -> None:
    scene = Scene(BY_PRIORITY, usable=8)
    for name, priority in (("a", 1), ("b", 2), ("c", 2)):
        scene.runs(name, 20, 1).priority = priority
    scene.runs("urgent", 32, 1)
    step = scene.plan()
    assert evicted(step) == ["c"]
    assert ran(step) == [("a", 1), ("b", 1), ("urgent", 1)]


def test_an_equally_urgent_earlier_request_is_no_victim() -> None:
    scene = Scene(BY_PRIORITY, usable=4)
    scene.runs("first", 20, 1)
    scene.runs("second", 32, 1)
    assert evicted(scene.plan()) == ["second"]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [([2, 0, 1], "bca"), ([1, 1, 1], "abc"), ([2, 1, 1, 0], "dbca"), ([-1, 3, -2, 0], "cadb")],
)
def test_waiting_requests_are_admitted_by_priority_then_arrival(priorities: list[int], order: str) -> None:
    scene = Scene(BY_PRIORITY, usable=30)
    for name, priority in zip("abcd", priorities, strict=False):
        scene.waits(name, 10).priority = priority
    assert [name for name, _ in ran(scene.plan())] == list(order)


def test_full_seats_are_not_taken_from_less_urgent_ones() -> None:
    scene = Scene(Preemption(max_num_seqs=2, order="priority"), usable=30)
    for name, priority in (("a", 3), ("b", 1)):
        scene.runs(name, 20, 1).priority = priority
    scene.waits("c", 5).priority = 0
    assert ran(scene.plan()) == [("a", 1), ("b", 1)]


def test_fcfs_does_not_look_at_priorities() -> None:
    scene = Scene(Preemption(), usable=4)
    scene.runs("a", 20, 1).priority = 9
    scene.runs("b", 32, 1).priority = 0
    assert evicted(scene.plan()) == ["b"]


def test_an_evicted_request_is_at_the_front_of_its_class_not_of_the_queue() -> None:
    """c came before x, and x passed it; x is evicted, and resumes before c but behind the more urgent d."""
    scene = Scene(BY_PRIORITY, usable=10)
    scene.waits("c", 96).priority = 1
    x = scene.runs("x", 20, 1)
    x.priority = 1
    urgent = scene.runs("urgent", 128, 1)
    assert evicted(scene.plan()) == ["x"]
    scene.leaves(urgent)
    scene.waits("d", 10)
    assert ran(scene.plan()) == [("d", 10), ("x", 21), ("c", 96)]


# Aging


@pytest.mark.parametrize(("now", "first"), [(29.0, "urgent"), (30.0, "old")])
def test_ten_seconds_of_waiting_are_worth_one_step_of_priority(now: float, first: str) -> None:
    """old has value 3 and has waited since 0; urgent has 0 and came at 25. At 30 they are equal: arrival decides."""
    scene = Scene(Preemption(max_num_seqs=1, order="priority", aging_seconds=10.0), usable=30)
    scene.waits("old", 10).priority = 3
    scene.waits("urgent", 10).arrived_s = 25.0
    assert ran(scene.plan(now)) == [(first, 10)]


def test_without_aging_the_less_urgent_waits_for_ever() -> None:
    scene = Scene(Preemption(max_num_seqs=1, order="priority"), usable=30)
    scene.waits("old", 10).priority = 3
    scene.waits("urgent", 10).arrived_s = 1e6
    assert ran(scene.plan(now=1e6)) == [("urgent", 10)]


def test_a_stream_of_urgent_requests_does_not_starve_an_aging_one() -> None:
    """One seat, an urgent request of one token arrives before each step; the clock counts steps."""
    policy = Preemption(max_num_seqs=1, order="priority", aging_seconds=4.0)
    engine = Harness(policy)
    engine.add("old", prompt(1, 10), max_tokens=1, priority=3)
    served = []
    for i in range(14):
        engine.add(f"u{i}", prompt(i, 5), max_tokens=1)
        served += [name for name, _, _ in engine.step()]
    assert served.index("old") == 12  # three classes up, four seconds each; then it is the earliest of its equals


# A blocked head


def blocked_head(policy: Preemption, small: int = 6) -> Scene:
    """10 blocks are free, the head wants 12, and `small` requests of one block each wait behind it."""
    scene = Scene(policy, usable=20)
    scene.runs("r", 150, 1)
    scene.waits("head", 180)
    for i in range(small):
        scene.waits(f"s{i}", 10)
    return scene


def test_four_smaller_ones_pass_a_blocked_head_and_then_none_until_it_runs() -> None:
    scene = blocked_head(Preemption())
    assert ran(scene.plan())[1:] == [(f"s{i}", 10) for i in range(4)]
    for _ in range(3):
        assert "s4" not in dict(ran(scene.plan()))
    scene.leaves(scene.running[0])
    assert ran(scene.plan())[4:] == [("head", 180), ("s4", 10), ("s5", 10)]


def test_the_next_blocked_head_may_be_passed_anew() -> None:
    scene = blocked_head(Preemption(max_bypass=1), small=1)
    assert ran(scene.plan())[1:] == [("s0", 10)]
    scene.leaves(scene.running[0])
    assert ran(scene.plan())[1:] == [("head", 180)]
    scene.waits("second head", 190)
    scene.waits("s1", 10)
    assert ("s1", 10) in ran(scene.plan())


def test_nobody_passes_if_max_bypass_is_zero() -> None:
    assert ran(blocked_head(Preemption(max_bypass=0)).plan()) == [("r", 1)]


def test_only_smaller_ones_pass() -> None:
    """Both share 144 tokens with r, so that 3 more blocks are enough; but one of them is as long as the head."""
    scene = blocked_head(Preemption(), small=0)
    r = scene.running[0]
    scene.kv.publish(r, 144)
    for name, length in (("as long", 180), ("smaller", 179)):
        scene.waits(name, length).tokens[:144] = r.tokens[:144]
    assert ran(scene.plan()) == [("r", 1), ("smaller", 35)]


def test_a_smaller_one_that_does_not_fit_either_is_looked_past() -> None:
    scene = blocked_head(Preemption(), small=0)
    scene.waits("also too large", 170)
    scene.waits("small", 10)
    assert ran(scene.plan()) == [("r", 1), ("small", 10)]


@pytest.mark.parametrize(("between", "passes"), [(31, True), (32, False)])
def test_thirty_two_requests_behind_a_blocked_head_are_looked_at(between: int, passes: bool) -> None:
    scene = blocked_head(Preemption(), small=0)
    for i in range(between):
        scene.waits(f"large{i}", 180)
    scene.waits("small", 10)
    assert (("small", 10) in ran(scene.plan())) is passes


def test_nobody_passes_an_evicted_head() -> None:
    scene = blocked_head(Preemption())
    scene.waiting[0].evictions = 1
    assert ran(scene.plan()) == [("r", 1)]


def test_those_who_pass_are_within_budget_and_seats() -> None:
    scene = blocked_head(Preemption(max_num_batched_tokens=16, max_num_seqs=8))
    assert ran(scene.plan()) == [("r", 1), ("s0", 10), ("s1", 5)]
    scene = blocked_head(Preemption(max_num_seqs=3))
    assert ran(scene.plan()) == [("r", 1), ("s0", 10), ("s1", 10)]


def test_a_more_urgent_head_in_between_does_not_renew_the_count_of_the_first() -> None:
    scene = blocked_head(Preemption(order="priority", max_bypass=1))
    assert ran(scene.plan())[1:] == [("s0", 10)]
    urgent = scene.waits("urgent head", 170)
    urgent.priority = -1
    assert ran(scene.plan())[2:] == [("s1", 10)]
    scene.waiting.remove(urgent)
    assert "s2" not in dict(ran(scene.plan()))


# Watermark


@pytest.mark.parametrize(("length", "admitted"), [(128, True), (129, False)])
def test_the_watermark_is_kept_free_while_something_runs(length: int, admitted: bool) -> None:
    """A tenth of 20 blocks are 2; 10 are free: 8 blocks are admitted, 9 are not."""
    scene = Scene(Preemption(watermark=0.1), usable=20)
    scene.runs("r", 150, 1)
    scene.waits("w", length)
    assert (("w", length) in ran(scene.plan())) is admitted


def test_an_idle_engine_gives_all_blocks_to_one_request_whatever_the_watermark() -> None:
    scene = Scene(Preemption(watermark=0.5), usable=20)
    scene.waits("w", 320)
    assert ran(scene.plan()) == [("w", 320)]


def test_the_watermark_does_not_keep_running_requests_from_growing() -> None:
    scene = Scene(Preemption(watermark=0.9), usable=11)
    scene.runs("r", 160, 1)
    step = scene.plan()
    assert ran(step) == [("r", 1)] and scene.kv.room == 0


# Admission by the whole sequence


@pytest.mark.parametrize(("outputs", "admitted"), [(16, True), (17, False)])
def test_earlier_output_counts_when_a_request_is_admitted_again(outputs: int, admitted: bool) -> None:
    """10 blocks are free: 144 tokens of prompt and 16 of output fit, 17 do not."""
    scene = Scene(Preemption(max_bypass=0), usable=12)
    scene.runs("r", 20, 1)
    resumed = scene.waits("resumed", 144 + outputs)
    resumed.prompt_len, resumed.evictions = 144, 1
    assert (("resumed", 144 + outputs) in ran(scene.plan())) is admitted


@pytest.mark.parametrize(("free", "admitted"), [(6, False), (7, True)])
def test_a_cached_prefix_that_nobody_holds_needs_its_room_too(free: int, admitted: bool) -> None:
    """100 tokens, 96 of them cached in 6 blocks: 7 blocks must be available, the 6 among them."""
    scene = Scene(Preemption(), usable=2 + free)
    scene.runs("r", 20, 1)
    request = scene.waits("w", 100)
    scene.remembers(request, 96)
    assert (("w", 4) in ran(scene.plan())) is admitted


# The testing device


def test_every_third_step_begins_with_the_eviction_of_the_newest_that_has_sampled() -> None:
    """Only b has sampled since it was admitted when step 3 comes; c is in the middle of its prompt."""
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=4), evict_every_steps=3)
    engine.add("b", prompt(1, 20), max_tokens=8, ignore_eos=True)
    engine.add("c", prompt(2, 150), max_tokens=8, ignore_eos=True)
    assert engine.step() == [("b", 0, 20), ("c", 0, 44)]
    assert engine.step() == [("b", 20, 1), ("c", 44, 63)]
    assert engine.step() == [("c", 107, 43), ("b", 0, 21)]
    assert engine.scheduler.num_evictions == 1


# Configuration


def test_a_budget_below_the_seats_is_refused_naming_both() -> None:
    with pytest.raises(ValidationError, match=r"max_num_batched_tokens \(32\) must be at least max_num_seqs \(64\)"):
        Preemption(max_num_batched_tokens=32, max_num_seqs=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("long_prefill_token_threshold", -1),
        ("watermark", 1.0),
        ("max_bypass", -1),
        ("aging_seconds", -0.5),
        ("order", "lpm"),
        ("max_batched_tokens", 64),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Preemption.model_validate({field: value})
