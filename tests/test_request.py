"""engine.request: what sampling parameters may be."""

import pytest

from engine.errors import RequestError
from engine.intake import Limits, check
from engine.request import SamplingParams


@pytest.mark.parametrize("count", [None, 0, 64])
def test_draft_tokens_run_from_0_to_64_or_are_left_to_the_engine(count: int | None) -> None:
    assert SamplingParams(draft_tokens=count).draft_tokens == count


@pytest.mark.parametrize("count", [-1, 65])
def test_draft_tokens_out_of_range_are_refused_by_name(count: int) -> None:
    with pytest.raises(RequestError, match=f"draft_tokens is {count}; it must be between 0 and 64") as caught:
        SamplingParams(draft_tokens=count)
    assert caught.value.param == "draft_tokens"


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("stop_token_ids", SamplingParams(stop_token_ids=(3, 64))),
        ("logit_bias", SamplingParams(logit_bias=((64, 5.0),))),
        ("logit_bias", SamplingParams(logit_bias=((-1, 5.0),))),
        ("bad_words", SamplingParams(bad_words=((1,), (2, 10**9)))),
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(64,))),
    ],
)
def test_ids_out_of_the_vocabulary_are_refused_by_name(name: str, params: SamplingParams) -> None:
    limits = Limits(max_model_len=100, kv_tokens=100, vocab_size=64)
    with pytest.raises(RequestError, match="out of vocabulary: ids run from 0 to 63") as caught:
        check([1, 2], params, limits)
    assert caught.value.param == name
