"""deployments.http over a scripted engine: what answers look like, streamed or not."""

from typing import Any

import pytest

from deployments.served import ServedModel
from tests.fakes_http import ALPHA, BLUE, COUNT, COUNT_IDS, COUNT_TEXT, EMOJI, LIMITS, ScriptedEngine
from tests.http_client import USAGE, Api, choice, events, joined, ok

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio

L = LIMITS.max_model_len


async def test_a_completion_has_openais_shape(api: Api) -> None:
    answer = ok(await api.complete(max_tokens=6))
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "text_completion",
        "model": "smol",
        "choices": [{"index": 0, "text": " 6, 7,", "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 14,
            "completion_tokens": 6,
            "total_tokens": 20,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_chat_completion_has_openais_shape(api: Api, engine: ScriptedEngine) -> None:
    engine.cached_tokens = 16
    answer = ok(await api.chat(max_tokens=6))
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 0
    assert answer == {
        "object": "chat.completion",
        "model": "smol",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": " 6, 7,", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 31,
            "completion_tokens": 6,
            "total_tokens": 37,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
    }


async def test_completion_chunks_have_openais_shape(api: Api) -> None:
    chunk, *_ = events(await api.complete(max_tokens=2, stream=True))
    assert chunk["object"] == "text_completion"
    assert chunk["choices"] == [{"index": 0, "text": " ", "logprobs": None, "finish_reason": None}]
    assert "usage" not in chunk


async def test_the_role_comes_with_the_first_content(api: Api) -> None:
    chunks = events(await api.chat(max_tokens=3, stream=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": " "}, {"content": "6"}, {"content": ","}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]


async def test_an_empty_answer_still_has_role_and_content(api: Api) -> None:
    (chunk,) = events(await api.chat(max_tokens=0, stream=True))
    assert chunk["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_max_tokens_null_is_as_if_left_out(api: Api, engine: ScriptedEngine) -> None:
    for fields in ({"max_tokens": None}, {}):
        assert ok(await api.complete(**fields))["usage"]["completion_tokens"] == 16
        ok(await api.chat(stop="10", **fields))
        assert engine.submissions[-1].params.max_tokens == L - 31


async def test_an_emoji_of_three_tokens_comes_in_one_chunk(api: Api) -> None:
    chunks = events(await api.complete(EMOJI, max_tokens=8, stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["\n", "\n", "👩", "👩"]


async def test_the_end_token_is_counted_but_never_shown(api: Api) -> None:
    for skip in (True, False):
        answer = ok(await api.complete(BLUE, max_tokens=10, skip_special_tokens=skip))
        assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (" blue.", "stop")
        assert answer["usage"]["completion_tokens"] == 3


async def test_a_stop_token_id_ends_the_text_before_it(api: Api) -> None:
    answer = ok(await api.complete(stop_token_ids=[39]))
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (" 6, ", "stop")
    assert answer["usage"]["completion_tokens"] == 5


async def test_ignore_eos_goes_on_with_special_tokens_skipped(api: Api) -> None:
    answer = choice(await api.complete(BLUE, max_tokens=8, ignore_eos=True))
    assert (answer["text"], answer["finish_reason"]) == (" blue.\nassistant\n", "length")


@pytest.mark.parametrize(
    ("prompt", "stop", "text", "tokens"),
    [
        (COUNT, ["7, 8"], " 6, ", 8),
        (COUNT, ["10, 11,"], " 6, 7, 8, 9, ", 20),
        (COUNT, ["6, 7, 8, 9"], " ", 11),
        (COUNT, ["8,"], " 6, 7, ", 9),
        (ALPHA, ["EFG"], "D", 2),
        (ALPHA, ["H"], "DEFG", 2),
        (ALPHA, ["G", "H"], "DEF", 2),
        (ALPHA, ["H", "G"], "DEF", 2),
        (ALPHA, ["FGHI"], "DE", 3),
        (ALPHA, ["DEFGHIJ"], "", 4),
    ],
)
async def test_a_stop_string_cuts_both_modes_alike(
    api: Api, prompt: str, stop: list[str], text: str, tokens: int
) -> None:
    fields = {"max_tokens": 24 if prompt is COUNT else 10, "stop": stop}
    plain = ok(await api.complete(prompt, **fields))
    assert (plain["choices"][0]["text"], plain["choices"][0]["finish_reason"]) == (text, "stop")
    assert plain["usage"]["completion_tokens"] == tokens
    *chunks, last = events(await api.complete(prompt, **fields, stream=True, stream_options=USAGE))
    assert joined(chunks) == text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["usage"] == plain["usage"]


async def test_a_stop_string_aborts_the_rest(api: Api, engine: ScriptedEngine) -> None:
    await api.complete(max_tokens=24, stop="7")
    assert engine.steps == 5


async def test_a_stop_string_on_the_last_token_is_a_stop(api: Api) -> None:
    assert choice(await api.complete(ALPHA, max_tokens=3, stop="GHI"))["finish_reason"] == "stop"


@pytest.mark.parametrize("prompt", [COUNT, ALPHA, BLUE, EMOJI, [1000, 1001], [COUNT, BLUE]])
@pytest.mark.parametrize("fields", [{}, {"stop": ["8", "J"]}, {"n": 3}, {"echo": True, "logprobs": 1}])
async def test_a_joined_stream_is_the_plain_answer(api: Api, prompt: Any, fields: dict[str, Any]) -> None:
    plain = ok(await api.complete(prompt, max_tokens=8, **fields))
    *chunks, last = events(await api.complete(prompt, max_tokens=8, **fields, stream=True, stream_options=USAGE))
    for each in plain["choices"]:
        assert joined(chunks, each["index"]) == each["text"]
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == each["index"]]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [each["finish_reason"]]
        for key, values in (each["logprobs"] or {}).items():
            assert [value for part in parts for value in (part["logprobs"] or {key: []})[key]] == values
    assert last["usage"] == plain["usage"]


async def test_usage_comes_in_one_last_chunk_without_choices(api: Api) -> None:
    *chunks, last = events(await api.chat(max_tokens=5, stream=True, stream_options=USAGE))
    assert [chunk["usage"] for chunk in chunks] == [None] * 5
    assert last["choices"] == []
    assert (last["usage"]["total_tokens"], last["usage"]["prompt_tokens"]) == (36, 31)


async def test_prompts_times_n_come_in_prompt_order(api: Api) -> None:
    prompts = [COUNT, ALPHA, BLUE]
    answer = ok(await api.complete(prompts, n=2, max_tokens=10, echo=True))
    assert [each["index"] for each in answer["choices"]] == list(range(6))
    assert all(each["text"].startswith(prompts[each["index"] // 2]) for each in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 14 + 4 + 4
    assert answer["usage"]["completion_tokens"] == 2 * (10 + 10 + 3)


async def test_cached_tokens_are_summed_over_prompts_not_over_n(api: Api, engine: ScriptedEngine) -> None:
    engine.cached_tokens = 3
    usage = ok(await api.complete([COUNT, ALPHA], n=2, max_tokens=1))["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 6


async def test_choice_i_samples_with_seed_plus_i(api: Api, engine: ScriptedEngine) -> None:
    await api.complete([COUNT, ALPHA], n=2, max_tokens=1, seed=7)
    await api.complete(n=2, max_tokens=1, seed=2**63 - 1)
    asked = [sorted(engine.submissions[:4], key=lambda each: each.id), engine.submissions[4:]]
    assert [[each.params.seed for each in one] for one in asked] == [[7, 8, 7, 8], [2**63 - 1, -(2**63)]]


async def test_requests_without_seed_get_different_ones(api: Api, engine: ScriptedEngine) -> None:
    await api.complete(max_tokens=1)
    await api.complete(max_tokens=1)
    assert len({each.params.seed for each in engine.submissions}) == 2


async def test_token_ids_are_returned_when_asked_for(api: Api) -> None:
    plain = choice(await api.complete(max_tokens=5, stop="7", return_token_ids=True))
    assert (plain["token_ids"], plain["prompt_token_ids"][:2]) == (COUNT_IDS[:5], [33, 28])
    chunks = events(await api.chat(max_tokens=5, stream=True, return_token_ids=True))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == COUNT_IDS[:5]
    assert chunks[0]["prompt_token_ids"][:3] == [1, 9690, 198]


async def test_prompt_ids_that_end_inside_a_character_are_not_shown_again(
    served: ServedModel, api: Api, engine: ScriptedEngine
) -> None:
    engine.scripts[(19556, 40303)] = [126, 10813, 235, 118]
    answer = choice(await api.complete([19556, 40303], max_tokens=4))
    assert answer["text"] == served.tokenizer.decode([126, 10813, 235, 118]) == "\ufffd👨"


async def test_internal_ids_are_fresh_whatever_the_client_calls_its_request(api: Api, engine: ScriptedEngine) -> None:
    for _ in range(2):
        headers = {"x-request-id": "same"}
        body = {"model": "smol", "prompt": [COUNT, ALPHA], "max_tokens": 1, "request_id": "same"}
        await api.http.post("/v1/completions", json=body, headers=headers)
    ids = {each.id for each in engine.submissions}
    assert len(ids) == 4
    assert not any("same" in each for each in ids)


async def test_every_golden_text_is_whole(api: Api) -> None:
    assert choice(await api.complete(max_tokens=24))["text"] == COUNT_TEXT
    assert choice(await api.complete(ALPHA, max_tokens=10))["text"] == "DEFGHIJKLMNOPQRST"
