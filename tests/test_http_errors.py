"""Every error in one envelope, before and inside streams; models and health."""

import json
from typing import Any

import pytest

from deployments.http import create_app
from deployments.served import ServedModel
from engine.errors import EngineUnavailable, QueueFull
from engine.intake import Limits
from engine.request import FinishReason
from tests.fakes_http import COUNT, ScriptedEngine
from tests.http_client import HI, USAGE, Api, client, events, joined, ok, problem

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio


async def test_a_model_that_is_not_served_is_not_found(api: Api) -> None:
    for name in ("nope", "", "a/b"):
        for stream in (False, True):
            assert problem(await api.chat(model=name, stream=stream), 404)["code"] == "model_not_found"
    for path in ("nope", "a/b"):
        assert problem(await api.http.get(f"/v1/models/{path}"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("model", [None, 5])
async def test_a_model_that_is_no_name_is_a_bad_request(api: Api, model: object) -> None:
    assert problem(await api.chat(model=model))["param"] == "model"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b"[]", b"null", b"123", b"{", b"", b"\xff\xfe", b'{"model":"M",}', b"[" * 10_000])
async def test_a_body_that_is_no_object_is_a_bad_request(api: Api, path: str, body: bytes) -> None:
    assert problem(await api.http.post(path, content=body))["type"] == "invalid_request_error"


@pytest.mark.parametrize("messages", [[], None, "hi", [{}]])
async def test_bad_messages_are_a_plain_error_for_streams_too(api: Api, messages: object) -> None:
    for stream in (False, True):
        assert problem(await api.chat(messages, stream=stream))["param"] == "messages"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_the_content_type_does_not_matter(api: Api, kind: str | None) -> None:
    body = json.dumps({"model": "smol", "prompt": COUNT, "max_tokens": 1})
    headers = {"content-type": kind} if kind else {}
    ok(await api.http.post("/v1/completions", content=body, headers=headers))


async def test_unknown_routes_and_methods_have_the_envelope(api: Api) -> None:
    problem(await api.http.post("/v1/embeddings"), 404)
    problem(await api.http.get("/health/"), 404)
    response = await api.http.get("/v1/completions")
    problem(response, 405)
    assert response.headers["allow"] == "POST"


async def test_a_conversation_with_tool_calls_and_no_content_is_answered(api: Api) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "sqrt", "arguments": '{"x":101}'}}
    for content in ({"content": None}, {}):
        turns = [*HI, {"role": "assistant", "tool_calls": [call], **content}, {"role": "tool", "content": "10.05"}]
        ok(await api.chat(turns, max_tokens=4))


async def test_a_developer_message_is_a_system_message(api: Api, engine: ScriptedEngine) -> None:
    for role in ("system", "developer"):
        ok(await api.chat([{"role": role, "content": "be brief"}], max_tokens=1))
    assert engine.submissions[0].prompt == engine.submissions[1].prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_token_is_a_plain_error(
    api: Api, engine: ScriptedEngine, stream: bool
) -> None:
    engine.failures[0] = QueueFull("The queue is full.", code="queue_full")
    response = await api.complete(stream=stream)
    assert problem(response, 429)["code"] == "queue_full"
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineUnavailable("gone", code="dead"), "dead"),
        (FinishReason.ERROR, "engine_error"),
        (FinishReason.ABORT, "aborted"),
        (ValueError("secret"), "internal_error"),
    ],
)
async def test_a_failure_in_a_stream_is_told_and_looks_like_no_end(
    api: Api, engine: ScriptedEngine, failure: Any, code: str
) -> None:
    engine.failures[5] = failure
    *chunks, last = events(await api.complete(max_tokens=24, stream=True, stream_options=USAGE))
    assert joined(chunks) == " 6, 7"
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == code
    assert "secret" not in json.dumps(last)


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineUnavailable("gone"), 503),
        (FinishReason.ERROR, 500),
        (FinishReason.ABORT, 503),
        (ValueError("secret"), 500),
    ],
)
async def test_a_failure_in_a_plain_answer_is_an_error(
    api: Api, engine: ScriptedEngine, failure: Any, status: int
) -> None:
    engine.failures[5] = failure
    error = problem(await api.complete(max_tokens=24), status)
    assert "secret" not in error["message"]


async def test_one_failed_choice_closes_the_others(api: Api, engine: ScriptedEngine) -> None:
    engine.scripts[(7,)] = [38, 38]  # ends without a finish reason
    problem(await api.complete([[7], [8], [9]], max_tokens=10), 503)
    assert engine.running == set()


async def test_models_lists_the_name_that_works(api: Api) -> None:
    (card,) = ok(await api.http.get("/v1/models"))["data"]
    assert ok(await api.http.get("/v1/models/smol")) == card
    assert (card["id"], card["object"], card["owned_by"]) == ("smol", "model", "sluice")


async def test_a_name_with_a_slash_can_be_served(served: ServedModel, engine: ScriptedEngine) -> None:
    named = ServedModel("lab/smol", served.tokenizer, served.template)
    async with client(create_app(named, {"only": engine})) as http:
        assert ok(await http.get("/v1/models/lab/smol"))["id"] == "lab/smol"


async def test_health_follows_the_engines(served: ServedModel) -> None:
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    async with client(create_app(served, engines)) as http:
        for each in engines.values():
            each.unavailable = EngineUnavailable("loading")
        problem(await http.get("/health"), 503)
        engines["b"].unavailable = None
        ok(await http.get("/health"))
        engines["b"].unavailable = EngineUnavailable("dead")
        problem(await http.get("/health"), 503)


async def test_the_engines_limits_are_learnt_once_it_is_ready(api: Api, engine: ScriptedEngine) -> None:
    engine.unavailable = EngineUnavailable("loading")
    problem(await api.complete(), 503)
    engine.unavailable = None
    engine.limits = Limits(max_model_len=20, kv_tokens=20, vocab_size=49152)
    problem(await api.complete(max_tokens=7))
    ok(await api.complete(max_tokens=6))
