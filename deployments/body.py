"""Request bodies: read no further than a limit, and worked on beside the event loop when they are big."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from engine.errors import RequestError

MAX_BODY_BYTES = 16 * 2**20
# Above this, parsing and tokenizing take milliseconds, which other requests should not wait for.
INLINE_BYTES = 16 * 2**10

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class BodyTooLarge(RequestError):
    status = 413


async def read_body(request: Request, limit: int) -> bytes:
    """Raises BodyTooLarge from the Content-Length alone if it tells, else as soon as too much has come."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


async def work_on(
    size: int, work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> Result:
    """The result of `work`, done in a thread if the body it works on has many bytes."""
    if size <= INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over {limit} bytes; send a shorter one.", code="body_too_large")
