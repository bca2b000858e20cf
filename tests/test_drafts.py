"""Guessed tokens in the scheduler, a rule per test: they save steps, and change nothing else."""

from collections.abc import Sequence

import pytest

from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.request import FinishReason, SamplingParams
from engine.speculate import Drafter
from tests.fakes import EOS, VOCAB, Guesses, expected_output, next_token
from tests.harness import Harness
from tests.scenarios import endless, prompt

POLICIES: list[PolicyConfig] = [Preemption(max_num_batched_tokens=64, max_num_seqs=8), Retract(), Static()]


class Scripted:
    """Each draft is right in its first `right` guesses, and `length` long."""

    def __init__(self, right: int, length: int) -> None:
        self.right, self.length = right, length
        self.learnt: list[tuple[int, int, int]] = []

    def drafter(self, most: int | None) -> Drafter:
        return self

    @property
    def most(self) -> int:
        return self.length

    def propose(self, tokens: Sequence[int], room: int) -> Sequence[int]:
        known = list(tokens)
        for index in range(min(self.length, room)):
            known.append(next_token(known) if index < self.right else VOCAB - 1)
        return known[len(tokens) :]

    def learn(self, drafted: int, accepted: int, sampled: int) -> None:
        self.learnt.append((drafted, accepted, sampled))


def lengths(engine: Harness) -> list[int]:
    return [length for step in engine.memory.steps for _, _, length in step]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.kind}")
def test_right_guesses_save_steps(policy: PolicyConfig) -> None:
    """Of 25 tokens the first comes with the prompt, then 4 a step: one sampled behind three guesses."""
    engine = Harness(policy, drafts=Scripted(right=3, length=3))
    start = endless(1, 20, 25)
    engine.add("a", start, max_tokens=25)
    engine.run()
    assert engine.tokens["a"] == expected_output(start, 25)
    assert lengths(engine) == [20] + [4] * 6


@pytest.mark.parametrize("right", [0, 1, 2])
def test_wrong_guesses_are_rolled_back_and_the_right_ones_before_them_stay(right: int) -> None:
    drafts = Scripted(right, length=3)
    engine = Harness(drafts=drafts)
    start = endless(1, 20, 13)
    engine.add("a", start, max_tokens=13)
    engine.run()
    assert engine.tokens["a"] == expected_output(start, 13)
    assert drafts.learnt[1] == (3, right, right + 1)
    starts = [begin for step in engine.memory.steps for _, begin, _ in step]
    assert starts[1:4] == [20, 21 + right, 22 + 2 * right]


def test_guesses_that_were_computed_and_accepted_are_counted() -> None:
    engine = Harness(drafts=Scripted(right=1, length=3))
    engine.add("a", endless(1, 20, 9), max_tokens=9)
    engine.run()
    assert engine.scheduler.notes["draft_tokens"] == 3 + 3 + 3 + 1
    assert engine.scheduler.notes["accepted_draft_tokens"] == 4


def test_nothing_is_guessed_in_the_middle_of_a_prompt() -> None:
    """Prompt 80, budget 50: 50, then 30, then 1 and 3 guesses."""
    engine = Harness(Preemption(max_num_batched_tokens=50, max_num_seqs=8), drafts=Scripted(right=3, length=3))
    engine.add("a", endless(1, 80, 9), max_tokens=9)
    engine.run()
    assert lengths(engine) == [50, 30, 4, 4]


def test_a_token_budget_cuts_guesses() -> None:
    """Budget 6: each of two decodes is granted 1 + 3, in turn; the second gets what is left."""
    engine = Harness(Preemption(max_num_batched_tokens=6, max_num_seqs=6), drafts=Scripted(right=3, length=3))
    engine.add("a", endless(1, 3, 13), max_tokens=13)
    engine.add("b", endless(2, 3, 13), max_tokens=13)
    engine.run()
    assert engine.memory.steps[1] == [("a", 3, 4), ("b", 3, 2)]
    assert engine.tokens["b"] == expected_output(endless(2, 3, 13), 13)


def test_no_more_is_guessed_than_max_tokens_allows() -> None:
    """One token is left: a guess before it would be in vain."""
    engine = Harness(drafts=Scripted(right=5, length=5))
    engine.add("a", endless(1, 20, 4), max_tokens=4)
    engine.add("b", endless(1, 20, 4), max_tokens=2)
    engine.run()
    assert engine.memory.drafted == [("a", 2)]
    assert len(engine.tokens["a"]) == 4 and len(engine.tokens["b"]) == 2


def test_a_request_that_fills_the_longest_sequence_still_drafts_within_it() -> None:
    engine = Harness(num_blocks=5, max_model_len=64, drafts=Scripted(right=9, length=9))
    start = endless(1, 40, 24)
    engine.add("a", start, max_tokens=24)
    engine.run()
    assert engine.tokens["a"] == expected_output(start, 24)


def test_guesses_never_evict_anybody() -> None:
    """Both fit to their end in 6 blocks of 7, guesses do not always: then they are left out, and nobody has to go."""
    engine = Harness(num_blocks=8, max_model_len=96, drafts=Guesses(8, 2))
    for name in ("a", "b"):
        engine.add(name, endless(ord(name), 30, 18), max_tokens=18)
    engine.run()
    assert engine.scheduler.num_evictions == 0
    assert engine.memory.drafted


def test_a_guess_does_not_take_the_block_that_another_needs() -> None:
    """One block is free. The first would guess into it; the second must have it for its next token."""
    engine = Harness(num_blocks=6, max_model_len=64, drafts=Scripted(right=3, length=3))
    engine.add("guesses", endless(1, 30, 10), max_tokens=10)
    engine.add("needs", endless(2, 32, 2), max_tokens=2)
    engine.step()
    assert engine.step() == [("guesses", 30, 1), ("needs", 32, 1)]
    engine.run()
    assert engine.scheduler.num_evictions == 0 and engine.memory.drafted


def test_a_request_may_ask_for_fewer_guesses_or_none() -> None:
    engine = Harness(drafts=Guesses(4, 99))
    for name, most in (("two", 2), ("none", 0), ("all", None)):
        params = SamplingParams(max_tokens=20, temperature=0.0, draft_tokens=most)
        engine.core.add(name, endless(3, 20, 20), params)
        engine.tokens[name] = []
    engine.run()
    assert {name: max(n for who, n in engine.memory.drafted if who == name) for name in ("two", "all")} == {
        "two": 2,
        "all": 4,
    }
    assert "none" not in {who for who, _ in engine.memory.drafted}


def eos_inside_a_draft() -> list[int]:
    """A prompt after which EOS is the third to fifth token."""
    starts = ([seed % 60, seed // 60, *prompt(4, 18)] for seed in range(2000))
    return next(start for start in starts if EOS in expected_output(start, 6)[2:5])


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_behind_a_stop_among_the_guesses_are_never_delivered(depth: int) -> None:
    start = eos_inside_a_draft()
    engine = Harness(drafts=Scripted(right=5, length=5), depth=depth)
    engine.add("a", start, max_tokens=12)
    engine.run()
    assert engine.tokens["a"] == expected_output(start, 12) and engine.tokens["a"][-1] == EOS
    assert engine.last["a"].finish_reason is FinishReason.STOP
    assert engine.core.stats().generated_tokens == len(engine.tokens["a"])


def test_a_stop_token_id_among_the_guesses_wins_over_the_length_behind_it() -> None:
    start = endless(5, 20, 6)
    output = expected_output(start, 6)
    stop = output[3]
    first = output.index(stop) + 1
    engine = Harness(drafts=Scripted(right=5, length=5))
    engine.core.add("a", start, SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(stop,)))
    engine.tokens["a"] = []
    engine.run()
    assert engine.tokens["a"] == output[:first]
    assert (engine.last["a"].finish_reason, engine.last["a"].stop_token) == (FinishReason.STOP, stop)


def test_an_evicted_request_forgets_its_guess() -> None:
    engine = Harness(drafts=Scripted(right=3, length=3), evict_every_steps=2)
    start = endless(1, 20, 25)
    engine.add("a", start, max_tokens=25)
    engine.run()
    assert engine.tokens["a"] == expected_output(start, 25)


def test_blocks_of_wrong_guesses_are_never_published() -> None:
    """Every draft runs over a block's border with wrong tokens; the next turn finds only what was confirmed."""
    engine = Harness(prefix=True, drafts=Scripted(right=0, length=20))
    start = endless(1, 20, 30)
    engine.add("a", start, max_tokens=30)
    engine.run()
    history = start + engine.tokens["a"]
    engine.add("next", [*history, 1, 2, 3], max_tokens=4)
    engine.run()
    assert engine.last["next"].cached_tokens == 48
    assert engine.tokens["next"] == expected_output([*history, 1, 2, 3], 4)
