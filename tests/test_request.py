"""engine.request: what sampling parameters may be."""

import pytest

from engine.errors import RequestError
from engine.request import SamplingParams


@pytest.mark.parametrize("count", [None, 0, 64])
def test_draft_tokens_run_from_0_to_64_or_are_left_to_the_engine(count: int | None) -> None:
    assert SamplingParams(draft_tokens=count).draft_tokens == count


@pytest.mark.parametrize("count", [-1, 65])
def test_draft_tokens_out_of_range_are_refused_by_name(count: int) -> None:
    with pytest.raises(RequestError, match=f"draft_tokens is {count}; it must be between 0 and 64") as caught:
        SamplingParams(draft_tokens=count)
    assert caught.value.param == "draft_tokens"
