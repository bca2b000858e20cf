"""A pool behind a Serve handle: Serve's errors come out as ours, and leaving always cancels."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.client import EngineInfo, Submission
from deployments.handle import HandleClient
from engine.errors import EngineUnavailable, PromptTooLong, QueueFull
from engine.intake import Limits
from engine.request import Output, SamplingParams

pytestmark = pytest.mark.anyio
SUBMISSION = Submission("a", [1], SamplingParams())
INFO = EngineInfo("model", "preemption", Limits(max_model_len=64, kv_tokens=64, vocab_size=100))
TOO_LONG = PromptTooLong("too long", param="prompt", code="context_length_exceeded")


class FakeResponse:
    """What a streaming call gives: outputs, then an error if there is one, else it goes on for ever."""

    def __init__(self, outputs: list[Output], error: Exception | None) -> None:
        self._outputs = outputs
        self._error = error
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Output]:
        for output in self._outputs:
            yield output
        if self._error is None:
            await asyncio.Event().wait()
        else:
            raise self._error

    def cancel(self) -> None:
        self.cancelled = True


class FakeHandle:
    """A DeploymentHandle as far as it is used."""

    def __init__(self, error: Exception | None = None, *, up: bool = True) -> None:
        self.response = FakeResponse([Output("a", (5,))], error)
        self._error = error
        self._up = up

    def options(self, *, stream: bool, method_name: str) -> "FakeHandle":
        assert stream
        assert method_name == "generate"
        return self

    def running_replicas_populated(self) -> bool:
        return self._up

    def remote(self, submission: Submission) -> FakeResponse:
        assert submission is SUBMISSION
        return self.response

    @property
    def describe(self) -> "FakeMethod":
        return FakeMethod(self._error)


class FakeMethod:
    def __init__(self, error: Exception | None) -> None:
        self._error = error

    async def remote(self) -> EngineInfo:
        if self._error is not None:
            raise self._error
        return INFO


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def client(handle: Any) -> HandleClient:
    return HandleClient(handle)


def in_task(cause: Exception) -> Exception:
    """The error as Ray raises it at the caller: of both types at once."""
    error: Any = RayTaskError
    return error("generate", "Traceback", cause).as_instanceof_cause()  # type: ignore[no-any-return]


ERRORS = [
    (in_task(TOO_LONG), PromptTooLong),
    (in_task(EngineUnavailable("gone")), EngineUnavailable),
    (ActorDiedError(), EngineUnavailable),
    (ActorUnavailableError("busy", b"0" * 16), EngineUnavailable),
    (BackPressureError(10, 10), QueueFull),
    (DeploymentUnavailableError(DeploymentID("pool")), EngineUnavailable),
]


@pytest.mark.parametrize(("raised", "expected"), ERRORS)
async def test_an_error_amid_a_stream_comes_out_as_ours(raised: Exception, expected: type[Exception]) -> None:
    handle = FakeHandle(raised)
    outputs = client(handle).generate(SUBMISSION)
    assert (await anext(outputs)).tokens == (5,)
    with pytest.raises(expected) as caught:
        await anext(outputs)
    assert type(caught.value) is expected
    assert handle.response.cancelled


@pytest.mark.parametrize(("raised", "expected"), ERRORS)
async def test_an_error_of_a_question_comes_out_as_ours(raised: Exception, expected: type[Exception]) -> None:
    with pytest.raises(expected):
        await client(FakeHandle(raised)).describe()


async def test_our_errors_keep_their_fields() -> None:
    with pytest.raises(PromptTooLong) as caught:
        await client(FakeHandle(in_task(TOO_LONG))).describe()
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


async def test_a_bug_of_ours_stays_what_it_is() -> None:
    with pytest.raises(ZeroDivisionError):
        await client(FakeHandle(in_task(ZeroDivisionError("x")))).describe()


async def test_leaving_a_stream_cancels_it() -> None:
    handle = FakeHandle()
    outputs = client(handle).generate(SUBMISSION)
    await anext(outputs)
    await outputs.aclose()
    assert handle.response.cancelled


async def test_a_stream_that_is_cancelled_while_it_waits_cancels_its_call() -> None:
    handle = FakeHandle()
    outputs = client(handle).generate(SUBMISSION)
    await anext(outputs)
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert handle.response.cancelled


async def test_while_no_replica_is_up_nobody_waits_for_one() -> None:
    with pytest.raises(EngineUnavailable, match="loading"):
        await client(FakeHandle(up=False)).describe()
    with pytest.raises(EngineUnavailable, match="loading"):
        await anext(client(FakeHandle(up=False)).generate(SUBMISSION))


async def test_an_answer_is_passed_on() -> None:
    assert await client(FakeHandle()).describe() == INFO
