"""Clients for an app in this process: one that reads answers, one that can hang up at a chosen moment."""

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI

from tests.fakes_http import COUNT

HI = [{"role": "user", "content": "hi"}]
USAGE = {"include_usage": True}

Result = TypeVar("Result")


async def within(work: Awaitable[Result]) -> Result:
    """The result of work that would otherwise hang the test where it fails."""
    return await asyncio.wait_for(work, 30)


class Api:
    """A client's view. Whatever a test does, no request may be left running in the engine."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def complete(self, prompt: Any = COUNT, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "smol", "prompt": prompt, **fields})

    async def chat(self, messages: Any = HI, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json={"model": "smol", "messages": messages, **fields})


def ok(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def choice(response: httpx.Response) -> Any:
    (only,) = ok(response)["choices"]
    return only


def problem(response: httpx.Response, status: int = 400) -> Any:
    """The error, in the envelope that all errors have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return error


def joined(chunks: list[Any], index: int = 0) -> str:
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
    return "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)


def client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://sluice")


def events(response: httpx.Response) -> list[Any]:
    """The JSON of a stream's events, which must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


class Caller:
    """One HTTP request at the ASGI level: sees each message when it is sent, and hangs up when told.

    It reads at most `reads` messages, then it is `stuck`. If not `whole`, the end of the body never comes.
    """

    def __init__(
        self, app: FastAPI, path: str, body: Mapping[str, Any], *, reads: int = 1000, whole: bool = True
    ) -> None:
        self.sent: list[Any] = []
        self.stuck = asyncio.Event()
        self._reads = reads
        self._inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": not whole})
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [],
        }
        self.task = asyncio.create_task(within(app(scope, self._inbox.get, self._send)))

    def hang_up(self) -> None:
        self._inbox.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def _send(self, message: Any) -> None:
        if len(self.sent) == self._reads:
            self.stuck.set()
            await asyncio.Event().wait()
        self.sent.append(message)
