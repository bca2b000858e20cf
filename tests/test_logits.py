"""What requests ask of the logits, a rule per test, with transformers' own processors and plain loops as references."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.logits import Row, adjust
from engine.request import SamplingParams
from engine.sampler import sample

VOCAB = 50
NEVER = float("-inf")


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def adjusted(row: Row, seed: int = 0) -> torch.Tensor:
    changed = logits(seed=seed)
    adjust(changed, [row], {})
    return changed[0]


def looking_back(history: list[int], prompt_len: int, **options: float) -> Row:
    return Row(SamplingParams(**options), len(history), history=history, prompt_len=prompt_len)  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_looks_at_prompt_and_output_as_transformers_does(penalty: float) -> None:
    history = [3, 3, 7, 12, 7, 49]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([history]), logits())
    assert torch.equal(adjusted(looking_back(history, 3, repetition_penalty=penalty)), expected[0])


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    history, prompt_len = [3, 3, 7, 3, 9, 9, 9], 3
    changed = adjusted(looking_back(history, prompt_len, presence_penalty=0.5, frequency_penalty=0.25))
    counts = Counter(history[prompt_len:])
    for token, logit in enumerate(logits()[0]):
        penalty = counts[token] * 0.25 + (counts[token] > 0) * 0.5
        assert float(changed[token]) == pytest.approx(float(logit) - penalty, abs=1e-6)


def test_negative_penalties_invite_repetition() -> None:
    changed = adjusted(looking_back([5, 8], 1, presence_penalty=-2.0, frequency_penalty=-1.0))
    assert float(changed[8] - logits()[0, 8]) == pytest.approx(3.0)
    assert changed[5] == logits()[0, 5]


def test_a_bias_is_added_to_each_of_its_tokens() -> None:
    changed = adjusted(Row(SamplingParams(logit_bias=((4, 2.5), (9, -100.0), (4, 1.0))), 0))
    difference = changed - logits()[0]
    assert float(difference[4]) == pytest.approx(3.5) and float(difference[9]) == pytest.approx(-100.0)
    assert difference.count_nonzero() == 2


def test_a_ban_is_not_made_up_for_by_a_bias() -> None:
    changed = adjusted(Row(SamplingParams(logit_bias=((2, 100.0),)), 0, banned=(2,)))
    assert changed[2] == NEVER


def test_only_allowed_tokens_are_left() -> None:
    changed = adjusted(Row(SamplingParams(allowed_token_ids=(7, 3)), 0))
    assert (changed > NEVER).nonzero().flatten().tolist() == [3, 7]
    assert torch.equal(changed[[3, 7]], logits()[0, [3, 7]])


def test_if_all_that_is_allowed_is_held_back_it_is_chosen_all_the_same() -> None:
    changed = adjusted(Row(SamplingParams(allowed_token_ids=(7, 3)), 0, banned=(3, 7)))
    assert (changed > NEVER).nonzero().flatten().tolist() == [3, 7]
    changed = adjusted(Row(SamplingParams(allowed_token_ids=(7, 3)), 0, banned=(3,)))
    assert (changed > NEVER).nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize(
    ("history", "banned"), [([], [9]), ([5], [9]), ([1], [2, 9]), ([4, 1], [2, 9]), ([1, 2], [3, 9]), ([2, 2], [9])]
)
def test_a_bad_word_is_never_completed(history: list[int], banned: list[int]) -> None:
    params = SamplingParams(bad_words=((9,), (1, 2), (1, 2, 3)))
    changed = adjusted(Row(params, len(history), history=history))
    assert (changed == NEVER).nonzero().flatten().tolist() == banned


ROWS = st.builds(
    lambda history, cut, **options: looking_back(history, min(cut, len(history)), **options),
    st.lists(st.integers(0, VOCAB - 1), max_size=12),
    st.integers(0, 12),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logit_bias=st.sampled_from([(), ((3, 1.5), (4, -2.0))]),
    bad_words=st.sampled_from([(), ((5,), (6, 7))]),
    allowed_token_ids=st.sampled_from([None, (1, 2, 3)]),
    temperature=st.sampled_from([0.0, 0.9]),
    seed=st.integers(0, 5),
)


@given(st.lists(ROWS, min_size=1, max_size=6))
def test_a_row_is_changed_and_sampled_as_if_it_were_alone(rows: list[Row]) -> None:
    together = logits(len(rows))
    alone = [together[index : index + 1].clone() for index in range(len(rows))]
    tokens = sample(together, rows).tolist()
    for index, row in enumerate(rows):
        assert sample(alone[index], [row]).tolist() == [tokens[index]]
        assert torch.equal(alone[index][0], together[index])


def test_rows_that_ask_for_nothing_keep_their_logits() -> None:
    changed = logits(2)
    adjust(changed, [Row(SamplingParams(), 0), looking_back([1], 0, presence_penalty=1.0)], {})
    assert torch.equal(changed[0], logits(2)[0]) and not torch.equal(changed[1], logits(2)[1])
