"""Policy `static`, a rule per test: a batch is formed, nobody joins, and what that wastes is counted."""

import pytest
from pydantic import ValidationError

from engine.policies import Preemption, Static
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import Scene, evicted, prompt, ran, until


def three(**options: int) -> Harness:
    """Prompts of 10, 20 and 30 tokens that make 2, 4 and 6 tokens; a step for each token."""
    engine = Harness(Static.model_validate(options))
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 10 + 10 * i), max_tokens=2 + 2 * i, ignore_eos=True)
    return engine


def test_a_batch_is_formed_whole_and_in_order_of_arrival() -> None:
    assert three().step() == [("r0", 0, 10), ("r1", 0, 20), ("r2", 0, 30)]


def test_the_batch_is_as_large_as_max_num_seqs() -> None:
    engine = three(max_num_seqs=2)
    assert engine.step() == [("r0", 0, 10), ("r1", 0, 20)]


def test_nobody_joins_until_the_last_member_is_done() -> None:
    """r0 ends after 2 steps, r1 after 4, r2 after 6; the newcomer, there from step 2 on, runs in step 7."""
    engine = three()
    engine.step()
    engine.add("new", prompt(5, 5), max_tokens=1)
    sizes = [len(engine.step()) for _ in range(5)]
    assert sizes == [3, 2, 2, 1, 1]
    assert engine.step() == [("new", 0, 5)]


def test_prompts_are_not_cut_however_long() -> None:
    scene = Scene(Static(), usable=100)
    scene.waits("long", 1500)
    assert ran(scene.plan()) == [("long", 1500)]


def test_kv_is_reserved_for_prompt_and_output_up_front() -> None:
    """10 blocks; each may grow to 4. The third would fit with its prompt of one block, and is not taken."""
    engine = Harness(Static(), num_blocks=11, max_model_len=160)
    for i in range(3):
        engine.add(f"r{i}", prompt(i, 16), max_tokens=48, ignore_eos=True)
    assert engine.step() == [("r0", 0, 16), ("r1", 0, 16)]


@pytest.mark.parametrize(("max_tokens", "size"), [(32, 2), (33, 1)])
def test_a_batch_may_fill_the_pool_to_the_last_block(max_tokens: int, size: int) -> None:
    scene = Scene(Static(), usable=8)
    scene.waits("a", 64)
    scene.waits("b", 16, max_tokens=max_tokens)
    assert len(scene.plan().chunks) == size


def test_a_request_that_does_not_fit_the_batch_keeps_later_ones_out() -> None:
    scene = Scene(Static(), usable=8)
    scene.waits("a", 64)
    scene.waits("b", 64)
    scene.waits("c", 5)
    assert ran(scene.plan()) == [("a", 64)]


def test_one_request_may_take_the_whole_pool() -> None:
    engine = Harness(Static(), num_blocks=11, max_model_len=160)
    engine.add("a", prompt(1, 100), max_tokens=60, ignore_eos=True)
    engine.run()
    assert engine.tokens["a"] == expected_output(prompt(1, 100), 60, ignore_eos=True)


def test_nobody_is_ever_evicted() -> None:
    engine = Harness(Static(), num_blocks=11, max_model_len=160)
    for i in range(9):
        engine.add(f"r{i}", prompt(i, 20), max_tokens=60, ignore_eos=True)
    engine.run()
    assert engine.scheduler.num_evictions == 0
    assert all(engine.tokens[f"r{i}"] == expected_output(prompt(i, 20), 60, ignore_eos=True) for i in range(9))


def test_padding_is_what_the_prompts_lack_to_the_longest() -> None:
    """20 + 10 + 0 beside 10 + 20 + 30."""
    engine = three()
    engine.step()
    assert engine.scheduler.notes["prompt_tokens"] == 60
    assert engine.scheduler.notes["padded_tokens"] == 30


def test_rows_of_finished_members_idle_until_the_batch_ends() -> None:
    """6 steps of 3 rows; r0's row idles in 4 of them and r1's in 2."""
    engine = three()
    engine.run()
    assert engine.scheduler.notes["row_steps"] == 18
    assert engine.scheduler.notes["idle_row_steps"] == 6


def test_rows_count_anew_with_each_batch() -> None:
    """2 rows for 4 steps, r0 idle in 2; then 1 row for 6 steps."""
    engine = three(max_num_seqs=2)
    engine.run()
    assert engine.scheduler.notes["row_steps"] == 2 * 4 + 6
    assert engine.scheduler.notes["idle_row_steps"] == 2


def test_reserved_blocks_that_were_not_used_are_counted_when_the_batch_ends() -> None:
    """a reserves 110 tokens, 7 blocks, and is aborted with 13, in 1; b reserves and uses 2."""
    engine = Harness(Static())
    engine.add("a", prompt(1, 10), max_tokens=100, ignore_eos=True)
    engine.add("b", prompt(2, 20), max_tokens=3, ignore_eos=True)
    for _ in range(3):
        engine.step()
    engine.core.abort("a")
    assert "unused_kv_blocks" not in engine.scheduler.notes
    engine.add("next", prompt(3, 5))
    engine.step()
    assert engine.scheduler.notes["reserved_kv_blocks"] == 9
    assert engine.scheduler.notes["unused_kv_blocks"] == 6


def test_members_share_cached_prefixes() -> None:
    scene = Scene(Static(), usable=30)
    scene.remembers(scene.waits("a", 64), 32)
    assert ran(scene.plan()) == [("a", 32)]


def test_requests_that_another_policy_admitted_run_on_and_nobody_joins() -> None:
    engine = Harness(Preemption(max_num_batched_tokens=64))
    engine.add("a", prompt(1, 100), max_tokens=4, ignore_eos=True)
    engine.step()
    engine.core.set_policy(Static())
    engine.add("b", prompt(2, 10), max_tokens=2, ignore_eos=True)
    assert engine.step() == [("a", 64, 36)]
    assert until(engine, "b") == [("b", 0, 10)]


def test_of_those_whom_another_policy_admitted_who_does_not_fit_starts_anew() -> None:
    """Two hold the 10 blocks and need one more each: the first gives its own back, the second goes on with one."""
    engine = Harness(Preemption(), num_blocks=11, max_model_len=160)
    for name in ("r0", "r1"):
        engine.add(name, prompt(int(name[1]), 80), max_tokens=20, ignore_eos=True)
    engine.step()
    engine.core.set_policy(Static())
    assert engine.step() == [("r1", 80, 1)]
    engine.run()
    assert engine.scheduler.num_evictions == 1
    for name in ("r0", "r1"):
        assert engine.tokens[name] == expected_output(prompt(int(name[1]), 80), 20, ignore_eos=True)


def test_foreign_rows_do_not_count_as_rows_of_a_batch() -> None:
    scene = Scene(Static(), usable=30)
    scene.runs("foreign", 20, 1)
    step = scene.plan()
    assert evicted(step) == []
    assert step.notes["row_steps"] == step.notes["idle_row_steps"] == 0


@pytest.mark.parametrize(
    ("field", "value"), [("max_num_seqs", 0), ("max_num_batched_tokens", 512), ("kind", "dynamic")]
)
def test_a_wrong_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        Static.model_validate({field: value})
