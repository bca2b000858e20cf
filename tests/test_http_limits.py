"""What is refused before an engine sees it: prompts, bodies and batches that are too big."""

import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments.body import INLINE_BYTES, work_on
from deployments.served import ServedModel
from tests.fakes_http import COUNT, LIMITS, ScriptedEngine
from tests.http_client import Api, choice, ok, problem

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio

L = LIMITS.max_model_len


async def test_a_prompt_beyond_the_context_tells_both_lengths(api: Api) -> None:
    long_chat = [{"role": "user", "content": "word " * (L + 50)}]
    for stream in (False, True):
        error = problem(await api.complete([1000] * (L + 53), stream=stream))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert str(L) in error["message"]
        assert str(L + 53) in error["message"]
        error = problem(await api.chat(long_chat, stream=stream))
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        assert str(L) in error["message"]
        assert "-" not in error["message"]


async def test_prompt_and_output_may_fill_the_context_exactly(api: Api, engine: ScriptedEngine) -> None:
    engine.scripts[(1000,) * 100] = [38] * L
    assert ok(await api.complete([1000] * 100, max_tokens=L - 100))["usage"]["total_tokens"] == L
    assert problem(await api.complete([1000] * 100, max_tokens=L - 99))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("length", [L - 2, L - 1])
async def test_a_prompt_with_room_for_one_token_runs(api: Api, length: int) -> None:
    assert choice(await api.complete([1000] * length, max_tokens=1))["finish_reason"] == "length"


@pytest.mark.parametrize("length", [L, L + 1])
@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"max_tokens": 0, "echo": True}])
async def test_a_prompt_without_room_for_one_token_is_refused(api: Api, length: int, fields: dict[str, Any]) -> None:
    problem(await api.complete([1000] * length, **fields))


async def test_a_text_too_long_for_any_tokens_is_refused_unencoded(
    api: Api, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(served.tokenizer), "encode", pytest.fail)
    monkeypatch.setattr(type(served.template), "encode", pytest.fail)
    text = "a " * 400_000
    assert problem(await api.complete(text))["code"] == "context_length_exceeded"
    error = problem(await api.chat([{"role": "user", "content": text}]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize("prompt", ["", [""], [COUNT, ""], [[]], [[1000], []]])
async def test_an_empty_prompt_is_refused_in_every_form(api: Api, engine: ScriptedEngine, prompt: Any) -> None:
    assert problem(await api.complete(prompt))["param"] == "prompt"
    assert engine.submissions == []


@pytest.mark.parametrize("prompt", [[-1], [[-1]], [49152], [2**31], [10**18], [1000, -5], [[1000], [-1]]])
async def test_ids_out_of_vocabulary_are_refused(api: Api, engine: ScriptedEngine, prompt: Any) -> None:
    assert "out of vocabulary" in problem(await api.complete(prompt, max_tokens=1))["message"]
    assert engine.submissions == []


async def test_the_last_id_of_the_vocabulary_works(api: Api) -> None:
    ok(await api.complete([49151], max_tokens=1))


@pytest.mark.parametrize("ids", [[49152], [-1], [10**12]])
async def test_stop_token_ids_out_of_vocabulary_are_refused(api: Api, ids: list[int]) -> None:
    assert problem(await api.complete(stop_token_ids=ids))["param"] == "stop_token_ids"


async def test_too_many_choices_are_refused(api: Api) -> None:
    assert problem(await api.complete(["a"] * 9, n=128))["param"] == "prompt"
    assert len(ok(await api.complete("a", n=128, max_tokens=1))["choices"]) == 128


def body_in_parts(asked: list[int]) -> AsyncGenerator[bytes, None]:
    """Four parts a mebibyte, without end; `asked` counts them."""

    async def parts() -> AsyncGenerator[bytes, None]:
        while True:
            asked.append(1)
            yield b" " * 2**18

    return parts()


async def test_a_body_announced_as_too_long_is_refused_unread(api: Api) -> None:
    asked: list[int] = []
    headers = {"content-length": str(2**20 + 1)}
    response = await api.http.post("/v1/completions", content=body_in_parts(asked), headers=headers)
    assert problem(response, 413)["code"] == "body_too_large"
    assert asked == []


async def test_a_body_that_turns_out_too_long_is_refused_before_it_is_read_whole(api: Api) -> None:
    asked: list[int] = []
    problem(await api.http.post("/v1/completions", content=body_in_parts(asked)), 413)
    assert len(asked) == 5


async def test_work_on_a_big_body_leaves_the_event_loop_free() -> None:
    here = threading.get_ident()
    assert await work_on(INLINE_BYTES, threading.get_ident) == here
    assert await work_on(INLINE_BYTES + 1, threading.get_ident) != here
