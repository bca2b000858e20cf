"""An engine pool behind a Serve handle, as an EngineClient. Serve's errors end here and come out as ours."""

from collections.abc import AsyncGenerator
from typing import Any, cast

from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from deployments.client import EngineInfo, Submission
from deployments.ray_errors import REMOTE_ERRORS, translate
from engine.core import EngineStats
from engine.errors import EngineUnavailable
from engine.request import Output


class HandleClient:
    """The pool that `handle` leads to; Serve chooses the replica."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._stream = handle.options(stream=True, method_name="generate")

    async def describe(self) -> EngineInfo:
        info: EngineInfo = await self._ask("describe")
        return info

    async def stats(self) -> EngineStats:
        """Of one replica, which Serve chooses."""
        stats: EngineStats = await self._ask("stats")
        return stats

    async def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        self._check_up()
        response = cast(DeploymentResponseGenerator[Output], self._stream.remote(submission))
        try:
            async for output in response:
                yield output
        except REMOTE_ERRORS as error:
            raise translate(error) from error
        finally:
            # Serve cancels by itself when the client leaves, but not when the proxy between us dies.
            response.cancel()  # type: ignore[no-untyped-call]

    async def _ask(self, method: str) -> Any:
        self._check_up()
        try:
            return await getattr(self._handle, method).remote()
        except REMOTE_ERRORS as error:
            raise translate(error) from error

    def _check_up(self) -> None:
        """Serve would let the request wait for the first replica, which may take minutes to load."""
        if not self._handle.running_replicas_populated():
            raise EngineUnavailable("The engine is loading. Try again in a moment.", code="loading")
