"""Log probabilities as both endpoints show them."""

from pathlib import Path

import pytest

from deployments.http import create_app
from deployments.served import ServedModel
from tests.fakes_http import ALPHA, EMOJI, ScriptedEngine
from tests.fakes_text import save_tiny
from tests.http_client import HI, Api, choice, client, events, ok

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio


async def test_echo_scores_a_prompt_without_generating(api: Api) -> None:
    answer = ok(await api.complete(ALPHA, max_tokens=0, echo=True, logprobs=1))
    (scored,) = answer["choices"]
    assert (scored["text"], scored["finish_reason"]) == (ALPHA, "length")
    assert answer["usage"]["completion_tokens"] == 0
    assert scored["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert [len(values) for values in scored["logprobs"].values()] == [4, 4, 4, 4]


async def test_echoed_tokens_and_offsets_add_up_to_the_text(api: Api) -> None:
    prompt = "\n2. Dora owns 7 cafés 🌶"
    answer = ok(await api.complete(prompt, max_tokens=2, echo=True, logprobs=1))
    (echoed,) = answer["choices"]
    rows = echoed["logprobs"]
    assert "".join(rows["tokens"]) == echoed["text"] == prompt + " 6"
    offsets = [len("".join(rows["tokens"][:count])) for count in range(len(rows["tokens"]))]
    assert rows["text_offset"] == offsets
    assert len(rows["tokens"]) == answer["usage"]["total_tokens"]
    assert [index for index, value in enumerate(rows["token_logprobs"]) if value is None] == [0]
    assert rows["top_logprobs"][0] is None


async def test_completion_logprobs_0_gives_the_chosen_tokens_alone(api: Api) -> None:
    rows = choice(await api.complete(ALPHA, max_tokens=3, logprobs=0))["logprobs"]
    assert rows == {
        "tokens": ["DEF", "GH", "I"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [None] * 3,
        "text_offset": [0, 3, 5],
    }


async def test_chat_logprobs_have_as_many_alternatives_as_asked_for(api: Api) -> None:
    for count, fields in ((0, {}), (0, {"top_logprobs": 0}), (2, {"top_logprobs": 2})):
        rows = choice(await api.chat(max_tokens=3, logprobs=True, **fields))["logprobs"]["content"]
        assert [len(row["top_logprobs"]) for row in rows] == [count] * 3
        assert {"token": " ", "logprob": -0.5, "bytes": [32]}.items() <= rows[0].items()


async def test_chat_logprobs_false_is_null(api: Api) -> None:
    assert choice(await api.chat(max_tokens=3, logprobs=False))["logprobs"] is None


async def test_bytes_of_split_characters_are_exact(served: ServedModel, engine: ScriptedEngine, api: Api) -> None:
    engine.scripts[tuple(served.template.encode(HI))] = [198, 198, 10813, 235, 119, 2]
    (answer,) = ok(await api.chat(logprobs=True))["choices"]
    rows = answer["logprobs"]["content"]
    assert [row["bytes"] for row in rows] == [[10], [10], [240, 159], [145], [169], []]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == answer["message"]["content"] == "\n\n👩"


async def test_rows_of_a_split_character_come_with_the_character(api: Api) -> None:
    chunks = events(await api.complete(EMOJI, max_tokens=5, logprobs=1, stream=True))
    assert [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks] == [["\n"], ["\n"], ["", "", "👩"]]


async def test_rows_are_cut_with_the_text(api: Api) -> None:
    for stop, tokens in (("EFG", ["DEF"]), ("HI", ["DEF", "GH"]), ("IJ", ["DEF", "GH"]), ("DEFGHI", [])):
        rows = choice(await api.complete(ALPHA, max_tokens=8, logprobs=1, stop=stop))["logprobs"]
        assert rows["tokens"] == tokens


@pytest.mark.parametrize("logprob", [float("-inf"), float("nan"), -1e9])
async def test_a_logprob_that_json_lacks_is_clamped(api: Api, engine: ScriptedEngine, logprob: float) -> None:
    engine.logprob = logprob
    rows = choice(await api.complete(ALPHA, max_tokens=3, echo=True, logprobs=1))["logprobs"]
    assert rows["token_logprobs"] == [None] + [-9999.0] * 6
    content = choice(await api.chat(max_tokens=1, logprobs=True, top_logprobs=1))["logprobs"]["content"]
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"] == -9999.0


async def test_an_answer_that_ends_inside_a_character_has_its_replacement_in_the_last_row(api: Api) -> None:
    answer = choice(await api.complete(EMOJI, max_tokens=4, logprobs=1))
    assert answer["text"] == "\n\n\ufffd"
    assert answer["logprobs"]["tokens"] == ["\n", "\n", "", "\ufffd"]


async def test_what_the_tokenizer_puts_before_a_prompt_is_scored_but_not_echoed(
    tmp_path: Path, engine: ScriptedEngine
) -> None:
    """BOS and the space that SentencePiece begins a text with."""
    async with client(create_app(ServedModel.load("smol", save_tiny(tmp_path)), {"only": engine})) as http:
        answer = choice(await Api(http).complete("a bc", max_tokens=0, echo=True, logprobs=0))
    assert answer["text"] == "a bc"
    assert answer["logprobs"]["tokens"] == ["", "a", " b", "c"]
    assert answer["logprobs"]["text_offset"] == [0, 0, 1, 3]
