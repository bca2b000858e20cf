"""The Serve replica of one engine: it starts the engine's actor, and shares out what the steps give.

Everything here runs on one event loop and never waits for a step. No torch here.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from deployments.actor import EngineActor
from deployments.client import EngineInfo, Submission
from deployments.config import UserConfig
from deployments.inbox import Inboxes
from deployments.ray_errors import translate
from engine.config import EngineConfig
from engine.core import EngineStats
from engine.errors import EngineUnavailable, SluiceError
from engine.intake import check
from engine.policies import PolicyConfig
from engine.request import Output

ANSWER_S = 5.0

logger = logging.getLogger("ray.serve")


class RemoteEngine:
    """The engine in its own process, as seen from the replica."""

    def __init__(self, actor: ActorHandle[EngineActor], info: EngineInfo) -> None:
        self._actor = actor
        self._info = info
        self._inboxes = Inboxes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._deliver())

    @property
    def info(self) -> EngineInfo:
        """Raises EngineUnavailable if the engine is dead."""
        self._inboxes.check()
        return self._info

    async def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        check(submission.prompt, submission.params, self._info.limits)
        inbox = self._inboxes.open(submission.id)
        submitted = asyncio.ensure_future(_call(self._actor, "submit", submission))
        try:
            await asyncio.shield(submitted)
            async for output in inbox.outputs():
                yield output
        finally:
            self._inboxes.close(submission.id)
            if not inbox.finished:
                self._spawn(self._abort(submission.id, submitted))

    async def set_policy(self, policy: PolicyConfig) -> None:
        await _call(self._actor, "set_policy", policy)
        self._info = replace(self._info, policy=policy.kind)

    async def stats(self) -> EngineStats:
        """Raises EngineUnavailable if the engine is dead, or its process does not answer."""
        self._inboxes.check()
        try:
            async with asyncio.timeout(ANSWER_S):
                stats: EngineStats = await _call(self._actor, "stats")
        except TimeoutError as error:
            raise EngineUnavailable(f"The engine's process has not answered for {ANSWER_S:.0f} s.") from error
        return stats

    async def _deliver(self) -> None:
        """For ever: take what the steps gave and share it out."""
        try:
            while True:
                for step in await _call(self._actor, "collect"):
                    self._inboxes.deliver(step)
        except (SluiceError, RayError) as error:
            logger.error("The engine has failed; its requests end: %s", error)
            self._inboxes.fail(EngineUnavailable("The engine has failed. Send the request again.", code="engine_gone"))

    async def _abort(self, request_id: str, submitted: asyncio.Future[None]) -> None:
        """After the submission, however that ended: an abort that overtook it would be lost."""
        await asyncio.wait([submitted])
        if submitted.exception() is None:
            with suppress(EngineUnavailable):  # then nothing is left to abort
                await _call(self._actor, "abort", [request_id])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def start_engine(config: EngineConfig, actor_options: dict[str, Any]) -> RemoteEngine:
    """In a process of its own, which ends with this one. Raises ConfigError if the model cannot be had or loaded."""
    actor = cast(ActorHandle[EngineActor], ray.remote(EngineActor).options(**actor_options).remote())
    return RemoteEngine(actor, await _call(actor, "load", config))


async def _call(actor: ActorHandle[EngineActor], verb: str, *args: Any) -> Any:
    try:
        return await getattr(actor, verb).remote(*args)
    except RayError as error:
        raise translate(error) from error


class EngineReplica:
    """One engine of a pool. The policy comes with the first `reconfigure`, which therefore starts the engine."""

    def __init__(self, config: EngineConfig, actor_options: dict[str, Any], stalled_after_s: float) -> None:
        self._config = config
        self._actor_options = actor_options
        self._stalled_after_s = stalled_after_s
        self._engine: RemoteEngine | None = None

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        policy = UserConfig.model_validate(user_config).policy
        if self._engine is not None:
            await self._engine.set_policy(policy)
            return
        self._engine = await start_engine(self._config.model_copy(update={"policy": policy}), self._actor_options)

    async def describe(self) -> EngineInfo:
        return self._running.info

    async def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        """See EngineClient.generate, save that one Output may hold several steps' tokens."""
        async with aclosing(self._running.generate(submission)) as outputs:
            async for output in outputs:
                yield output

    async def stats(self) -> EngineStats:
        return await self._running.stats()

    async def check_health(self) -> None:
        """Raises if the engine is dead, or has made no step for a while although there is work."""
        age_s = (await self._running.stats()).last_step_age_s
        if age_s > self._stalled_after_s:
            raise EngineUnavailable(f"The engine has work but has made no step for {age_s:.0f} s.")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Coarse on purpose: Serve tells every router of every change."""
        stats = await self._running.stats()
        return {
            "policy": stats.policy,
            "waiting": stats.waiting,
            "kv_used": round(stats.kv_blocks_used / stats.kv_blocks_total, 1),
        }

    @property
    def _running(self) -> RemoteEngine:
        if self._engine is None:
            raise EngineUnavailable("The engine is loading. Try again in a moment.", code="loading")
        return self._engine
