"""The mechanism and policy `preemption` on the token memory: one rule per test, concrete numbers."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import PromptTooLong, RequestError
from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.request import FinishReason
from tests.fakes import EOS, Guesses, expected_output
from tests.harness import Harness


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7) % 60 for i in range(length)]


def test_all_requests_are_admitted_at_once_when_budget_and_blocks_allow() -> None:
    engine = Harness()
    for i in range(8):
        engine.add(f"r{i}", prompt(i, 10))
    assert engine.step() == [(f"r{i}", 0, 10) for i in range(8)]


def test_a_long_prompt_is_cut_at_the_budget_and_goes_on() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=8))
    engine.add("long", prompt(1, 150))
    assert [engine.step()[0][2] for _ in range(3)] == [64, 64, 22]
    assert engine.step() == [("long", 150, 1)]


def test_running_requests_come_before_waiting_ones() -> None:
    """Budget 64: a decode takes 1, a prompt of 100 the other 63; the newcomer waits for what is left."""
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=8), num_blocks=65)
    engine.add("a", prompt(1, 40), ignore_eos=True)
    engine.step()
    engine.add("b", prompt(2, 100))
    engine.add("c", prompt(3, 50))
    assert engine.step() == [("a", 40, 1), ("b", 0, 63)]
    assert engine.step() == [("a", 41, 1), ("b", 63, 37), ("c", 0, 26)]


def test_long_prefill_threshold_caps_one_request_only_while_there_are_others() -> None:
    policy = Preemption(max_num_batched_tokens=1024, max_num_seqs=8, long_prefill_token_threshold=400)
    engine = Harness(policy, num_blocks=200, max_model_len=2000)
    for name in "abc":
        engine.add(name, prompt(ord(name), 800), max_tokens=1)
    assert [length for _, _, length in engine.step()] == [400, 400, 224]
    assert [length for _, _, length in engine.step()] == [400, 400, 224]
    alone = Harness(policy, num_blocks=200, max_model_len=2000)
    alone.add("a", prompt(1, 800))
    assert alone.step() == [("a", 0, 800)]


def test_max_num_seqs_bounds_the_running_requests() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=512, max_num_seqs=2))
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 5), max_tokens=3, ignore_eos=True)
    assert len(engine.step()) == 2
    assert engine.scheduler.num_waiting == 1


def test_admission_needs_room_for_the_whole_prompt_not_its_first_chunk() -> None:
    """10 usable blocks; 6 are held. A prompt of 5 blocks would fit a chunk of 1, but is not admitted."""
    engine = Harness(Preemption(max_num_batched_tokens=96, max_num_seqs=8), num_blocks=11, max_model_len=160)
    engine.add("a", prompt(1, 96), ignore_eos=True)
    engine.step()
    engine.add("b", prompt(2, 80))
    assert engine.step() == [("a", 96, 1)]


def test_the_newest_is_evicted_when_a_decode_needs_a_block() -> None:
    """10 usable blocks: r0 decodes into its sixth, so r1's prompt lacks one of its five; r1 itself is the newest."""
    engine = Harness(Preemption(max_num_batched_tokens=100, max_num_seqs=8), num_blocks=11, max_model_len=160)
    engine.add("r0", prompt(0, 80), ignore_eos=True)
    engine.add("r1", prompt(1, 80), ignore_eos=True)
    assert engine.step() == [("r0", 0, 80), ("r1", 0, 20)]
    assert engine.step() == [("r0", 80, 1)]
    assert engine.scheduler.num_running == 1
    assert engine.scheduler.num_waiting == 1
    assert engine.scheduler.num_evictions == 1


def test_no_admission_in_a_step_that_evicted() -> None:
    """The eviction frees 5 blocks, of which the third request would need one; it waits for the next step."""
    engine = Harness(Preemption(max_num_batched_tokens=200, max_num_seqs=8), num_blocks=11, max_model_len=160)
    engine.add("r0", prompt(0, 80), ignore_eos=True)
    engine.add("r1", prompt(1, 80), ignore_eos=True)
    engine.step()
    engine.add("small", prompt(2, 5), ignore_eos=True)
    assert engine.step() == [("r0", 80, 1)]


def test_an_evicted_request_is_resumed_before_newer_ones() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=200, max_num_seqs=8), num_blocks=11, max_model_len=160)
    engine.add("r0", prompt(0, 80), max_tokens=4, ignore_eos=True)
    engine.add("r1", prompt(1, 80), max_tokens=4, ignore_eos=True)
    engine.step()
    engine.add("small", prompt(2, 5), ignore_eos=True)
    order = [name for _ in range(5) for name, start, _ in engine.step() if start == 0]
    assert order == ["r1", "small"]


def test_eviction_changes_no_token() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=8))
    for i in range(8):
        engine.add(f"r{i}", prompt(i, 20), max_tokens=96, ignore_eos=True)
    engine.run()
    assert engine.scheduler.num_evictions > 0
    for i in range(8):
        assert engine.tokens[f"r{i}"] == expected_output(prompt(i, 20), 96, ignore_eos=True)
        assert engine.last[f"r{i}"].finish_reason is FinishReason.LENGTH


def test_evictions_stay_bounded_when_eight_growing_requests_share_room_for_two() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=512, max_num_seqs=8))
    for i in range(8):
        engine.add(f"r{i}", prompt(i, 64), max_tokens=192, ignore_eos=True)
    engine.run()
    assert engine.scheduler.num_evictions <= 4 * 8
    computed = sum(length for step in engine.memory.steps for _, _, length in step)
    assert computed - 8 * (64 + 191) <= 3 * 8 * 192


def test_eos_ends_a_request_and_ignore_eos_does_not() -> None:
    start = next(
        p
        for p in (prompt(i, 4) for i in range(200))
        if EOS in expected_output(p, 40)[:-1] or expected_output(p, 40)[-1] == EOS
    )
    engine = Harness()
    engine.add("stops", start, max_tokens=40)
    engine.add("goes on", start, max_tokens=40, ignore_eos=True)
    engine.run()
    assert engine.tokens["stops"][-1] == EOS
    assert engine.last["stops"].finish_reason is FinishReason.STOP
    assert engine.last["stops"].stop_token == EOS
    assert len(engine.tokens["goes on"]) == 40


def test_max_tokens_zero_computes_the_prompt_and_samples_nothing() -> None:
    engine = Harness()
    engine.add("score", prompt(1, 20), max_tokens=0)
    engine.run()
    assert engine.tokens["score"] == []
    assert engine.last["score"].finish_reason is FinishReason.LENGTH


def test_an_aborted_request_frees_its_blocks_at_once_wherever_it_is() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=32, max_num_seqs=1))
    engine.add("mid-prefill", prompt(1, 100))
    engine.add("waiting", prompt(2, 10))
    engine.step()
    assert engine.core.abort("mid-prefill") and engine.core.abort("waiting")
    assert engine.kv.used_blocks == 0 and not engine.core.has_work
    assert not engine.core.abort("mid-prefill")


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 96, 97])
def test_block_and_chunk_borders_change_no_token(length: int) -> None:
    engine = Harness(Preemption(max_num_batched_tokens=32, max_num_seqs=4), prefix=True)
    engine.add("a", prompt(3, length), max_tokens=20)
    engine.run()
    assert engine.tokens["a"] == expected_output(prompt(3, length), 20)


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_fully_cached_prompt_still_computes_its_last_position(length: int) -> None:
    engine = Harness(prefix=True)
    for name in ("first", "second"):
        engine.add(name, prompt(5, length), max_tokens=6)
        engine.run()
    assert engine.last["second"].cached_tokens == length - 16
    assert engine.tokens["second"] == engine.tokens["first"] == expected_output(prompt(5, length), 6)


def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    engine = Harness(prefix=True)
    engine.add("turn 1", prompt(6, 20), max_tokens=40, ignore_eos=True)
    engine.run()
    history = prompt(6, 20) + engine.tokens["turn 1"]
    engine.add("turn 2", [*history, 1, 2, 3], max_tokens=4)
    engine.add("other", [*history[:-1], (history[-1] + 1) % 60, 1, 2, 3], max_tokens=4)
    engine.run()
    assert engine.last["turn 2"].cached_tokens == 48
    assert engine.last["other"].cached_tokens == 48
    assert engine.tokens["other"] == expected_output([*history[:-1], (history[-1] + 1) % 60, 1, 2, 3], 4)


def test_an_eviction_does_not_count_as_a_prefix_hit() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=8), prefix=True)
    for i in range(8):
        engine.add(f"r{i}", prompt(i, 20), max_tokens=96, ignore_eos=True)
    engine.run()
    assert engine.scheduler.num_evictions > 0
    assert all(engine.last[f"r{i}"].cached_tokens == 0 for i in range(8))


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers_and_nothing_is_lost() -> None:
    engine = Harness(max_model_len=2048)
    engine.add("small", prompt(1, 14), max_tokens=6)
    with pytest.raises(PromptTooLong, match=r"600 tokens.*holds 512 tokens"):
        engine.add("big", [1] * 600, max_tokens=4)
    with pytest.raises(PromptTooLong, match=r"200 tokens and max_tokens is 2000.*lower max_tokens to 312"):
        engine.add("grows", [1] * 200, max_tokens=2000)
    engine.run()
    assert engine.tokens["small"] == expected_output(prompt(1, 14), 6)


@pytest.mark.parametrize(("length", "fits"), [(510, True), (511, True), (512, False), (513, False)])
def test_one_position_is_kept_for_the_output(length: int, fits: bool) -> None:
    engine = Harness()
    if fits:
        engine.add("a", [1] * length, max_tokens=1)
        engine.run()
        assert len(engine.tokens["a"]) == 1
    else:
        with pytest.raises(PromptTooLong, match=f"{length} tokens.*512"):
            engine.add("a", [1] * length, max_tokens=1)


@pytest.mark.parametrize("bad", [[], [-1], [64], [3, 10**18]])
def test_bad_token_ids_are_refused_by_name(bad: list[int]) -> None:
    with pytest.raises(RequestError) as caught:
        Harness().add("a", bad)
    assert caught.value.param == "prompt" and caught.value.status == 400


def test_the_policy_changes_between_two_steps_and_running_requests_go_on() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=4))
    engine.add("a", prompt(1, 100), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.core.set_policy(Preemption(max_num_batched_tokens=16, max_num_seqs=1))
    assert engine.step() == [("a", 64, 16)]
    engine.run()
    assert engine.tokens["a"] == expected_output(prompt(1, 100), 30, ignore_eos=True)


def any_policy(draw: st.DrawFn) -> PolicyConfig:
    seqs = draw(st.integers(1, 8))
    budget = draw(st.sampled_from([8, 16, 33, 64]))
    choices: list[PolicyConfig] = [
        Preemption(max_num_batched_tokens=budget, max_num_seqs=seqs),
        Preemption(max_num_batched_tokens=budget, max_num_seqs=seqs, order="priority", watermark=0.1),
        Preemption(max_num_batched_tokens=budget, max_num_seqs=seqs, order="priority", aging_seconds=3.0),
        Retract(chunked_prefill_size=budget, max_num_seqs=seqs),
        Retract(chunked_prefill_size=budget, max_num_seqs=seqs, order="lpm", max_consecutive_prefills=2),
        Retract(chunked_prefill_size=budget, max_num_seqs=seqs, order="lof", prefill_max_requests=1),
        Retract(max_num_seqs=seqs, order="shortest-prefill", arbitration="adaptive"),
        Static(max_num_seqs=seqs),
    ]
    return draw(st.sampled_from(choices))


policies = st.composite(any_policy)()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_batched_chunked_cached_evicted_or_aborted_the_tokens_are_the_same(data: st.DataObject) -> None:
    """Random arrivals, lengths, shared prefixes and aborts on a tight pool; conservation is checked after each step."""
    engine = Harness(
        data.draw(policies),
        num_blocks=data.draw(st.integers(9, 40)),
        block_size=16,
        max_model_len=128,
        prefix=data.draw(st.booleans()),
        evict_every_steps=data.draw(st.sampled_from([0, 3])),
        drafts=data.draw(st.sampled_from([None, Guesses(4, 3), Guesses(2, 1), Guesses(5, 99)])),
        host_blocks=data.draw(st.sampled_from([0, 3, 20])),
        depth=data.draw(st.integers(0, 1)),
    )
    wanted: dict[str, list[int]] = {}
    for i in range(data.draw(st.integers(1, 12))):
        start = prompt(data.draw(st.integers(0, 2)), data.draw(st.sampled_from([1, 15, 16, 32, 48, 70])))
        max_tokens = data.draw(st.integers(1, 50))
        engine.add(f"r{i}", start, max_tokens, priority=data.draw(st.integers(-2, 2)))
        wanted[f"r{i}"] = expected_output(start, max_tokens)
        for _ in range(data.draw(st.integers(0, 6))):
            engine.step()
        if data.draw(st.integers(0, 9)) == 0:
            engine.core.set_policy(data.draw(policies))
        if data.draw(st.integers(0, 9)) == 0:
            engine.core.clear_prefix_cache()
        if data.draw(st.booleans()) and data.draw(st.booleans()) and engine.core.abort(f"r{i}"):
            wanted[f"r{i}"] = wanted[f"r{i}"][: len(engine.tokens[f"r{i}"])]
    engine.run()
    assert engine.tokens == wanted
