"""Choices of one prompt: the first goes ahead, the others follow at its first token. The answer does not tell."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from deployments.client import EngineInfo, Submission
from engine.errors import EngineUnavailable
from engine.request import Output
from tests.fakes_http import ALPHA, COUNT, ScriptedEngine
from tests.http_client import HI, Api, ok, problem

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio


class Gated(ScriptedEngine):
    """The first choice of each prompt waits at the gate before its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.seen: list[str] = []

    async def _play(self, submission: Submission) -> AsyncGenerator[Output, None]:
        self.seen.append(submission.id.rsplit("-", 1)[1])
        await self.gate.wait()
        async for output in super()._play(submission):
            yield output


@pytest.fixture
def engine() -> Gated:
    return Gated()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smol", "prompt": COUNT, "max_tokens": 4, "temperature": 0, **fields}


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_others_are_sent_at_the_first_token_of_the_first(api: Api, engine: Gated, stream: bool) -> None:
    asked = asyncio.create_task(api.http.post("/v1/completions", json=body(n=3, stream=stream)))
    while not engine.seen:
        await asyncio.sleep(0.001)
    await settle()
    assert engine.seen == ["0"]
    engine.gate.set()
    answer = await asked
    assert answer.status_code == 200 and sorted(engine.seen) == ["0", "1", "2"]


async def test_prompts_of_one_request_do_not_wait_for_each_other(api: Api, engine: Gated) -> None:
    asked = asyncio.create_task(api.http.post("/v1/completions", json=body(prompt=[COUNT, ALPHA, COUNT], n=2)))
    while len(engine.seen) < 3:
        await asyncio.sleep(0.001)
    await settle()
    assert sorted(engine.seen) == ["0", "2", "4"]
    engine.gate.set()
    choices = ok(await asked)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    texts = [choice["text"] for choice in choices]
    assert texts[0] == texts[1] == texts[4] == texts[5] != texts[2] == texts[3]


async def test_a_single_choice_waits_for_nobody(api: Api, engine: Gated) -> None:
    engine.gate.set()
    ok(await api.http.post("/v1/completions", json=body(prompt=[COUNT, ALPHA])))
    assert sorted(engine.seen) == ["0", "1"]


async def test_if_the_first_fails_the_others_are_never_sent(api: Api, engine: Gated) -> None:
    engine.gate.set()
    engine.failures[0] = EngineUnavailable("gone", code="engine_gone")
    error = problem(await api.http.post("/v1/completions", json=body(n=3)), 503)
    await settle()
    assert error["code"] == "engine_gone" and engine.seen == ["0"]
    assert not engine.running


async def test_whoever_leaves_before_the_first_token_leaves_the_others_unsent(api: Api, engine: Gated) -> None:
    asked = asyncio.create_task(api.http.post("/v1/completions", json=body(n=3)))
    while not engine.seen:
        await asyncio.sleep(0.001)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    engine.gate.set()
    await settle()
    assert engine.seen == ["0"] and not engine.running


async def test_a_chat_of_several_choices_is_whole(api: Api, engine: Gated) -> None:
    engine.gate.set()
    fields = {"model": "smol", "messages": HI, "n": 4, "max_tokens": 3, "logprobs": True}
    answer = ok(await api.http.post("/v1/chat/completions", json=fields))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 12
    assert isinstance(await engine.describe(), EngineInfo)
