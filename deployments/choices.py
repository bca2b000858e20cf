"""One choice of an answer: what the engine outputs for it, turned into text, log probability rows and an end.

Both answer modes are fed from the same deltas, so a joined stream is the plain answer.
"""

from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.client import Submission
from deployments.detokenize import Detokenizer, StopStrings
from deployments.tokenizer import Tokenizer
from engine.errors import EngineUnavailable, SluiceError
from engine.request import FinishReason, Logprob, Output


class Row(NamedTuple):
    """A token's log probability, the text that became final with it, and where in the choice's text that begins.

    `logprob` is None for the first token of an echoed prompt. `shown` is False for a token that never becomes text.
    """

    token: int
    text: str
    offset: int
    logprob: Logprob | None
    shown: bool = True


@dataclass(slots=True)
class Delta:
    """What has become final of a choice since the delta before."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Style:
    """How a request wants its tokens written. `echo` is the prompt's text, one piece a token, or nothing."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    echo: tuple[str, ...] = ()


class Choice:
    """Follows one submission from its first Output to its end.

    `completion_tokens` counts every token up to the end: an EOS or stop token, whose text is never shown, and the
    token that completes a stop string are counted; tokens that the engine made behind it are not.
    """

    def __init__(self, index: int, submission: Submission, style: Style, tokenizer: Tokenizer) -> None:
        self.index = index
        self.submission = submission
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._style = style
        self._skipped = tokenizer.special_ids if style.skip_special_tokens else frozenset()
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=style.skip_special_tokens)
        self._stops = StopStrings(style.stop, submission.params.min_tokens)
        self._rows: deque[Row] = deque()
        self._written = 0
        self._delta = Delta()
        self._released = 0
        self._show_prompt()

    def feed(self, output: Output) -> Delta | None:
        """What this Output makes final, or None if it shows nothing yet. Raises SluiceError if the engine failed."""
        _raise_failure(output)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self._echo_rows(output.prompt_logprobs or [])
        for position in range(len(output.tokens)):
            self._feed_token(output, position)
            if self._stops.matched:
                self.finish_reason = FinishReason.STOP
                break
        else:
            self._finish(output.finish_reason)
        return self._take()

    def _show_prompt(self) -> None:
        self._delta.text = "".join(self._style.echo)
        self._written = self._released = len(self._delta.text)

    def _echo_rows(self, logprobs: Sequence[Logprob | None]) -> None:
        offset = 0
        for token, text, logprob in zip(self.submission.prompt, self._style.echo, logprobs, strict=False):
            self._delta.rows.append(Row(token, text, offset, logprob))
            offset += len(text)

    def _feed_token(self, output: Output, position: int) -> None:
        token = output.tokens[position]
        last = output.finish_reason is not None and position == len(output.tokens) - 1
        shown = not (last and output.stop_token is not None)
        text = self._detokenizer.feed(token) if shown else ""
        if last:
            text += self._detokenizer.finish()
        self.completion_tokens += 1
        self._delta.tokens.append(token)
        if output.logprobs is not None:
            shown = shown and token not in self._skipped
            self._rows.append(Row(token, text, self._written, output.logprobs[position], shown))
        self._written += len(text)
        self._show(self._stops.feed(text))

    def _finish(self, reason: FinishReason | None) -> None:
        if reason is None:
            return
        self.finish_reason = reason
        self._show(self._stops.flush())
        self._delta.rows += self._rows
        self._rows.clear()

    def _show(self, text: str) -> None:
        """Adds final text, and the rows of the tokens whose text has begun in it."""
        self._delta.text += text
        self._released += len(text)
        while self._rows and self._rows[0].offset < self._released:
            self._delta.rows.append(self._rows.popleft())

    def _take(self) -> Delta | None:
        if not self._delta.text and self.finish_reason is None:
            return None
        taken, self._delta = self._delta, Delta()
        taken.finish_reason = self.finish_reason
        return taken


def _raise_failure(output: Output) -> None:
    # The engine's own words stay inside: they may hold a stack trace.
    if output.finish_reason is FinishReason.ERROR:
        raise SluiceError("The engine failed on this request; send it again.", code="engine_error")
    if output.finish_reason is FinishReason.ABORT:
        raise EngineUnavailable("The engine gave this request up; send it again.", code="aborted")


async def follow(choice: Choice, outputs: AsyncGenerator[Output, None]) -> AsyncGenerator[tuple[Choice, Delta], None]:
    """A choice's deltas. Leaving, at its end or before, closes `outputs`, which aborts what is still running."""
    async with aclosing(outputs):
        async for output in outputs:
            if delta := choice.feed(output):
                yield choice, delta
            if choice.finish_reason:
                return
    raise EngineUnavailable("The engine ended this answer early; send the request again.", code="engine_error")


def join(deltas: Iterable[Delta]) -> Delta:
    """One delta that says what all of them say."""
    parts = list(deltas)
    return Delta(
        text="".join(part.text for part in parts),
        tokens=[token for part in parts for token in part.tokens],
        rows=[row for part in parts for row in part.rows],
        finish_reason=parts[-1].finish_reason if parts else None,
    )
