"""deployments.detokenize: text that is final, and stop strings that never show."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.detokenize import Detokenizer, StopStrings
from deployments.tokenizer import Tokenizer
from tests.fakes_http import ALPHA_IDS, EMOJI_IDS
from tests.fakes_text import WRITABLE, save_tiny, unhurried


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.finish()]


def test_a_character_split_over_tokens_arrives_whole(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, EMOJI_IDS) == ["\n", "\n", "", "", "👩", "", "", "👩", ""]


def test_an_unfinished_character_is_a_replacement_only_at_the_end(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, EMOJI_IDS[:4]) == ["\n", "\n", "", "", "\ufffd"]


def test_an_invalid_byte_is_a_replacement_once_the_next_token_cannot_complete_it(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [10813, 57]) == ["", "\ufffdI", ""]


def test_a_first_token_that_completes_the_prompts_character_is_a_replacement(tokenizer: Tokenizer) -> None:
    """The prompt's own text never comes again."""
    assert "".join(pieces(tokenizer, [126, 10813, 235, 118])) == "\ufffd👨"


@unhurried
@given(st.lists(st.integers(0, 49151), max_size=20), st.booleans())
def test_joined_pieces_are_the_text_of_all_tokens_at_once(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@unhurried
@given(WRITABLE)
def test_pieces_of_valid_text_never_hold_a_replacement(tokenizer: Tokenizer, text: str) -> None:
    shown = pieces(tokenizer, tokenizer.encode(text), skip_special_tokens=False)
    assert "".join(shown) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)


def test_special_tokens_show_only_when_asked_for(tokenizer: Tokenizer) -> None:
    ids = [4461, 30, 2, 198, 1, 520, 9531, 198]
    assert "".join(pieces(tokenizer, ids)) == " blue.\nassistant\n"
    shown = pieces(tokenizer, ids, skip_special_tokens=False)
    assert "".join(shown) == " blue.<|im_end|>\n<|im_start|>assistant\n"


def test_leading_spaces_of_sentencepiece_tokens_stay(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tiny(tmp_path))
    [token] = tokenizer.encode("a")[1:]
    assert pieces(tokenizer, [token, token]) == [" a", " a", ""]


def run(stops: list[str], texts: list[str], min_tokens: int = 0) -> tuple[list[str], StopStrings]:
    """What each text shows, up to a match, and the flush."""
    stop_strings = StopStrings(stops, min_tokens)
    shown = []
    for text in texts:
        shown.append(stop_strings.feed(text))
        if stop_strings.matched:
            break
    return [*shown, stop_strings.flush()], stop_strings


LETTERS = ["DEF", "GH", "I", "J", "K"]


@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        (["EFG"], "D", 2),
        (["H"], "DEFG", 2),
        (["G", "H"], "DEF", 2),
        (["H", "G"], "DEF", 2),
        (["FGHI"], "DE", 3),
        (["DEFGHIJ"], "", 4),
        (["K"], "DEFGHIJ", 5),
    ],
)
def test_the_earliest_stop_cuts_wherever_tokens_begin_and_end(stops: list[str], text: str, tokens: int) -> None:
    shown, stop_strings = run(stops, LETTERS)
    assert ("".join(shown), stop_strings.matched, stop_strings.tokens) == (text, True, tokens)


def test_of_stops_completed_by_one_token_the_one_that_begins_first_cuts() -> None:
    assert run(["b", "abc"], ["xabc"])[0] == ["x", ""]


def test_nothing_that_could_begin_a_stop_is_shown_early() -> None:
    assert run(["7, 8"], [" ", "6", ",", " ", "7", ",", " ", "9"])[0] == [" ", "6", ",", " ", "", "", "", "7, 9", ""]


def test_held_text_comes_out_at_the_end() -> None:
    assert run(["8,9"], ["7, ", "8"])[0] == ["7, ", "", "8"]


def test_a_repeating_stop_is_found_at_every_shift() -> None:
    assert "".join(run(["aab"], list("aaab"))[0]) == "a"
    assert "".join(run(["aabaaac"], list("aabaaabaaac"))[0]) == "aaba"
    assert "".join(run(["abab!"], list("ababab!x"))[0]) == "ab"


def test_a_stop_before_min_tokens_is_ordinary_text() -> None:
    assert "".join(run(["a"], list("abab"), min_tokens=3)[0]) == "ab"
    assert run(["aa"], list("aab"), min_tokens=3)[0] == ["", "a", "ab", ""]


AB = st.text("ab", min_size=1, max_size=8)


@unhurried
@given(st.lists(AB, max_size=4), st.lists(st.text("ab", max_size=5), max_size=12))
def test_stops_equal_a_search_of_the_whole_text_after_each_token(stops: list[str], texts: list[str]) -> None:
    expected, tokens = "".join(texts), len(texts)
    for count in range(1, len(texts) + 1):
        begins = [at for stop in stops if (at := "".join(texts[:count]).find(stop)) >= 0]
        if begins:
            expected, tokens = "".join(texts[:count])[: min(begins)], count
            break
    shown, stop_strings = run(stops, texts)
    assert ("".join(shown), stop_strings.tokens) == (expected, tokens)


@unhurried
@given(st.lists(AB, min_size=1, max_size=4), st.lists(st.text("abc", max_size=5), max_size=12))
def test_no_more_is_held_than_could_begin_a_stop(stops: list[str], texts: list[str]) -> None:
    shown, _ = run(stops, texts)
    held = shown[-1]
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_held_text_is_as_short_as_the_stop_however_long_the_answer() -> None:
    stop_strings = StopStrings(["x" * 1000])
    shown = sum(len(stop_strings.feed("x" * 999 + "y")) for _ in range(1000))
    assert shown == 1000 * 1000
    assert stop_strings.flush() == ""


def test_golden_letters_stop_inside_a_token(tokenizer: Tokenizer) -> None:
    texts = pieces(tokenizer, ALPHA_IDS)
    assert "".join(run(["FGHIJKL"], texts)[0]) == "DE"
