"""The engine pools behind an ingress, and the choice of one for a request."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from deployments.choices import Choice, Delta, follow
from deployments.client import EngineClient, EngineInfo
from deployments.merge import merge
from deployments.siblings import generate_all
from engine.errors import EngineUnavailable, RequestError, SluiceError
from engine.intake import Limits

DESCRIBE_TIMEOUT_S = 5.0
ANY = "auto"


class Pool:
    """One engine pool as this ingress sees it.

    `info` is the last that the engine told about itself. `ready` is lost when the engine proves to be unavailable and
    comes back when it describes itself again. `in_flight` counts requests from this ingress.
    """

    def __init__(self, name: str, client: EngineClient) -> None:
        self.name = name
        self.client = client
        self.info: EngineInfo | None = None
        self.ready = False
        self.in_flight = 0
        self._asking: asyncio.Task[None] | None = None

    @property
    def limits(self) -> Limits:
        assert self.info is not None
        return self.info.limits

    def answers_to(self, hint: str) -> bool:
        return hint in (ANY, self.name) or (self.info is not None and hint == self.info.policy)

    def ask(self) -> asyncio.Task[None]:
        """Asks the engine to describe itself, once at a time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._describe())
        return self._asking

    async def run(self, choices: Sequence[Choice]) -> AsyncGenerator[tuple[Choice, Delta], None]:
        """The deltas of all choices as they come. Closing it aborts whatever has not ended."""
        self.in_flight += 1
        outputs = generate_all(self.client, choices)
        deltas = merge([follow(choice, own) for choice, own in zip(choices, outputs, strict=True)])
        try:
            async with aclosing(deltas):
                async for item in deltas:
                    yield item
        except EngineUnavailable:
            self.ready = False
            raise
        finally:
            self.in_flight -= 1

    async def _describe(self) -> None:
        try:
            self.info = await asyncio.wait_for(self.client.describe(), DESCRIBE_TIMEOUT_S)
            self.ready = True
        except (SluiceError, TimeoutError):
            self.ready = False


class PoolChoice(Protocol):
    """How a request finds its pool."""

    def choose(self, pools: Sequence[Pool], hint: str) -> Pool:
        """A ready pool that answers to the hint. Raises RequestError or EngineUnavailable if there is none."""
        ...


class LeastInFlight:
    """The fitting pool with the fewest requests in flight from this ingress; equal ones take turns."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, pools: Sequence[Pool], hint: str) -> Pool:
        fitting = [pool for pool in pools if pool.answers_to(hint)]
        if not fitting and all(pool.info for pool in pools):
            names = ", ".join([ANY, *(pool.name for pool in pools)])
            raise RequestError(f"policy is {hint!r}; send one of {names} or leave it out.", param="policy")
        ready = [pool for pool in fitting if pool.ready]
        if not ready:
            raise EngineUnavailable("No engine is ready yet; try again in a moment.", code="not_ready")
        fewest = min(pool.in_flight for pool in ready)
        tied = [pool for pool in ready if pool.in_flight == fewest]
        return tied[next(self._turn) % len(tied)]


class Pools:
    """All pools of an ingress under one way of choosing."""

    def __init__(self, clients: Mapping[str, EngineClient], choice: PoolChoice) -> None:
        self._pools = [Pool(name, client) for name, client in clients.items()]
        self._choice = choice

    async def choose(self, hint: str) -> Pool:
        await self._wake()
        return self._choice.choose(self._pools, hint)

    async def any_ready(self) -> bool:
        """Asks all engines anew."""
        await asyncio.wait([pool.ask() for pool in self._pools])
        return any(pool.ready for pool in self._pools)

    async def _wake(self) -> None:
        """Asks the pools that were not ready again, but waits for them only if no other can serve."""
        asking = [pool.ask() for pool in self._pools if not pool.ready]
        if len(asking) == len(self._pools):
            await asyncio.wait(asking)
