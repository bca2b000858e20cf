"""Answers as server-sent events, and the one rule of hanging up: work for a client ends when the client is gone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = "data: [DONE]\n\n"

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> str:
    """ASCII alone, because some clients break lines at more characters than the protocol does."""
    return f"data: {_encode(data)}\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Raises ClientDisconnect, with `work` cancelled and over, if the client hangs up first."""
    worker, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return await worker
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def open_stream(events: AsyncGenerator[str, None], receive: Receive) -> "EventStream":
    """Waits for the first event, so whatever fails before it is raised while the status can still say so."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(events.aclose)
        first = await while_connected(receive, _next(events))
        stack.pop_all()
    return EventStream(first, events)


async def _next(events: AsyncGenerator[str, None]) -> str:
    return await anext(events)


class EventStream(Response):
    """Sends events as they come. Closes their generator at the end, and at once if the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientDisconnect):
                await while_connected(receive, self._send_all(send))
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
        async for text in self._events:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
