"""deployments.tokenizer: ids of raw prompts, exact bytes of tokens."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from deployments.tokenizer import Tokenizer, eos_ids
from engine.errors import ConfigError
from tests.fakes_http import ALPHA, COUNT, EMOJI
from tests.fakes_text import BOS, WRITABLE, save_tiny, unhurried


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.mark.parametrize(("text", "ids"), [(ALPHA, [504, 5073, 1658, 17638]), ("", []), ("<|im_end|>", [2])])
def test_a_raw_prompt_gets_no_bos_from_a_model_that_adds_none(tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize(("text", "count"), [(COUNT, 14), (EMOJI, 11)])
def test_golden_prompts_have_their_golden_lengths(tokenizer: Tokenizer, text: str, count: int) -> None:
    assert len(tokenizer.encode(text)) == count


def test_a_model_that_adds_bos_gives_a_raw_prompt_exactly_one(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save_tiny(tmp_path))
    assert tokenizer.encode("a")[0] == BOS
    assert tokenizer.encode("<s>a").count(BOS) == 1


@pytest.mark.parametrize(("setting", "expected"), [(True, [BOS]), (False, [])])
def test_add_bos_token_decides_over_the_post_processor(tmp_path: Path, setting: bool, expected: list[int]) -> None:
    ids = Tokenizer.load(save_tiny(tmp_path, add_bos_token=setting)).encode("a")
    assert [token for token in ids if token == BOS] == expected


@unhurried
@given(st.lists(st.integers(0, 49151), max_size=12))
def test_decoding_equals_the_library(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.backend.decode(ids, skip_special_tokens=False)


@unhurried
@given(WRITABLE)
def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@unhurried
@given(st.text())
def test_a_sentencepiece_vocabulary_has_exact_bytes_too(tiny: Tokenizer, text: str) -> None:
    body = tiny.encode(text)[1:]
    assert b"".join(map(tiny.token_bytes, body)) == (" " + text.replace("▁", " ")).encode() if text else body == []


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save_tiny(tmp_path_factory.mktemp("tiny")))


def test_parts_of_a_character_are_exact_bytes_with_distinct_names(tokenizer: Tokenizer) -> None:
    assert [list(tokenizer.token_bytes(token)) for token in (10813, 235, 119)] == [[240, 159], [145], [169]]
    assert tokenizer.token_name(10813) == r"bytes:\xf0\x9f"
    assert tokenizer.token_name(57) == "I"


def test_an_id_that_only_pads_the_vocabulary_has_no_bytes(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""


def test_no_token_has_more_characters_than_the_longest(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token == 81  # a line break and eighty spaces
    assert len(tokenizer.encode("\n" + " " * 80)) == 1


def test_eos_ids_come_from_both_configs_once(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert eos_ids(tmp_path) == (7, 5)
    assert eos_ids(tmp_path / "nowhere") == ()


def test_a_folder_without_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_vocabulary_without_bytes_is_a_configuration_error() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(backend, {})


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    turns = 0

    def turns_during_encoding() -> int:
        before = turns
        tokenizer.encode("some words, 123 " * 10_000)
        return turns - before

    async def run() -> int:
        nonlocal turns
        encoding = asyncio.create_task(asyncio.to_thread(turns_during_encoding))
        while not encoding.done():
            await asyncio.sleep(0)
            turns += 1
        return await encoding

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # a thread now runs only when another lets go of the interpreter by itself
    try:
        assert asyncio.run(run()) > 0
    finally:
        sys.setswitchinterval(interval)
