"""Many async generators as one, item by item as they come; closing it closes them all."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def merge(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Items are never None. Raises what the first failing source raises, after the others are closed."""
    if len(sources) > 1:
        merged = _race(sources)
    else:
        (merged,) = sources  # the usual case needs no task per item
    async with aclosing(merged):
        async for item in merged:
            yield item


async def _race(sources: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    waiting = {_ask(source): source for source in sources}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in waiting if task in done]:
                source = waiting.pop(task)
                if (item := task.result()) is not None:
                    waiting[_ask(source)] = source
                    yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


def _ask(source: AsyncGenerator[Item, None]) -> asyncio.Task[Item | None]:
    async def ask() -> Item | None:
        return await anext(source, None)

    return asyncio.create_task(ask())
