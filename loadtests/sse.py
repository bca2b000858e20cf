"""Reads a streamed answer as a client does, with the time of each piece. No locust here."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


class StreamError(Exception):
    """The stream carried an error event, or ended before `[DONE]`."""


@dataclass(slots=True)
class Timeline:
    """When the request was sent, and when each piece of text arrived, in seconds of the same clock."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    completion_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def e2e_s(self) -> float:
        return self.pieces[-1] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON of each `data:` line up to `[DONE]`. Raises StreamError if that never comes or an error does."""
    for line in lines:
        if not line.startswith("data:"):
            continue  # comments and blank lines separate events
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise StreamError(event["error"].get("message", data))
        yield event
    raise StreamError("the stream ended before [DONE]")


def follow(lines: Iterable[str], sent: float, clock: Callable[[], float]) -> Timeline:
    """Consume a stream of chat chunks; an event counts as a piece when it carries text."""
    timeline = Timeline(sent)
    for event in events(lines):
        if any(choice.get("delta", {}).get("content") for choice in event["choices"]):
            timeline.pieces.append(clock())
        if event.get("usage"):
            timeline.completion_tokens = event["usage"]["completion_tokens"]
    return timeline
