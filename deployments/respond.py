"""Answers in OpenAI's shapes: the whole of one, or the chunks of a stream. Plain dicts, ready for JSON."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from deployments.choices import Choice, Delta, Row
from deployments.schema import GenerationRequest
from deployments.tokenizer import Tokenizer
from engine.request import Logprob

LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str

    def over(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **body}


class Shape(Protocol):
    """One endpoint's way to write an answer."""

    def whole(self, answers: Sequence[tuple[Choice, Delta]]) -> dict[str, Any]: ...

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]: ...

    def last_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk without choices that carries a stream's usage."""
        ...


@dataclass(slots=True)
class _Shape:
    call: GenerationRequest
    heading: Heading
    tokenizer: Tokenizer
    begun: set[int] = field(default_factory=set)

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def last_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self.heading.over(self.chunk_kind, {"choices": [], "usage": usage(choices, self.call.n)})

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        unknown_yet = {"usage": None} if self.call.stream_options.include_usage else {}
        return self.heading.over(self.chunk_kind, {"choices": [choice], **unknown_yet})

    def _begins(self, choice: Choice) -> bool:
        """True the first time that this choice is written."""
        first = choice.index not in self.begun
        self.begun.add(choice.index)
        return first

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.tokens} if self.call.return_token_ids else {}


@dataclass(slots=True)
class CompletionShape(_Shape):
    """`text_completion`, streamed or not."""

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def whole(self, answers: Sequence[tuple[Choice, Delta]]) -> dict[str, Any]:
        written = [self._choice(choice, delta, self.call.logprob_count is not None) for choice, delta in answers]
        counts = usage([choice for choice, _ in answers], self.call.n)
        return self.heading.over(self.kind, {"choices": written, "usage": counts})

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return self._chunk(self._choice(choice, delta, bool(delta.rows)))

    def _choice(self, choice: Choice, delta: Delta, logprobs: bool) -> dict[str, Any]:
        written = {
            "index": choice.index,
            "text": delta.text,
            "logprobs": completion_logprobs(delta.rows, self.tokenizer) if logprobs else None,
            "finish_reason": delta.finish_reason,
            **self._token_ids(delta),
        }
        if self.call.return_token_ids and self._begins(choice):
            written["prompt_token_ids"] = choice.submission.prompt
        return written


@dataclass(slots=True)
class ChatShape(_Shape):
    """`chat.completion`, or its chunks. The role comes with a choice's first text, so it tells of a first token."""

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def whole(self, answers: Sequence[tuple[Choice, Delta]]) -> dict[str, Any]:
        written = [self._choice(choice, delta) for choice, delta in answers]
        counts = usage([choice for choice, _ in answers], self.call.n)
        prompt = {"prompt_token_ids": answers[0][0].submission.prompt} if self.call.return_token_ids else {}
        return self.heading.over(self.kind, {"choices": written, "usage": counts, **prompt})

    def chunk(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        first = self._begins(choice)
        role = {"role": "assistant"} if first else {}
        content = {"content": delta.text} if first or delta.text else {}
        written = self._chunk(
            {
                "index": choice.index,
                "delta": {**role, **content},
                "logprobs": chat_logprobs(delta.rows, self.tokenizer) if delta.rows else None,
                "finish_reason": delta.finish_reason,
                **self._token_ids(delta),
            }
        )
        if self.call.return_token_ids and first:
            written["prompt_token_ids"] = choice.submission.prompt
        return written

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        wanted = self.call.logprob_count is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": chat_logprobs(delta.rows, self.tokenizer) if wanted else None,
            "finish_reason": delta.finish_reason,
            **self._token_ids(delta),
        }


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
    """Token counts over all choices. The n choices of a prompt share it, so it counts once, as its first one saw it."""
    firsts = choices[::n]
    prompt = sum(len(choice.submission.prompt) for choice in firsts)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts)},
    }


def completion_logprobs(rows: Sequence[Row], tokenizer: Tokenizer) -> dict[str, Any]:
    """Four parallel lists. `tokens` joined are the text; a character of several tokens stands with the last of them."""
    return {
        "tokens": [row.text for row in rows],
        "token_logprobs": [row.logprob and finite(row.logprob.logprob) for row in rows],
        "top_logprobs": [_top(row.logprob, tokenizer) for row in rows],
        "text_offset": [row.offset for row in rows],
    }


def _top(logprob: Logprob | None, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The most likely tokens, and the chosen one if it is not among them. None where nothing was asked for."""
    if logprob is None or not logprob.top:
        return None
    pairs = [*logprob.top, (logprob.token, logprob.logprob)]
    return {tokenizer.token_name(token): finite(value) for token, value in pairs}


def chat_logprobs(rows: Sequence[Row], tokenizer: Tokenizer) -> dict[str, Any]:
    """One entry a token. Joined, `bytes` are the content; a token that is not shown, such as EOS, has none."""

    def entry(token: int, logprob: float, shown: bool = True) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token) if shown else b""
        return {"token": tokenizer.token_name(token), "logprob": finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            {
                **entry(row.token, row.logprob.logprob, row.shown),
                "top_logprobs": [entry(token, value) for token, value in row.logprob.top],
            }
            for row in rows
            if row.logprob is not None
        ],
        "refusal": None,
    }


def finite(logprob: float) -> float:
    """JSON has no infinity: impossible tokens get -9999.0, as clients of OpenAI's API know it."""
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
