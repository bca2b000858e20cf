"""priority, cache_salt and draft_tokens over HTTP: what an engine gets of them, and what is refused by name."""

import json
from typing import Any

import pytest

from deployments.client import Submission
from tests.fakes_http import ALPHA, COUNT, ScriptedEngine
from tests.http_client import HI, Api, problem

pytest_plugins = ["tests.http_fixtures"]
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("stream", [False, True]),
    pytest.mark.parametrize("prompt", [{"prompt": COUNT}, {"messages": HI}], ids=["completion", "chat"]),
]

GIVEN: dict[str, list[Any]] = {
    "priority": [-(2**63), -1, 7, 2**63 - 1],
    "cache_salt": ["a", "Ünï ✓\u0000", "x" * 256],
    "draft_tokens": [0, 1, 64],
}
LEFT_OUT = {"priority": 0, "cache_salt": "", "draft_tokens": None}
WRONG: dict[str, list[Any]] = {
    "priority": [2**63, -(2**63) - 1, 10**30, 1.0, 1.5, True, "3", [1], {}],
    "cache_salt": ["", 5, ["a"], True, {"a": "b"}, "x" * 257],
    "draft_tokens": [-1, 65, 2**63, 1.0, True, "3", [1], {}],
}


async def send(api: Api, prompt: dict[str, Any], **fields: Any) -> Any:
    path = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    return await api.http.post(path, json={"model": "smol", "max_tokens": 2, **prompt, **fields})


def fields_of(submission: Submission) -> dict[str, Any]:
    return {
        "priority": submission.priority,
        "cache_salt": submission.cache_salt,
        "draft_tokens": submission.params.draft_tokens,
    }


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GIVEN for value in GIVEN[name]])
async def test_each_field_reaches_the_engine_as_it_was_sent(
    api: Api, engine: ScriptedEngine, prompt: dict[str, Any], stream: bool, name: str, value: object
) -> None:
    assert (await send(api, prompt, stream=stream, **{name: value})).status_code == 200
    (submission,) = engine.submissions
    assert fields_of(submission) == LEFT_OUT | {name: value}


async def test_null_is_the_same_as_leaving_out(
    api: Api, engine: ScriptedEngine, prompt: dict[str, Any], stream: bool
) -> None:
    for fields in ({}, dict.fromkeys(LEFT_OUT)):
        assert (await send(api, prompt, stream=stream, **fields)).status_code == 200
    assert [fields_of(submission) for submission in engine.submissions] == [LEFT_OUT, LEFT_OUT]


async def test_all_choices_of_a_request_carry_its_fields(
    api: Api, engine: ScriptedEngine, prompt: dict[str, Any], stream: bool
) -> None:
    fields = {"priority": -2, "cache_salt": "tenant", "draft_tokens": 3}
    several = {"prompt": [COUNT, ALPHA]} if "prompt" in prompt else prompt
    assert (await send(api, several, stream=stream, n=2, **fields)).status_code == 200
    assert len(engine.submissions) == 2 * len(several.get("prompt", [HI]))
    assert all(fields_of(submission) == fields for submission in engine.submissions)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
async def test_a_wrong_value_is_refused_by_name_before_any_engine_sees_it(
    api: Api, engine: ScriptedEngine, prompt: dict[str, Any], stream: bool, name: str, value: object
) -> None:
    error = problem(await send(api, prompt, stream=stream, **{name: value}))
    assert (error["type"], error["param"]) == ("invalid_request_error", name)
    assert name in error["message"]
    assert engine.submissions == []


async def test_neither_an_answer_nor_a_refusal_shows_a_salt(api: Api, prompt: dict[str, Any], stream: bool) -> None:
    for salt in ("secret", "secret" * 100):
        assert "secret" not in (await send(api, prompt, stream=stream, cache_salt=salt)).text


async def test_a_salt_that_is_no_unicode_is_refused(
    api: Api, engine: ScriptedEngine, prompt: dict[str, Any], stream: bool
) -> None:
    """Half of a surrogate pair would have no UTF-8 to hash."""
    body = json.dumps({"model": "smol", **prompt, "stream": stream, "cache_salt": "\ud800"})
    path = "/v1/completions" if "prompt" in prompt else "/v1/chat/completions"
    problem(await api.http.post(path, content=body.encode()))
    assert engine.submissions == []
