"""From one message per step to one stream per request: who waits gets all that has come meanwhile, as one Output.

Nothing can pile up: what is not taken yet is merged, and a request never holds more than its own `max_tokens`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable

from engine.errors import SluiceError
from engine.request import Output


class Inbox:
    """What one request has been given and not yet taken."""

    def __init__(self) -> None:
        self._output: Output | None = None
        self._error: SluiceError | None = None
        self._changed = asyncio.Event()
        self.finished = False

    def put(self, output: Output) -> None:
        self._output = output if self._output is None else merge(self._output, output)
        self._changed.set()

    def fail(self, error: SluiceError) -> None:
        self._error = error
        self._changed.set()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """One Output per wake-up, ends after the one with a finish reason. Raises what `fail` was given."""
        while not self.finished:
            await self._changed.wait()
            self._changed.clear()
            output, self._output = self._output, None
            self.finished = self._error is not None or (output is not None and output.finish_reason is not None)
            if output is not None:
                yield output
            if self._error is not None:
                raise self._error


class Inboxes:
    """The open requests of one engine. Outputs for requests that have left are dropped."""

    def __init__(self) -> None:
        self._open: dict[str, Inbox] = {}
        self._error: SluiceError | None = None

    def check(self) -> None:
        """Raises the error that `fail` was given, if it was."""
        if self._error is not None:
            raise self._error

    def open(self, request_id: str) -> Inbox:
        """Raises the error that `fail` was given, if it was."""
        assert request_id not in self._open, f"request id {request_id} is in use"
        self.check()
        inbox = self._open[request_id] = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        del self._open[request_id]

    def deliver(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if (inbox := self._open.get(output.request_id)) is not None:
                inbox.put(output)

    def fail(self, error: SluiceError) -> None:
        """Every open request ends with `error`, and so does every later one."""
        self._error = error
        for inbox in self._open.values():
            inbox.fail(error)


def merge(first: Output, second: Output) -> Output:
    """Two Outputs of one request as one, in this order."""
    logprobs = [*(first.logprobs or ()), *(second.logprobs or ())]
    return Output(
        first.request_id,
        tokens=first.tokens + second.tokens,
        logprobs=logprobs if first.logprobs is not None or second.logprobs is not None else None,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        finish_reason=second.finish_reason,
        stop_token=second.stop_token,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        error=second.error,
    )
