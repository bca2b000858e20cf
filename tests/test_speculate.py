"""Guesses from the text itself, a rule per test, and a slow reference that finds the same places."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from engine.speculate import LOOK_BACK, NO_DRAFTS, AdaptivePace, DraftConfig, NGramDrafts, NGramIndex, NoDrafts

CONFIG: TypeAdapter[NoDrafts | NGramDrafts] = TypeAdapter(DraftConfig)


def guess(tokens: Sequence[int], room: int = 9, **config: int) -> list[int]:
    return list(NGramDrafts(**{"max_draft_tokens": 8, **config}).drafter(None).propose(tokens, room))


def reference(tokens: Sequence[int], shortest: int, longest: int) -> int | None:
    """Tries every place, the most recent first, among the latest LOOK_BACK where the shortest run fits."""
    ends = [
        end
        for end in range(len(tokens) - 1, shortest - 1, -1)
        if tokens[end - shortest : end] == tokens[len(tokens) - shortest :]
    ][:LOOK_BACK]
    if len(tokens) < shortest or not ends:
        return None

    def length(end: int) -> int:
        return max(n for n in range(shortest, longest + 1) if n <= end and tokens[end - n : end] == tokens[-n:])

    return max(ends, key=lambda end: (length(end), end))


def test_what_followed_the_last_tokens_before_follows_again() -> None:
    assert guess([1, 2, 3, 4, 5, 9, 1, 2, 3]) == [4, 5, 9, 1, 2, 3, 4, 5]


def test_a_period_is_continued_beyond_the_end_of_the_text() -> None:
    assert guess([7, 1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert guess([5, 5, 5]) == [5] * 8


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    """[2, 3] stood before 8 and before 9; [1, 2, 3] only before 8."""
    assert guess([1, 2, 3, 8, 0, 2, 3, 9, 1, 2, 3], max_draft_tokens=1) == [8]


def test_of_equal_matches_the_most_recent_wins() -> None:
    assert guess([2, 3, 8, 0, 2, 3, 9, 4, 2, 3], max_draft_tokens=1) == [9]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4], [1, 2, 2, 1]])
def test_nothing_is_guessed_where_nothing_stood_before(tokens: list[int]) -> None:
    assert guess(tokens) == []


def test_a_draft_is_no_longer_than_there_is_room() -> None:
    assert guess([1, 2, 3, 1, 2], room=2) == [3, 1]
    assert guess([1, 2, 3, 1, 2], room=0) == []
    assert guess([1, 2, 3, 1, 2], room=-1) == []


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=15), st.integers(1, 3), st.integers(0, 3))
def test_an_index_that_grows_bit_by_bit_finds_what_a_search_of_the_whole_text_finds(
    pieces: list[list[int]], shortest: int, more: int
) -> None:
    index, tokens = NGramIndex(shortest, shortest + more), list[int]()
    for piece in pieces:
        tokens += piece
        assert index.find(tokens) == reference(tokens, shortest, shortest + more)


def test_a_request_may_ask_for_fewer_and_never_gets_more() -> None:
    config = NGramDrafts(max_draft_tokens=4)
    assert [config.drafter(most).most for most in (None, 2, 9)] == [4, 2, 4]
    assert config.drafter(0) is NO_DRAFTS and NoDrafts().drafter(5) is NO_DRAFTS


def test_a_steady_drafter_learns_nothing() -> None:
    drafter = NGramDrafts(max_draft_tokens=4, adaptive=False).drafter(None)
    for _ in range(9):
        drafter.learn(4, 0, 1)
    assert drafter.most == 4


def test_right_guesses_double_the_length_and_wrong_ones_cut_it() -> None:
    pace = AdaptivePace(16)
    seen = []
    for drafted, accepted in ((16, 2), (3, 3), (6, 6), (12, 12), (16, 0)):
        pace.learn(drafted, accepted, accepted + 1)
        seen.append(pace.most)
    assert seen == [3, 6, 12, 16, 1]


def test_two_failures_are_followed_by_a_rest_and_each_later_one_by_twice_as_long_a_rest() -> None:
    pace = AdaptivePace(4)
    rests = []
    pace.learn(4, 0, 1)
    assert pace.most == 1
    for _ in range(7):
        pace.learn(1, 0, 1)
        rests.append(0)
        while pace.most == 0:
            pace.learn(0, 0, 1)
            rests[-1] += 1
        assert pace.most == 1
    assert rests == [16, 32, 64, 128, 256, 256, 256]


def test_one_right_guess_forgets_all_failures() -> None:
    pace = AdaptivePace(4)
    for _ in range(3):
        pace.learn(1, 0, 1)
        pace.learn(0, 0, 300)
    pace.learn(1, 1, 2)
    pace.learn(2, 0, 1)
    assert pace.most == 1  # the first failure again
    pace.learn(1, 0, 1)
    pace.learn(0, 0, 15)
    assert pace.most == 0
    pace.learn(0, 0, 1)
    assert pace.most == 1


def test_the_configuration_is_chosen_by_its_kind() -> None:
    assert CONFIG.validate_python({"kind": "none"}) == NoDrafts()
    assert CONFIG.validate_python({"kind": "ngram", "max_draft_tokens": 3}) == NGramDrafts(max_draft_tokens=3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"kind": "ngram", "min_match": 5, "max_match": 3}, r"min_match \(5\) must be at most max_match \(3\)"),
        ({"kind": "ngram", "max_draft_tokens": 0}, "max_draft_tokens"),
        ({"kind": "ngram", "max_draft_tokens": 65}, "max_draft_tokens"),
        ({"kind": "ngram", "n": 3}, "n\n"),
        ({"kind": "eagle"}, "eagle"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CONFIG.validate_python(bad)
