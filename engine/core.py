"""One engine as a plain object: requests in, one step at a time, outputs out. No thread, no text, no device code."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.contract import Executor
from engine.intake import Limits, check
from engine.policies import PolicyConfig
from engine.request import Output, Request, SamplingParams
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


class EngineCore:
    """`step` is the whole loop: plan, run, take in the results. Call it while `has_work`."""

    def __init__(self, scheduler: Scheduler, executor: Executor, limits: Limits, timer: StepTimer) -> None:
        self.limits = limits
        self._scheduler = scheduler
        self._executor = executor
        self._timer = timer
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def steps(self) -> int:
        """Steps that ran something."""
        return self._timer.steps

    def add(self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0) -> None:
        """Raises RequestError if the request could never run."""
        check(prompt, params, self.limits)
        self._prompt_tokens += len(prompt)
        self._scheduler.add(Request(request_id, list(prompt), len(prompt), params, priority), self._timer.now)

    def abort(self, request_id: str) -> bool:
        return self._scheduler.abort(request_id)

    def abort_all(self) -> list[str]:
        return self._scheduler.abort_all()

    def set_policy(self, policy: PolicyConfig) -> None:
        """From the next step on; requests that run go on under the new policy."""
        self._scheduler.policy = policy.build()

    def step(self) -> list[Output]:
        with self._timer.part("plan"):
            chunks = self._scheduler.plan(self._timer.now)
        if not chunks:
            return self._scheduler.take_failures()
        sampled = self._executor.submit(chunks, ())()
        with self._timer.part("publish"):
            outputs = self._scheduler.take_failures() + self._scheduler.resolve(chunks, sampled)
        self._timer.steps += 1
        self._generated_tokens += len(sampled.tokens)
        return outputs

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
