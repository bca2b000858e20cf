"""The one seam between the ingress and an engine, wherever that engine runs: tokens in, tokens out."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from engine.intake import Limits
from engine.request import Output, SamplingParams


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as it crosses to an engine. `id` is unique in the fleet and never chosen by a client.

    A smaller `priority` is more urgent. Only submissions of one `cache_salt` share cached KV; "" is the salt of those
    that name none.
    """

    id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine tells about itself once it is ready."""

    model: str
    policy: str
    limits: Limits


class EngineClient(Protocol):
    """An engine pool as the ingress sees it."""

    async def describe(self) -> EngineInfo:
        """Raises EngineUnavailable while the engine is loading or gone."""
        ...

    def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        """One Output per step that gave this request something; the last carries `finish_reason`.

        Closing the generator, at any point, aborts the request and frees its blocks. Raises RequestError (bad
        request) or EngineUnavailable before the first Output; the caller must take the first Output before it
        sends a response header.
        """
        ...
