"""Choices of one prompt share its KV: the first goes ahead, and the others find its blocks once they are computed.

All at once, each would compute the whole prompt: blocks become findable only after the step that wrote them.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import groupby

from deployments.choices import Choice
from deployments.client import EngineClient
from engine.request import Output

Outputs = AsyncGenerator[Output, None]


def generate_all(client: EngineClient, choices: Sequence[Choice]) -> list[Outputs]:
    """What the engine gives each choice, in their order. Nothing is submitted before its generator is asked."""
    outputs: list[Outputs] = []
    for _, group in groupby(choices, key=lambda choice: id(choice.submission.prompt)):
        first, *others = (client.generate(choice.submission) for choice in group)
        if others:
            begun = asyncio.Event()
            outputs += [_tell(begun, first), *(_wait(begun, other) for other in others)]
        else:
            outputs.append(first)
    return outputs


async def _tell(begun: asyncio.Event, outputs: Outputs) -> Outputs:
    """A failure tells nobody: it ends the whole request, and the others must not be sent any more."""
    async with aclosing(outputs):
        async for output in outputs:
            begun.set()
            yield output


async def _wait(begun: asyncio.Event, outputs: Outputs) -> Outputs:
    await begun.wait()
    async with aclosing(outputs):
        async for output in outputs:
            yield output
