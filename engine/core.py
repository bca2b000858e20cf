"""One engine as a plain object: requests in, one step at a time, outputs out. No thread, no text, no device code."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.cache.events import CacheEvents
from engine.contract import Executor, Sampled, StepPlan
from engine.intake import Limits, check
from engine.policies import PolicyConfig
from engine.request import Request, SamplingParams, StepOutput
from engine.scheduler import Scheduler
from engine.timing import PARTS, StepTimer


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. `part_seconds` is the time in each part of all steps so far, `notes` what the policy counted."""

    policy: str
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    evictions: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    part_seconds: dict[str, float]
    last_step_age_s: float = 0.0
    notes: dict[str, int] = field(default_factory=dict)


def _drop(events: CacheEvents) -> None:
    """Nobody routes by what this engine remembers."""


class EngineCore:
    """`step` is the whole loop: plan, run, take in the results. Call it while `has_work`.

    `depth` is how many steps may be in flight while the next is planned: 0, or 1 for overlap. `on_events` is told once
    a step what became findable in the KV cache and what is gone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: Limits,
        timer: StepTimer,
        *,
        depth: int = 0,
        on_events: Callable[[CacheEvents], None] = _drop,
    ) -> None:
        assert depth in (0, 1), "a third step would have to know tokens of the first"
        self.limits = limits
        self._scheduler = scheduler
        self._executor = executor
        self._timer = timer
        self._depth = depth
        self._on_events = on_events
        self._in_flight: deque[tuple[StepPlan, Callable[[], Sampled]]] = deque()
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or self.in_flight > 0

    @property
    def in_flight(self) -> int:
        """Steps whose results have not been taken in."""
        return len(self._in_flight)

    @property
    def steps(self) -> int:
        """Steps that ran something."""
        return self._timer.steps

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Raises RequestError if the request could never run."""
        check(prompt, params, self.limits)
        self._executor.prepare(params)
        self._prompt_tokens += len(prompt)
        request = Request(request_id, list(prompt), len(prompt), params, priority, cache_salt)
        self._scheduler.add(request, self._timer.now)

    def prepare(self, params: SamplingParams) -> None:
        """What `add` would otherwise wait for; may be called from any thread. Raises RequestError as `add` does."""
        self._executor.prepare(params)

    def abort(self, request_id: str) -> bool:
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[str]:
        """Ends everything, also what is in flight: after a failure nothing computed or copied can be trusted."""
        self._in_flight.clear()
        self._scheduler.kv.clear()
        return self._scheduler.abort_all()

    def set_policy(self, policy: PolicyConfig) -> None:
        """From the next step on; requests that run go on under the new policy."""
        self._scheduler.policy = policy.build()

    def clear_prefix_cache(self) -> None:
        """Forget all computed prefixes; running requests go on."""
        self._scheduler.kv.clear()

    def step(self) -> StepOutput:
        """Starts one step, and takes in the oldest in flight once there are more than `depth` or nothing can start.

        Requests that a policy gave up are told, too.
        """
        started = self._start()
        failures = self._scheduler.take_failures()
        output = StepOutput()
        if self._in_flight and (not started or self.in_flight > self._depth):
            output = self._finish()
        output.others += failures
        self._on_events(self._scheduler.kv.take_events())
        return output

    def _start(self) -> bool:
        with self._timer.part("plan"):
            plan = self._scheduler.plan(self._timer.now)
        if not plan:
            return False
        self._in_flight.append((plan, self._executor.submit(plan)))
        self._timer.steps += 1
        return True

    def _finish(self) -> StepOutput:
        plan, result = self._in_flight.popleft()
        sampled = result()
        with self._timer.part("publish"):
            output = self._scheduler.resolve(plan, sampled)
        self._generated_tokens += output.num_tokens
        return output

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            policy=scheduler.policy.kind,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_blocks_used=scheduler.kv.used_blocks,
            kv_blocks_total=scheduler.kv.usable_blocks,
            evictions=scheduler.num_evictions,
            steps=self._timer.steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            notes=dict(scheduler.notes),
            part_seconds={part: self._timer.seconds[part] for part in PARTS},
        )
