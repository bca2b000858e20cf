"""The engine on a thread of its own: receive, step, publish, for ever. Its verbs may be called from any thread."""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue

from engine.core import EngineCore, EngineStats
from engine.errors import RequestError
from engine.intake import check
from engine.policies import PolicyConfig
from engine.request import FinishReason, Output, SamplingParams, StepOutput

logger = logging.getLogger(__name__)
Command = Callable[[], None]


class EngineLoop:
    """`publish` is called on the engine's thread, once per step, with what that step gave."""

    def __init__(self, core: EngineCore, publish: Callable[[StepOutput], None]) -> None:
        self._core = core
        self._publish = publish
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._preparing: set[str] = set()
        self._preparations = ThreadPoolExecutor(2, "prepare")
        self._stopping = False
        self._last_step = time.monotonic()
        self._stats = core.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step in progress. Open requests get no further output."""
        self._inbox.put(self._stop)
        self._thread.join()
        self._preparations.shutdown(wait=False, cancel_futures=True)

    def submit(
        self, request_id: str, prompt: list[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> None:
        """Raises RequestError at once if the request could never run.

        A request whose grammar has to be compiled enters the queue when that is done; nobody waits with it.
        """
        check(prompt, params, self._core.limits)

        def add() -> None:
            self._core.add(request_id, prompt, params, priority=priority, cache_salt=cache_salt)

        if params.grammar is None:
            self._inbox.put(add)
        else:
            self._preparing.add(request_id)
            self._preparations.submit(self._prepare, request_id, params, add)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Unknown and finished ids are ignored. No output follows for the others."""
        ids = list(request_ids)
        self._inbox.put(lambda: self._abort(ids))

    def set_policy(self, policy: PolicyConfig) -> None:
        self._inbox.put(lambda: self._core.set_policy(policy))

    def stats(self) -> EngineStats:
        """As of the last step. `last_step_age_s` counts while work waits and is 0 when there is none."""
        stats = self._stats
        busy = stats.running + stats.waiting > 0 or not self._inbox.empty()
        return replace(stats, last_step_age_s=time.monotonic() - self._last_step if busy else 0.0)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping:
            self._receive()
            if self._core.has_work and not self._stopping:
                self._step()
            self._stats = self._core.stats()

    def _receive(self) -> None:
        """All commands that are there; waits for one when there is nothing to do."""
        if not self._core.has_work:
            self._inbox.get()()
            self._last_step = time.monotonic()
        while True:
            try:
                self._inbox.get_nowait()()
            except Empty:
                return

    def _step(self) -> None:
        try:
            output = self._core.step()
        except Exception:  # the loop must live: one failed step ends its requests, not the engine
            logger.exception("A step failed; its requests end with an error and the engine goes on.")
            output = self._fail_all()
        self._last_step = time.monotonic()
        if output:
            self._publish(output)

    def _fail_all(self) -> StepOutput:
        message = "The engine failed while it computed this request; its log has the cause. Send it again."
        ids = self._core.abort_all()
        return StepOutput(others=[Output(one, finish_reason=FinishReason.ERROR, error=message) for one in ids])

    def _prepare(self, request_id: str, params: SamplingParams, add: Command) -> None:
        """On a thread of its own; what follows happens on the engine's."""
        try:
            self._core.prepare(params)
        except RequestError as error:
            refused = StepOutput(others=[Output(request_id, finish_reason=FinishReason.ERROR, error=error.message)])
            self._inbox.put(lambda: self._end_preparation(request_id, lambda: self._publish(refused)))
        else:
            self._inbox.put(lambda: self._end_preparation(request_id, add))

    def _end_preparation(self, request_id: str, then: Command) -> None:
        """Unless the request was aborted meanwhile."""
        if request_id in self._preparing:
            self._preparing.remove(request_id)
            then()

    def _abort(self, request_ids: list[str]) -> None:
        self._preparing.difference_update(request_ids)
        for request_id in request_ids:
            self._core.abort(request_id)

    def _stop(self) -> None:
        self._stopping = True
