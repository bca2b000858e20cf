"""Policy `retract`, a rule per test: five budgets, the guess about future output, and who is taken back."""

from dataclasses import replace
from typing import cast

import pytest
from pydantic import ValidationError

from engine.policies import Retract
from engine.policies.retract import RetractPolicy, TokenRatio
from engine.request import FinishReason, Request, SamplingParams
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import Scene, endless, evicted, prompt, ran, until

STEP = 0.602 / 600  # what a quiet decode step takes from the guess


def guess(engine: Harness | Scene) -> float:
    policy = engine.policy if isinstance(engine, Scene) else engine.scheduler.policy
    return cast(RetractPolicy, policy).ratio.value


def steps(engine: Harness, count: int) -> list[list[tuple[str, int, int]]]:
    return [engine.step() for _ in range(count)]


def quiet(scene: Scene, name: str = "r") -> Request:
    """It runs, needs no block for its next token, and reserves nothing: its last token is due."""
    return scene.runs(name, 20, 1, max_tokens=1)


# Prefill before decode


def test_prompts_run_first_and_decodes_wait_however_many_prompts_come() -> None:
    engine = Harness(Retract(), num_blocks=100)
    engine.add("a", prompt(1, 20), ignore_eos=True)
    engine.step()
    for i in range(3):
        engine.add(f"b{i}", prompt(i, 20), ignore_eos=True)
        assert engine.step() == [(f"b{i}", 0, 20)]
    assert engine.step() == [("a", 20, 1), ("b0", 20, 1), ("b1", 20, 1), ("b2", 20, 1)]


def test_a_decode_step_gives_every_running_request_one_token() -> None:
    scene = Scene(Retract(), usable=30)
    for i in range(5):
        scene.runs(f"r{i}", 10 + i, 1 + i)
    assert ran(scene.plan()) == [(f"r{i}", 1) for i in range(5)]


def test_two_prefills_in_a_row_and_then_the_waiting_decodes() -> None:
    engine = Harness(Retract(max_consecutive_prefills=2, prefill_max_requests=1), num_blocks=100)
    for i in range(6):
        engine.add(f"r{i}", prompt(i, 10), ignore_eos=True)
    kinds = ["prefill" if step[0][1] == 0 else "decode" for step in steps(engine, 9)]
    assert kinds == ["prefill", "prefill", "decode"] * 3


def test_without_a_bound_all_prompts_come_before_the_first_decode() -> None:
    engine = Harness(Retract(prefill_max_requests=1), num_blocks=100)
    for i in range(6):
        engine.add(f"r{i}", prompt(i, 10), ignore_eos=True)
    assert [step[0][1] for step in steps(engine, 7)] == [0] * 6 + [10]


def test_the_bound_does_not_hold_while_no_decode_could_run() -> None:
    engine = Harness(Retract(max_consecutive_prefills=2, chunked_prefill_size=32), num_blocks=100)
    engine.add("long", prompt(1, 160))
    assert steps(engine, 5) == [[("long", start, 32)] for start in range(0, 160, 32)]


# The chunk budget


def test_a_long_prompt_is_cut_to_whole_blocks() -> None:
    """40 tokens are 2 blocks and a half: 32 in each step, and what is left over at the end."""
    engine = Harness(Retract(chunked_prefill_size=40))
    engine.add("long", prompt(1, 100))
    assert steps(engine, 4) == [[("long", 0, 32)], [("long", 32, 32)], [("long", 64, 36)], [("long", 100, 1)]]


def test_a_cut_prompt_goes_on_before_anyone_new_is_looked_at() -> None:
    """Chunk 64: the rest of a is 36, counted as 48; 16 are left for b."""
    engine = Harness(Retract(chunked_prefill_size=64))
    engine.add("a", prompt(1, 100))
    assert engine.step() == [("a", 0, 64)]
    engine.add("b", prompt(2, 28))
    assert engine.step() == [("a", 64, 36), ("b", 0, 16)]
    assert engine.step() == [("b", 16, 12)]


def test_a_cut_prompt_goes_on_before_a_shorter_newcomer_under_every_order() -> None:
    engine = Harness(Retract(chunked_prefill_size=32, order="shortest-prefill"))
    engine.add("a", prompt(1, 100))
    engine.step()
    engine.add("b", prompt(2, 5))
    assert engine.step() == [("a", 32, 32)]


def test_a_cached_prefix_is_not_charged_to_the_chunk() -> None:
    """96 of 200 tokens are cached: 64 more in the first step, the last 40 in the second."""
    scene = Scene(Retract(chunked_prefill_size=64), usable=40)
    scene.remembers(scene.waits("w", 200), 96)
    assert ran(scene.plan()) == [("w", 64)]
    assert ran(scene.plan()) == [("w", 40)]


def test_a_chunk_is_never_smaller_than_a_block() -> None:
    """Less than a block could start nobody while decodes run."""
    scene = Scene(Retract(chunked_prefill_size=5), usable=30)
    scene.runs("r", 20, 1)
    scene.waits("w", 40)
    assert ran(scene.plan()) == [("w", 16)]


def test_a_retracted_request_comes_back_in_chunks_output_and_all() -> None:
    """367 tokens of prompt and 438 of output: 288 are the whole blocks of a chunk of 300."""
    scene = Scene(Retract(chunked_prefill_size=300), usable=60)
    scene.waits("w", 805, max_tokens=500, num_output=805 - 367)
    assert [ran(scene.plan()) for _ in range(3)] == [[("w", 288)], [("w", 288)], [("w", 229)]]


def test_a_blocked_chunk_lets_nobody_new_take_its_room() -> None:
    """The cut prompt wants 11 blocks and 3 are free: a newcomer of one block waits, a decode goes on."""
    scene = Scene(Retract(), usable=7)
    quiet(scene)
    scene.prefills("cut", 200, computed=32)
    scene.waits("new", 5, max_tokens=1)
    step = scene.plan()
    assert ran(step) == [("r", 1)]
    assert evicted(step) == []


# Five budgets, and which of them closed the batch


def closed_by(policy: Retract, usable: int, *waiting: tuple[int, int]) -> tuple[int, str]:
    """How many of these (prompt length, max_tokens) the first batch takes, and the budget that closed it."""
    scene = Scene(policy, usable)
    for i, (length, max_tokens) in enumerate(waiting):
        scene.waits(f"w{i}", length, max_tokens=max_tokens)
    step = scene.plan()
    (note,) = step.notes
    assert step.notes[note] == 1
    return len(step.chunks), note


def test_an_empty_queue_closes_the_batch_when_all_are_admitted() -> None:
    assert closed_by(Retract(), 30, (10, 5), (10, 5)) == (2, "closed_by_queue")


def test_the_chunk_closes_the_batch() -> None:
    assert closed_by(Retract(chunked_prefill_size=32), 30, (16, 5), (16, 5), (16, 5)) == (2, "closed_by_chunk")


def test_a_prompt_that_is_cut_closes_the_batch_by_the_chunk_even_if_nobody_waits_behind_it() -> None:
    assert closed_by(Retract(chunked_prefill_size=32), 30, (100, 5)) == (1, "closed_by_chunk")


def test_what_is_left_of_the_chunk_may_be_too_little_for_a_block() -> None:
    """40 - 32 = 8: the next prompt of 20 cannot begin."""
    assert closed_by(Retract(chunked_prefill_size=40), 30, (32, 5), (20, 5)) == (1, "closed_by_chunk")


def test_the_input_closes_the_batch_with_prompts_counted_in_whole_blocks() -> None:
    """40 tokens count 48: 64 - 48 = 16 is left, the second still begins, the third does not."""
    assert closed_by(Retract(max_prefill_tokens=64), 30, (40, 5), (40, 5), (40, 5)) == (2, "closed_by_input")


def test_the_first_prompt_may_exceed_the_input_budget() -> None:
    assert closed_by(Retract(max_prefill_tokens=64), 30, (200, 5), (10, 5)) == (1, "closed_by_input")


def test_the_count_closes_the_batch() -> None:
    assert closed_by(Retract(prefill_max_requests=2), 30, (10, 5), (10, 5), (10, 5)) == (2, "closed_by_count")


def test_the_slots_close_the_batch() -> None:
    assert closed_by(Retract(max_num_seqs=2), 30, (10, 5), (10, 5), (10, 5)) == (2, "closed_by_slots")


def test_the_kv_space_closes_the_batch() -> None:
    """9 blocks are 144 tokens. The first takes 16 + 16 + 50 = 82, which leaves 62; the second would take 82, too."""
    assert closed_by(Retract(), 9, (16, 50), (16, 50)) == (1, "closed_by_kv")


def test_running_requests_count_against_the_slots() -> None:
    scene = Scene(Retract(max_num_seqs=2), usable=30)
    quiet(scene)
    for i in range(2):
        scene.waits(f"w{i}", 10)
    step = scene.plan()
    assert ran(step) == [("w0", 10)]
    assert step.notes == {"closed_by_slots": 1}


@pytest.mark.parametrize(("max_tokens", "admitted"), [(79, True), (80, False)])
def test_the_test_of_kv_space_is_strict(max_tokens: int, admitted: bool) -> None:
    """10 blocks are free, 160 tokens: 64 of prompt, 16 of margin, and fewer than 80 of output."""
    scene = Scene(Retract(), usable=12)
    quiet(scene)
    scene.waits("w", 64, max_tokens=max_tokens)
    assert ran(scene.plan()) == ([("w", 64)] if admitted else [("r", 1)])


@pytest.mark.parametrize(
    ("ignore_eos", "max_tokens", "admitted"),
    [(False, 39, True), (False, 40, False), (True, 15, True), (True, 16, False)],
)
def test_what_running_requests_may_still_generate_is_reserved(
    ignore_eos: bool, max_tokens: int, admitted: bool
) -> None:
    """r may make 80 more: 0.7 of that is 56, or all of it if EOS is ignored. 160 - 56 - 48 - 16 = 40."""
    scene = Scene(Retract(), usable=13)
    running = scene.runs("r", 20, 20)
    running.params = replace(running.params, ignore_eos=ignore_eos)
    scene.waits("w", 48, max_tokens=max_tokens)
    assert ran(scene.plan()) == ([("w", 48)] if admitted else [("r", 1)])


@pytest.mark.parametrize(("length", "admitted"), [(80, True), (96, False)])
def test_outputs_are_clipped_when_they_are_reserved(length: int, admitted: bool) -> None:
    """30 of each: 160 - 0.7 · 30 = 139, and 80 + 16 + 30 is less, 96 + 16 + 30 is not."""
    scene = Scene(Retract(clip_max_new_tokens=30), usable=13)
    scene.runs("r", 20, 20)
    scene.waits("w", length, max_tokens=1000)
    assert ran(scene.plan()) == ([("w", length)] if admitted else [("r", 1)])


def test_the_output_is_reserved_in_full_in_its_own_batch_and_by_the_guess_in_the_next() -> None:
    """9 blocks: the first takes 82 of 144, the second waits. Then 8 · 16 - 0.7 · 49 = 93.7 are left, enough for 82."""
    scene = Scene(Retract(), usable=9)
    for name in ("w0", "w1"):
        scene.waits(name, 16, max_tokens=50)
    assert ran(scene.plan()) == [("w0", 16)]
    assert ran(scene.plan()) == [("w1", 16)]


def test_a_prompt_that_is_cut_does_not_reserve_its_output_yet() -> None:
    """a is cut to 64 of 100 tokens, which leaves 640 - 80 = 560 and 8 of the chunk: b needs 8 of it and 532."""
    scene = Scene(Retract(chunked_prefill_size=72), usable=40)
    scene.waits("a", 100, max_tokens=400)
    scene.waits("b", 8, max_tokens=500)
    assert ran(scene.plan()) == [("a", 64), ("b", 8)]


def test_a_resumed_request_reserves_only_what_it_may_still_generate() -> None:
    """64 tokens, 24 of them output, of at most 80: 64 + 56 + 16 of 160 are wanted; with all 80 it would not fit."""
    scene = Scene(Retract(), usable=12)
    quiet(scene)
    scene.waits("w", 64, max_tokens=80, num_output=24)
    assert ran(scene.plan()) == [("w", 64)]


@pytest.mark.parametrize(("max_tokens", "admitted"), [(31, True), (32, False)])
def test_a_cached_block_is_not_counted_as_a_hit_and_as_free(max_tokens: int, admitted: bool) -> None:
    """10 blocks, 6 of them hold the prefix: all 7 of the request are taken from the 10, and 160 - 112 - 16 = 32."""
    scene = Scene(Retract(), usable=12)
    quiet(scene)
    request = scene.waits("w", 100, max_tokens=max_tokens)
    scene.remembers(request, 96)
    assert ran(scene.plan()) == ([("w", 4)] if admitted else [("r", 1)])


def test_a_prefix_revived_for_one_request_is_no_room_for_the_next() -> None:
    """w takes 7 of 10 blocks, 6 of them by its prefix: 160 - 112 - 16 - 10 = 22 is left, and v wants 33."""
    scene = Scene(Retract(), usable=10)
    request = scene.waits("w", 100, max_tokens=10)
    scene.remembers(request, 96)
    scene.waits("v", 10, max_tokens=1)
    step = scene.plan()
    assert ran(step) == [("w", 4)]
    assert step.notes == {"closed_by_kv": 1}


def test_a_refusal_blocks_those_behind_it() -> None:
    scene = Scene(Retract(), usable=12)
    quiet(scene)
    scene.waits("large", 100, max_tokens=100)
    scene.waits("small", 5, max_tokens=1)
    assert ran(scene.plan()) == [("r", 1)]


def test_an_idle_engine_runs_what_the_budgets_refuse() -> None:
    """160 tokens in all are wanted and there: the strict test refuses, but nobody runs, so it may."""
    scene = Scene(Retract(), usable=10)
    scene.waits("w", 64, max_tokens=96)
    assert ran(scene.plan()) == [("w", 64)]


# Orders


def four_in_the_queue(order: str) -> list[str]:
    """a: 48 tokens, 10 to make. b: 64, 30, 16 cached. c: 64, 20, 48 cached. d: 30, 30."""
    scene = Scene(Retract.model_validate({"order": order, "prefill_max_requests": 1}), usable=60)
    for name, length, max_tokens, cached in (("a", 48, 10, 0), ("b", 64, 30, 16), ("c", 64, 20, 48), ("d", 30, 30, 0)):
        request = scene.waits(name, length, max_tokens=max_tokens)
        if cached:
            scene.remembers(request, cached)
    return [next(iter(scene.plan().chunks)).id for _ in range(4)]


@pytest.mark.parametrize(
    ("order", "served"),
    [("fcfs", "abcd"), ("lpm", "cbad"), ("lof", "bdca"), ("shortest-prefill", "cdab")],
)
def test_the_queue_is_served_in_this_order_and_ties_by_arrival(order: str, served: str) -> None:
    assert four_in_the_queue(order) == list(served)


@pytest.mark.parametrize(("length", "first"), [(128, "last"), (129, "w0")])
@pytest.mark.parametrize("order", ["lpm", "lof", "shortest-prefill"])
def test_a_queue_of_more_than_128_is_served_by_arrival(order: str, length: int, first: str) -> None:
    scene = Scene(Retract.model_validate({"order": order, "prefill_max_requests": 1}), usable=60)
    for i in range(length - 1):
        scene.waits(f"w{i}", 40)
    scene.remembers(scene.waits("last", 40, max_tokens=20), 32)
    assert next(iter(scene.plan().chunks)).id == first


# Who is taken back


def test_the_fewest_generated_go_first_then_the_longest_prompt_then_the_latest() -> None:
    """All four need a block and none is free. d and c are enough; b is as short as c and older, a has made the most."""
    scene = Scene(Retract(), usable=5)
    scene.runs("a", 7, 10)
    scene.runs("b", 16, 1)
    scene.runs("c", 16, 1)
    scene.runs("d", 32, 1)
    step = scene.plan()
    assert evicted(step) == ["d", "c"]
    assert ran(step) == [("a", 1), ("b", 1)]


def test_a_long_prompt_does_not_outweigh_more_output() -> None:
    scene = Scene(Retract(), usable=5)
    scene.runs("long", 47, 2)
    scene.runs("short", 16, 1)
    scene.runs("old", 7, 10)
    step = scene.plan()
    assert evicted(step)[0] == "short"


def test_the_need_of_a_decode_is_one_block_for_each_sequence_at_the_end_of_a_block() -> None:
    """Two of three are; two blocks are free, so nobody goes. With one free, one goes."""
    for usable, gone in ((7, []), (6, ["b"])):
        scene = Scene(Retract(), usable=usable)
        scene.runs("a", 7, 10)
        scene.runs("b", 32, 1)
        scene.runs("c", 17, 4)
        assert evicted(scene.plan()) == gone


def test_no_more_are_taken_back_than_needed_and_the_survivors_decode_in_the_same_step() -> None:
    scene = Scene(Retract(), usable=8)
    for i in range(4):
        scene.runs(f"r{i}", 30 - i, 3 + i)
    step = scene.plan()
    assert evicted(step) == ["r0", "r1"]
    assert ran(step) == [("r2", 1), ("r3", 1)]


def test_a_victim_is_not_admitted_again_in_the_step_that_took_it_back_though_it_would_fit() -> None:
    scene = Scene(Retract(), usable=4)
    scene.runs("a", 7, 10, max_tokens=11)
    scene.runs("v", 32, 1, max_tokens=2)
    step = scene.plan()
    assert (evicted(step), ran(step)) == (["v"], [("a", 1)])


def test_a_victim_keeps_its_arrival_and_its_output() -> None:
    """7 blocks for two that grow to 4 each: r1, which came later, is taken back, and comes again before r2."""
    engine = Harness(Retract(max_num_seqs=2, schedule_conservativeness=0.1), num_blocks=8, max_model_len=80)
    start = [endless(i, 16, 40) for i in range(3)]
    for i in range(3):
        engine.add(f"r{i}", start[i], max_tokens=40)
    order = [name for _ in range(80) for name, begin, _ in engine.step() if begin == 0]
    assert engine.scheduler.num_evictions == 1
    assert order == ["r0", "r1", "r1", "r2"]
    engine.run()
    assert [engine.tokens[f"r{i}"] for i in range(3)] == [expected_output(tokens, 40) for tokens in start]


def test_who_was_taken_back_four_times_is_shielded() -> None:
    scene = Scene(Retract(max_retractions=4), usable=5)
    scene.runs("shielded", 16, 1, evictions=4)
    scene.runs("b", 14, 3, evictions=3)
    scene.runs("c", 38, 5)
    step = scene.plan()
    assert evicted(step) == ["b"]


def test_if_all_are_shielded_the_usual_order_holds() -> None:
    scene = Scene(Retract(max_retractions=1), usable=3)
    scene.runs("a", 7, 10, evictions=2)
    scene.runs("b", 32, 1, evictions=1)
    assert evicted(scene.plan()) == ["b"]


def test_prompts_in_the_middle_are_taken_back_only_for_the_last_decode() -> None:
    scene = Scene(Retract(), usable=4)
    scene.runs("a", 32, 1)
    scene.prefills("cut", 200, computed=32)
    step = scene.plan()
    assert evicted(step) == ["cut"]
    assert ran(step) == [("a", 1)]


def test_of_several_blocked_prompts_the_latest_is_taken_back_and_that_is_no_decode_step() -> None:
    scene = Scene(Retract(), usable=5)
    scene.prefills("a", 64, computed=32)
    scene.prefills("b", 96, computed=33)
    step = scene.plan()
    assert (ran(step), evicted(step)) == ([], ["b"])
    assert guess(scene) == 0.7
    assert ran(scene.plan()) == [("a", 32)]


def alone_in_three_blocks() -> Harness:
    """48 tokens are all the pool has; intake would have refused 30 + 100."""
    engine = Harness(Retract(), num_blocks=4)
    tokens = endless(1, 30, 30)
    engine.scheduler.add(Request("alone", tokens, 30, SamplingParams(max_tokens=100, temperature=0.0)))
    engine.tokens["alone"] = []
    return engine


def test_the_last_request_that_cannot_go_on_fails_and_keeps_its_output() -> None:
    """With 48 positions computed it has made 19 tokens; the 49th position has no block."""
    engine = alone_in_three_blocks()
    for _ in range(20):
        engine.step()
    assert engine.last["alone"].finish_reason is FinishReason.ERROR
    assert "KV pool is full" in (engine.last["alone"].error or "")
    assert engine.tokens["alone"] == expected_output(endless(1, 30, 30), 19)
    assert engine.scheduler.num_evictions == 0


def test_the_engine_lives_on_after_a_failure() -> None:
    engine = alone_in_three_blocks()
    for _ in range(20):
        engine.step()
    engine.add("next", prompt(2, 20), max_tokens=3, ignore_eos=True)
    engine.run()
    assert engine.tokens["next"] == expected_output(prompt(2, 20), 3, ignore_eos=True)


def test_the_last_one_fails_only_after_all_others_were_taken_back() -> None:
    scene = Scene(Retract(), usable=3)
    scene.runs("a", 32, 1)
    scene.runs("b", 10, 4)
    step = scene.plan()
    assert (evicted(step), list(step.failed)) == (["a"], [])
    scene = Scene(Retract(), usable=2)
    a = scene.runs("a", 32, 1)
    step = scene.plan()
    assert (evicted(step), list(step.failed)) == ([], [a])


# The guess


@pytest.mark.parametrize(("conservativeness", "init"), [(1.0, 0.7), (0.5, 0.35), (2.0, 1.0)])
def test_the_guess_starts_at_seven_tenths_times_conservativeness_and_ends_at_14_percent_of_it(
    conservativeness: float, init: float
) -> None:
    ratio = Retract(schedule_conservativeness=conservativeness).build().ratio
    assert ratio.value == pytest.approx(init)
    for _ in range(300):
        ratio.decay()
    assert ratio.value == pytest.approx(init * (1 + 0.14) / 2)
    for _ in range(400):
        ratio.decay()
    assert ratio.value == pytest.approx(0.14 * init)


@pytest.mark.parametrize("decodes", [0, 1, 7, 50])
def test_each_decode_step_lowers_the_guess_and_a_prefill_does_not(decodes: int) -> None:
    engine = Harness(Retract(chunked_prefill_size=32))
    engine.add("a", endless(1, 60, 60), max_tokens=60)
    for _ in range(2 + decodes):
        engine.step()
    assert guess(engine) == pytest.approx(0.7 - decodes * STEP)


def test_an_idle_engine_forgets_the_guess() -> None:
    engine = Harness(Retract())
    engine.add("a", endless(1, 20, 30), max_tokens=30)
    engine.run()
    assert guess(engine) == pytest.approx(0.7 - 29 * STEP)
    engine.add("b", endless(1, 20, 30), max_tokens=30)
    engine.step()
    assert guess(engine) == 0.7


def test_a_queue_that_waits_is_not_idleness() -> None:
    """One seat: between a and b nothing runs, but b waited all along, so the guess stays where a left it."""
    engine = Harness(Retract(max_num_seqs=1))
    for name in "ab":
        engine.add(name, endless(1, 20, 10), max_tokens=10)
    assert until(engine, "b") == [("b", 0, 20)]
    assert guess(engine) == pytest.approx(0.7 - 9 * STEP)


def test_a_retraction_sets_the_guess_by_what_the_survivors_have_made_and_twenty_steps_more() -> None:
    """5 of 100 and 3 of 50: (8 + 2 · 20) / (150 + 1)."""
    scene = Scene(Retract(new_token_ratio=TokenRatio(init=0.2)), usable=4)
    scene.runs("a", 12, 5, max_tokens=100)
    scene.runs("b", 14, 3, max_tokens=50)
    scene.runs("victim", 32, 1)
    assert evicted(scene.plan()) == ["victim"]
    assert guess(scene) == pytest.approx(48 / 151)


@pytest.mark.parametrize(
    ("survivors", "value"),
    [
        ([(0, 1000), (0, 1000)], 0.3),  # 40 / 2001 is less than the guess that was too low
        ([(90, 100)], 1.0),  # 110 / 101
        ([(40, 100), (40, 99)], 120 / 200),
        ([], 0.3),
    ],
)
def test_a_retraction_never_lowers_the_guess_and_never_exceeds_one(
    survivors: list[tuple[int, int]], value: float
) -> None:
    ratio = Retract(new_token_ratio=TokenRatio(init=0.3)).build().ratio
    ratio.raise_for([made(*survivor) for survivor in survivors])
    assert ratio.value == pytest.approx(value)


def made(outputs: int, max_tokens: int) -> Request:
    return Request("r", [1] * (10 + outputs), 10, SamplingParams(max_tokens=max_tokens))


def test_the_guess_holds_for_twenty_steps_after_a_retraction() -> None:
    ratio = Retract(new_token_ratio=TokenRatio(init=0.2)).build().ratio
    ratio.raise_for([made(40, 100)])
    for _ in range(20):
        ratio.decay()
    assert ratio.value == pytest.approx(60 / 101)
    ratio.decay()
    assert ratio.value == pytest.approx(60 / 101 - 0.2 * 0.86 / 600)


def test_the_headroom_is_configured() -> None:
    ratio = Retract(new_token_ratio=TokenRatio(init=0.1), retract_headroom_steps=5).build().ratio
    ratio.raise_for([made(40, 100)])
    assert ratio.value == pytest.approx(45 / 101)
    for _ in range(6):
        ratio.decay()
    assert ratio.value < 45 / 101


def test_a_step_that_retracts_does_not_lower_the_guess() -> None:
    scene = Scene(Retract(), usable=4)
    scene.runs("a", 12, 5, max_tokens=1000)
    scene.runs("victim", 48, 1)
    assert evicted(scene.plan()) == ["victim"]
    assert guess(scene) == 0.7


def test_a_lower_guess_admits_what_the_first_one_refused() -> None:
    """r may make 99 more. 11 blocks are free: 176 - 0.7 · 99 = 106.7 < 111; after some decodes it is enough."""
    scene = Scene(Retract(), usable=13)
    scene.runs("r", 20, 1, max_tokens=100)
    scene.waits("w", 64, max_tokens=31)
    alone = 0
    while ran(scene.plan()) == [("r", 1)]:
        alone += 1
    # after n decodes: 176 - (0.7 - n · STEP) · (99 - n) must exceed 111
    assert alone == next(n for n in range(100) if 176 - (0.7 - n * STEP) * (99 - n) > 111)


# Adaptive arbitration


def chunk_lengths(scene: Scene, name: str, count: int) -> list[int]:
    return [dict(ran(scene.plan()))[name] for _ in range(count)]


def test_adaptive_chunks_grow_while_only_prompts_wait_up_to_four_times() -> None:
    """64, then a quarter more each step, cut to whole blocks; at 256 they stop."""
    scene = Scene(Retract(chunked_prefill_size=64, arbitration="adaptive"), usable=300)
    scene.waits("w", 4000)
    lengths = chunk_lengths(scene, "w", 10)
    assert lengths[:4] == [64, 80, 96, 112]  # 64 · 1.25, · 1.25², · 1.25³ = 80, 100, 125
    assert lengths[-3:] == [256, 256, 256]


def test_adaptive_chunks_shrink_while_decodes_wait_down_to_a_quarter() -> None:
    scene = Scene(Retract(arbitration="adaptive"), usable=300)
    scene.runs("r", 20, 1)
    scene.waits("w", 4000)
    assert chunk_lengths(scene, "w", 8) == [512, 512, 384, 288, 208, 160, 128, 128]


def test_adaptive_input_budgets_move_too() -> None:
    """Chunk is ample. 64 of input let two prompts of 40 begin; 80 still two, as 80 - 96 < 0; 100 let three."""
    scene = Scene(Retract(max_prefill_tokens=64, arbitration="adaptive"), usable=300)
    counts = []
    for i in range(3):
        for j in range(4):
            scene.waits(f"w{i}{j}", 40, max_tokens=1)
        step = scene.plan()
        counts.append(len(step.chunks))
        for request in tuple(scene.running):
            scene.leaves(request)
    assert counts == [2, 2, 3]


@pytest.mark.parametrize("decoding", [True, False])
def test_fixed_arbitration_moves_nothing(decoding: bool) -> None:
    scene = Scene(Retract(chunked_prefill_size=64), usable=300)
    if decoding:
        scene.runs("r", 20, 1)
    scene.waits("w", 2000)
    assert chunk_lengths(scene, "w", 8) == [64] * 8


# Configuration


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunked_prefill_size", 0),
        ("max_prefill_tokens", 0),
        ("prefill_max_requests", 0),
        ("schedule_conservativeness", 0.0),
        ("clip_max_new_tokens", 0),
        ("max_consecutive_prefills", 0),
        ("retract_headroom_steps", -1),
        ("max_retractions", 0),
        ("order", "priority"),
        ("arbitration", "on"),
        ("max_num_batched_tokens", 512),
    ],
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Retract.model_validate({field: value})


@pytest.mark.parametrize(("field", "value"), [("init", 1.1), ("min_factor", 2.0), ("decay_steps", 0)])
def test_a_wrong_guess_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValidationError, match=f"new_token_ratio.{field}"):
        Retract.model_validate({"new_token_ratio": {field: value}})
