"""deployments.choices: an engine may give several tokens at once; what a client sees does not tell."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.choices import Choice, Delta, Style, join
from deployments.client import Submission
from deployments.tokenizer import Tokenizer
from engine.request import FinishReason, Logprob, Output, SamplingParams
from tests.fakes_http import ALPHA_IDS, BLUE_IDS, COUNT_IDS, EMOJI_IDS
from tests.fakes_text import unhurried


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def play(tokenizer: Tokenizer, bursts: list[list[int]], stop: tuple[str, ...] = ()) -> tuple[Choice, Delta]:
    """A choice and all it shows, when the engine gives `bursts` one after the other and ends for length."""
    choice = Choice(0, Submission("r", [1000], SamplingParams(max_tokens=100)), Style(stop=stop), tokenizer)
    deltas = []
    for burst in bursts:
        reason = FinishReason.LENGTH if burst is bursts[-1] else None
        logprobs = [Logprob(token, -1.0) for token in burst]
        deltas.append(choice.feed(Output("r", tuple(burst), logprobs=logprobs, finish_reason=reason)))
        if choice.finish_reason:
            break
    return choice, join(delta for delta in deltas if delta)


def test_tokens_behind_a_stop_string_are_neither_shown_nor_counted(tokenizer: Tokenizer) -> None:
    choice, shown = play(tokenizer, [ALPHA_IDS[:8]], ("HIJ",))
    assert (shown.text, shown.finish_reason, choice.completion_tokens) == ("DEFG", FinishReason.STOP, 4)
    assert shown.tokens == ALPHA_IDS[:4]
    assert [row.text for row in shown.rows] == ["DEF", "GH"]


@unhurried
@given(
    st.sampled_from([ALPHA_IDS, COUNT_IDS, BLUE_IDS, EMOJI_IDS, EMOJI_IDS[:7]]),
    st.lists(st.sampled_from(["H", "EFGHI", " 1", "8, 9", "👩", "\n\n", "e.\nas"]), max_size=4),
    st.data(),
)
def test_what_is_shown_does_not_depend_on_how_tokens_are_grouped(
    tokenizer: Tokenizer, ids: list[int], stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(ids) - 1))))
    bursts = [ids[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    grouped, shown = play(tokenizer, bursts, tuple(stops))
    single, expected = play(tokenizer, [[token] for token in ids], tuple(stops))
    assert shown == expected
    assert grouped.completion_tokens == single.completion_tokens
