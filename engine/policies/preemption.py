"""Policy `preemption`: one token budget for all, running requests first, evict the least urgent when memory is short.

    waiting ──admit──▶ running ──EOS, stop, length──▶ finished
       ▲                  │
       └──────evict───────┘      output kept, KV dropped, front of the queue

The source of the algorithm is vLLM V1's unified scheduler. A prompt longer than what is left of the budget is cut
there and goes on in the next step: chunked prefill needs no code of its own. Where it differs from its source:
nobody is evicted unless that is enough for the one who asks; an eviction of oneself does not end the pass; a few
smaller requests may pass a blocked head of the queue; waiting makes urgent.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import Field, model_validator

from engine.contract import Step
from engine.policies.base import PolicyBase
from engine.request import Request

LOOK_BEHIND = 32  # requests behind a blocked head that are looked at, so that a long queue costs no more than this


class Preemption(PolicyBase):
    """`order` fcfs: first come, first served, and the newest is evicted. `order` priority: the smallest value first.

    `long_prefill_token_threshold` caps one request's tokens in a step while others are about (0: off). `watermark` is
    the share of the pool kept free when admitting. `max_bypass` smaller requests may pass a head that does not fit.
    Every `aging_seconds` of waiting lower the priority value by one (0: off).
    """

    kind: Literal["preemption"] = "preemption"
    max_num_batched_tokens: int = Field(512, ge=1)
    long_prefill_token_threshold: int = Field(0, ge=0)
    order: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = Field(0.0, ge=0.0, lt=1.0)
    max_bypass: int = Field(4, ge=0)
    aging_seconds: float = Field(0.0, ge=0.0)

    @model_validator(mode="after")
    def _a_token_for_everyone(self) -> "Preemption":
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running request needs one token a step"
            )
        return self

    def build(self) -> "PreemptionPolicy":
        return PreemptionPolicy(self)


class PreemptionPolicy:
    """Remembers nothing but how many passed each blocked head of the queue, by the arrival of the head."""

    kind = "preemption"

    def __init__(self, config: Preemption) -> None:
        self.max_num_seqs = config.max_num_seqs
        self._config = config
        self._order = BY_ARRIVAL if config.order == "fcfs" else _by_priority(config.aging_seconds)
        self._passed: Counter[int] = Counter()

    def plan(self, step: Step) -> None:
        self._continue_running(step)
        if not step.evicted:
            self._admit_waiting(step)

    def _continue_running(self, step: Step) -> None:
        queue, passed = tuple(step.running), 0
        while passed < len(queue) and self._left(step):
            passed += step.run_all(queue[passed:], self._left(step), self._limit(step))
            if passed < len(queue) and self._left(step):
                self._make_room(step, queue[passed], self._limit(step))
                passed += 1

    def _make_room(self, step: Step, request: Request, limit: int) -> None:
        """Evict those less urgent, the least urgent first, if that is enough; the least urgent of all evicts itself."""
        eligible = self._order.less_urgent(step, request)
        if not eligible:
            step.evict(request)
            return
        wanted = step.kv.missing(request, min(request.computed + limit, request.due))
        if wanted > step.kv.room + step.kv.freed(eligible):
            return
        for victim in eligible:
            step.evict(victim)
            if step.run(request, limit):
                return

    def _admit_waiting(self, step: Step) -> None:
        if not step.waiting:
            self._passed.clear()
        if not step.waiting or len(step.running) >= self.max_num_seqs or not self._limit(step):
            return
        for request in self._order.queue(step):
            limit = self._limit(step)
            if limit == 0 or len(step.running) >= self.max_num_seqs:
                return
            if not self._admit(step, request, limit):
                self._let_pass(step, request)
                return
            del self._passed[request.arrival]

    def _admit(self, step: Step, request: Request, limit: int) -> bool:
        """The whole sequence must fit, not only its first chunk: it would soon evict those that run."""
        spare = int(self._config.watermark * step.kv.usable_blocks) if step.running else 0
        if step.kv.missing(request, len(request.tokens)) + spare > step.kv.room:
            return False
        return step.run(request, limit)

    def _let_pass(self, step: Step, head: Request) -> None:
        """Smaller requests use the room that the head cannot, a few times; then it is the head's turn.

        Nobody passes a request that was evicted: it has waited once already.
        """
        if head.evictions:
            return
        behind = [request for request in self._order.queue(step)[: LOOK_BEHIND + 1] if request is not head]
        for request in behind:
            limit = self._limit(step)
            spent = limit == 0 or self._passed[head.arrival] >= self._config.max_bypass
            if spent or len(step.running) >= self.max_num_seqs:
                return
            if len(request.tokens) < len(head.tokens) and self._admit(step, request, limit):
                self._passed[head.arrival] += 1

    def _left(self, step: Step) -> int:
        return self._config.max_num_batched_tokens - step.tokens

    def _limit(self, step: Step) -> int:
        """For one request."""
        threshold = self._config.long_prefill_token_threshold
        if threshold and len(step.running) + len(step.waiting) > 1:
            return min(self._left(step), threshold)
        return self._left(step)


class _Order:
    """Who is served first and who is evicted first: opposite ends of one order."""

    def queue(self, step: Step) -> Sequence[Request]:
        return tuple(step.waiting)

    def less_urgent(self, step: Step, request: Request) -> list[Request]:
        """Running requests that may be evicted for `request`, the first to go first."""
        return list(step.running[: step.running.index(request) : -1])


class _Priority(_Order):
    """`value` of a request and the time: the smallest is the most urgent."""

    def __init__(self, value: Callable[[Request, float], float]) -> None:
        self._value = value

    def queue(self, step: Step) -> Sequence[Request]:
        """Among equals the order of `step.waiting`: who was evicted is at the front of its class."""
        return sorted(step.waiting, key=lambda request: self._value(request, step.now))

    def less_urgent(self, step: Step, request: Request) -> list[Request]:
        def key(other: Request) -> tuple[float, int]:
            return self._value(other, step.now), other.arrival

        return sorted((other for other in step.running if key(other) > key(request)), key=key, reverse=True)


BY_ARRIVAL = _Order()


def _by_priority(aging_seconds: float) -> _Order:
    def plain(request: Request, now: float) -> float:
        return request.priority

    def aged(request: Request, now: float) -> float:
        return request.priority - (now - request.arrived_s) // aging_seconds

    return _Priority(aged if aging_seconds else plain)
