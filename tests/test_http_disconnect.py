"""A client that hangs up, at whatever moment, leaves nothing running."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
import uvicorn

from deployments.http import create_app
from deployments.served import ServedModel
from tests.fakes_http import COUNT, ScriptedEngine
from tests.http_client import Api, Caller, client, ok, within

pytest_plugins = ["tests.http_fixtures"]
pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "smol", "prompt": COUNT, "max_tokens": 24, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 5])
@pytest.mark.parametrize("n", [1, 4])
async def test_hanging_up_closes_every_generator(
    served: ServedModel, engine: ScriptedEngine, stream: bool, hold_after: int, n: int
) -> None:
    engine.hold_after = hold_after
    caller = Caller(create_app(served, {"only": engine}), COMPLETIONS, body(stream=stream, n=n))
    await engine.holding.wait()
    assert engine.running
    caller.hang_up()
    await caller.task
    assert engine.running == set()
    assert "DONE" not in caller.text
    assert caller.status == (200 if stream and hold_after else 499)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_after", [0, 5])
async def test_cancelling_the_request_closes_its_generator(
    served: ServedModel, engine: ScriptedEngine, stream: bool, hold_after: int
) -> None:
    engine.hold_after = hold_after
    caller = Caller(create_app(served, {"only": engine}), COMPLETIONS, body(stream=stream))
    await engine.holding.wait()
    caller.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller.task
    assert engine.running == set()


async def test_hanging_up_while_events_wait_to_be_sent_closes_the_generator(
    served: ServedModel, engine: ScriptedEngine
) -> None:
    """A client that neither reads nor stays."""
    caller = Caller(create_app(served, {"only": engine}), COMPLETIONS, body(stream=True), reads=2)
    await caller.stuck.wait()
    assert engine.running
    caller.hang_up()
    await caller.task
    assert engine.running == set()


async def test_hanging_up_before_the_body_has_come_submits_nothing(served: ServedModel, engine: ScriptedEngine) -> None:
    caller = Caller(create_app(served, {"only": engine}), COMPLETIONS, body(), whole=False)
    caller.hang_up()
    await caller.task
    assert engine.submissions == []


async def test_hanging_up_leaves_other_requests_alone(served: ServedModel, engine: ScriptedEngine) -> None:
    engine.hold_after = 5
    app = create_app(served, {"only": engine})
    leaver = Caller(app, COMPLETIONS, body(stream=True))
    await engine.holding.wait()
    engine.hold_after = None
    async with client(app) as http:
        staying = asyncio.create_task(Api(http).complete(max_tokens=24))
        leaver.hang_up()
        await leaver.task
        assert ok(await staying)["usage"]["completion_tokens"] == 24


@pytest.fixture
async def url(served: ServedModel, engine: ScriptedEngine) -> AsyncGenerator[str, None]:
    """A real server on a free port."""
    config = uvicorn.Config(create_app(served, {"only": engine}), port=0, log_config=None, ws="none", lifespan="off")
    server = Listening(config)
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


class Listening(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()


async def test_over_a_socket_hanging_up_on_a_stream_closes_the_generator(url: str, engine: ScriptedEngine) -> None:
    engine.hold_after = 3
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        http.stream("POST", url + COMPLETIONS, json=body(stream=True)) as response,
    ):
        lines = response.aiter_lines()
        assert '"text":" "' in await anext(lines)
        await engine.holding.wait()
    await within(engine.idle.wait())


async def test_over_a_socket_hanging_up_on_a_plain_request_closes_the_generator(
    url: str, engine: ScriptedEngine
) -> None:
    engine.hold_after = 3
    async with httpx.AsyncClient(trust_env=False) as http:
        asking = asyncio.create_task(http.post(url + COMPLETIONS, json=body()))
        await engine.holding.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    await within(engine.idle.wait())
