"""deployments.schema: what bodies are accepted, and which parameter is blamed."""

import json
from typing import Any

import pytest

from deployments.schema import ChatRequest, CompletionRequest, parse
from engine.errors import RequestError

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def refused(build: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        build(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b"true", b"123", b'"s"', b"{", b"", b"\xff\xfe", b'{"model":"M",}', b"[" * 10_000]
)
def test_a_body_must_be_a_json_object(body: bytes) -> None:
    for schema in (CompletionRequest, ChatRequest):
        with pytest.raises(RequestError, match="body"):
            parse(schema, body)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_must_be_finite(literal: str) -> None:
    with pytest.raises(RequestError):
        parse(CompletionRequest, b'{"model":"m","prompt":"hi","temperature":%s}' % literal.encode())


NUMBERS: dict[str, tuple[list[Any], list[Any]]] = {
    "n": ([1, 128], [0, -1, 129, 10**6]),
    "max_tokens": ([0, 1, 2**31], [-1]),
    "min_tokens": ([0, 16], [-1]),
    "temperature": ([0, 1e-12, 0.5, 1, 2], [-0.1, 2.1]),
    "top_p": ([0, 0.0, 1e-9, 1], [-0.1, 1.1]),
    "top_k": ([-1, 0, 1, 10**9], [-2]),
    "min_p": ([0, 0.5, 1], [-0.1, 1.1]),
    "repetition_penalty": ([0.01, 1, 1.3], [0, 0.0, -1, 1e-30, 101]),
    "presence_penalty": ([-2, 0.5, 2], [2.1, -2.1]),
    "frequency_penalty": ([-2, 1.05, 2], [2.1, -2.1]),
    "seed": ([2**63 - 1, -(2**63), 0], [2**63, 2**64, -(2**63) - 1, 10**20]),
    "priority": ([2**63 - 1, -(2**63), 0], [2**63, -(2**63) - 1, 10**20]),
    "draft_tokens": ([0, 1, 64], [-1, 65, 10**20]),
    "logprobs": ([0, 5], [6, -1, 49152, 10**9]),
}
REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name][0]])
def test_numbers_in_range_are_taken(name: str, value: float) -> None:
    assert getattr(completion(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NUMBERS for value in NUMBERS[name][1]])
def test_numbers_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    assert refused(completion, **{name: value}).param == name


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, [1], {}])
def test_numbers_are_not_made_of_other_types(name: str, value: object) -> None:
    assert refused(completion, **{name: value}).param == name


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in REALS])
@pytest.mark.parametrize("value", [1.5, 1.0])
def test_counts_are_not_made_of_reals(name: str, value: float) -> None:
    assert refused(completion, **{name: value}).param == name


@pytest.mark.parametrize("name", ["stream", "echo", "ignore_eos", "skip_special_tokens", "return_token_ids"])
@pytest.mark.parametrize("value", [1, 0, "true"])
def test_switches_are_not_made_of_other_types(name: str, value: object) -> None:
    assert refused(completion, **{name: value}).param == name


def test_null_is_the_same_as_leaving_out() -> None:
    optional = [name for name in CompletionRequest.model_fields if name not in ("model", "prompt")]
    assert completion(**dict.fromkeys(optional)) == completion()
    optional = [name for name in ChatRequest.model_fields if name not in ("model", "messages")]
    assert chat(**dict.fromkeys(optional)) == chat()


def test_unknown_fields_are_ignored() -> None:
    assert completion(surprise={"a": 1}) == completion()


@pytest.mark.parametrize("model", [None, 5, ["m"], True])
def test_model_must_be_a_string(model: object) -> None:
    assert refused(completion, model=model).param == "model"
    assert refused(chat, model=model).param == "model"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_a_prompt_is_text_or_ids_one_or_many(prompt: object, prompts: list[str | list[int]]) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [[1000.5], [True, False], ["a", 1], [["a"]], [[[1000]]], [[1], "a"], [[True]], {"a": 1}, 5, [], None, [None]],
)
def test_a_prompt_of_any_other_form_is_refused(prompt: object) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


@pytest.mark.parametrize("stop", ["", [""], ["8,", ""], 5, [5], ["a"] * 5, "x" * 1025, {"a": 1}])
def test_a_stop_is_up_to_four_short_strings(stop: object) -> None:
    assert refused(completion, stop=stop).param == "stop"


def test_stops_come_as_one_string_or_as_a_list() -> None:
    assert completion(stop="a").stop == ("a",)
    assert completion(stop=["a1", "a2", "a3", "x" * 1024]).stop == ("a1", "a2", "a3", "x" * 1024)
    assert completion(stop=[]).stop == ()


@pytest.mark.parametrize("salt", ["", 5, ["a"], True, {"a": 1}, "x" * 257])
def test_a_cache_salt_is_a_string_of_1_to_256_characters(salt: object) -> None:
    assert refused(completion, cache_salt=salt).param == "cache_salt"
    assert completion(cache_salt="é" * 256).cache_salt == "é" * 256


def test_half_a_million_stops_are_refused_by_their_number_alone() -> None:
    """Their entries, all wrong, are not looked at."""
    assert "at most 4" in refused(completion, stop=[0] * 500_000).message


@pytest.mark.parametrize("ids", [["2"], [1.5], [True], 2, list(range(129))])
def test_stop_token_ids_are_a_short_list_of_ids(ids: object) -> None:
    assert refused(completion, stop_token_ids=ids).param == "stop_token_ids"


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [{}], [None], ["hi"], [{"role": "boss", "content": "a"}], [{"content": "a"}]]
)
def test_messages_are_at_least_one_with_a_known_role(messages: object) -> None:
    assert refused(chat, messages=messages).param == "messages"


@pytest.mark.parametrize(
    ("given", "content"),
    [
        ({"content": "a"}, "a"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_content_becomes_one_string(given: dict[str, Any], content: str) -> None:
    call = chat(messages=[{"role": "assistant", "tool_calls": [{"id": "c1"}], **given}])
    assert call.messages[0].model_dump() == {"role": "assistant", "content": content, "tool_calls": [{"id": "c1"}]}


@pytest.mark.parametrize(
    "content",
    [5, {"text": "a"}, [{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], ["a"], [None]],
)
def test_content_of_other_parts_is_refused(content: object) -> None:
    error = refused(chat, messages=[{"role": "user", "content": content}])
    assert error.param == "messages"
    assert "messages[0].content" in error.message


def test_a_bias_maps_token_ids_to_numbers() -> None:
    assert completion(logit_bias={"42": -100, "7": 0.5}).logit_bias == ((7, 0.5), (42, -100.0))
    assert chat(logit_bias={}).logit_bias == ()
    assert completion(logit_bias={"42": 5}).sampling(9, 0).logit_bias == ((42, 5.0),)


@pytest.mark.parametrize(
    "bias",
    [{"-1": 5}, {"abc": 1}, {"": 1}, {"1.0": 1}, {"42": "x"}, {"42": None}, {"42": True}, {"٣": 1}, [], 5, "42"],
)
def test_a_bias_of_any_other_form_is_refused(bias: object) -> None:
    assert refused(completion, logit_bias=bias).param == "logit_bias"
    assert refused(chat, logit_bias=bias).param == "logit_bias"


def test_a_bias_of_fifty_thousand_tokens_is_refused_by_its_number() -> None:
    assert "at most 1024" in refused(chat, logit_bias={str(token): 1 for token in range(50_000)}).message


@pytest.mark.parametrize("words", [[""], "bad", [5], ["a"] * 129, [["a"]]])
def test_bad_words_are_a_list_of_strings(words: object) -> None:
    assert refused(completion, bad_words=words).param == "bad_words"


@pytest.mark.parametrize("ids", [[], ["1"], [1.5], [True], 5])
def test_allowed_token_ids_are_a_list_of_ids_that_is_not_empty(ids: object) -> None:
    assert refused(completion, allowed_token_ids=ids).param == "allowed_token_ids"


def test_sampling_fields_reach_the_parameters() -> None:
    call = completion(
        min_p=0.1, repetition_penalty=1.2, presence_penalty=-1, frequency_penalty=0.5, allowed_token_ids=[3, 4]
    )
    params = call.sampling(9, 0, bad_words=[[1, 2]])
    assert (params.min_p, params.repetition_penalty, params.presence_penalty) == (0.1, 1.2, -1.0)
    assert (params.frequency_penalty, params.allowed_token_ids, params.bad_words) == (0.5, (3, 4), ((1, 2),))


NEUTRAL: dict[str, tuple[Any, list[Any]]] = {
    "use_beam_search": (False, [True, 0]),
}


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("build", [completion, chat])
def test_unsupported_parameters_are_refused_by_name_unless_they_ask_for_nothing(build: Any, name: str) -> None:
    harmless, meaningful = NEUTRAL[name]
    assert build(**{name: harmless}) == build(**{name: None}) == build()
    for value in meaningful:
        assert refused(build, **{name: value}).param == name


@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_are_refused_unless_empty(name: str) -> None:
    assert chat(**{name: []}) == chat()
    assert refused(chat, **{name: [{"type": "function"}]}).param == name


def test_suffix_and_best_of_are_refused_unless_they_change_nothing() -> None:
    assert completion(suffix="") == completion()
    assert completion(n=3, best_of=3).n == 3
    assert refused(completion, suffix="end").param == "suffix"
    assert refused(completion, n=3, best_of=2).param == "best_of"
    assert refused(completion, best_of=5).param == "best_of"


def test_top_logprobs_run_from_0_to_20_and_need_logprobs() -> None:
    assert chat(logprobs=True).logprob_count == 0
    assert chat(logprobs=True, top_logprobs=20).logprob_count == 20
    assert chat(logprobs=False, top_logprobs=0).logprob_count is None
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        assert refused(chat, **fields).param == "top_logprobs"


@pytest.mark.parametrize("options", [{"include_usage": 1}, [], "yes"])
def test_stream_options_are_strict(options: object) -> None:
    assert refused(chat, stream_options=options).param == "stream_options"


def test_a_completion_has_16_tokens_unless_told_and_a_chat_all_the_room() -> None:
    assert (completion().output_tokens(100), completion(max_tokens=0).output_tokens(100)) == (16, 0)
    assert (chat().output_tokens(100), chat(max_tokens=5).output_tokens(100)) == (100, 5)
    assert chat(max_tokens=5, max_completion_tokens=7).output_tokens(100) == 7
    assert chat().output_tokens(-53) == 1


def test_prompt_logprobs_are_wanted_only_with_echo() -> None:
    assert completion(logprobs=3).sampling(100, 0).prompt_logprobs is None
    assert completion(logprobs=3, echo=True).sampling(100, 0).prompt_logprobs == 3
    assert completion(echo=True).sampling(100, 0).prompt_logprobs is None


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        completion(max_tokens=3, min_tokens=4).sampling(100, 0)
    assert caught.value.param == "min_tokens"
