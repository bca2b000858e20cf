"""The mechanism under every policy: queues, chunks, blocks and what a step's tokens do to them.

A policy asks through `Step`; nobody else changes a queue. No torch, no Ray, no clock.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.cache.paged import PagedKV
from engine.contract import Chunk, KVCache, Move, Policy, Sampled, StepPlan
from engine.request import FinishReason, Output, Request, StepOutput
from engine.resolve import Resolver
from engine.speculate import Drafts, NoDrafts


class StepInTheMaking:
    """The one place where a policy's wishes become queue and block changes. See `contract.Step`."""

    def __init__(self, waiting: deque[Request], running: list[Request], kv: KVCache, now: float) -> None:
        self.waiting: deque[Request] = waiting
        self.running: list[Request] = running
        self.kv = kv
        self.now = now
        self.tokens = 0
        self.evicted: list[Request] = []
        self.failed: dict[Request, str] = {}
        self.notes: Counter[str] = Counter()
        self.decodes: list[Request] = []
        self.chunks: dict[Request, Chunk] = {}

    def run(self, request: Request, limit: int) -> bool:
        wanted = min(limit, request.pending)
        if wanted == 0:
            return True
        if request.draft:
            wanted = self._without_dear_guesses(request, wanted)
        admitted = bool(request.blocks)
        granted = self.kv.reserve(request, wanted)
        if not granted:
            return False
        if not admitted:
            self._admit(request)
        self._schedule(request, granted)
        return True

    def run_all(self, requests: Sequence[Request], limit: int, each: int) -> int:
        """Most are decodes that need no new block: for them this loop is the whole cost of planning."""
        end = self.tokens + limit
        for index, request in enumerate(requests):
            if self.tokens >= end:
                return index
            start, promised = request.computed, request.promised
            due = len(request.tokens) + promised
            if not request.capacity:
                continue  # evicted for one before it
            if request.plain and start + 1 == due and (not promised or due < request.full_len):
                if start == request.capacity and not self.kv.reserve(request, 1):
                    return index
                request.computed = due
                request.promised = promised + 1
                self.tokens += 1
                self.decodes.append(request)
            elif not self.run(request, min(each, end - self.tokens)):
                return index
        return len(requests)

    def evict(self, request: Request) -> None:
        self._withdraw(request)
        self.kv.release(request)
        request.evictions += 1
        request.life += 1
        request.promised = 0
        request.draft = ()
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.evicted.append(request)

    def fail(self, request: Request, reason: str) -> None:
        self._withdraw(request)
        self.failed[request] = reason

    def note(self, what: str, amount: int = 1) -> None:
        if amount:
            self.notes[what] += amount

    def decided(self, moves: Sequence[Move]) -> StepPlan:
        """The step as the executor gets it."""
        return StepPlan(self.decodes, [r.life for r in self.decodes], list(self.chunks.values()), moves)

    def _schedule(self, request: Request, granted: int) -> None:
        assert request not in self.chunks, "a request runs once in a step"
        start, due = request.computed, request.due
        end = start + granted
        draft = request.draft[: max(0, end - due)]
        self.chunks[request] = Chunk(request, start, granted, end >= due, request.life, draft)
        request.draft = ()
        request.computed = end
        request.promised += end >= due
        self.tokens += granted

    def _without_dear_guesses(self, request: Request, wanted: int) -> int:
        """Guesses take blocks only if each running request could still take one after them."""
        if self.kv.room - len(self.running) >= self.kv.missing(request, request.computed + wanted):
            return wanted
        return min(wanted, request.due - request.computed)

    def _withdraw(self, request: Request) -> None:
        chunk = self.chunks.pop(request, None)
        if chunk is not None:
            self.tokens -= chunk.length
        elif request in self.decodes:
            self.decodes.remove(request)
            self.tokens -= 1

    def _admit(self, request: Request) -> None:
        if self.waiting[0] is request:
            self.waiting.popleft()
        else:
            self.waiting.remove(request)
        request.admitted_len = len(request.tokens)
        self.running.append(request)


class Scheduler:
    """Requests come by `add`, leave by `resolve` (finished) or `abort`; `plan` decides each step in between."""

    def __init__(
        self,
        policy: Policy,
        kv: PagedKV,
        eos_token_ids: Iterable[int] = (),
        *,
        drafts: Drafts | None = None,
        evict_every_steps: int = 0,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.num_evictions = 0
        self.notes: Counter[str] = Counter()
        self._drafts = drafts or NoDrafts()
        self._eos = tuple(eos_token_ids)
        self._resolver = Resolver(kv, self.notes)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._evict_every = evict_every_steps
        self._arrivals = 0
        self._failures: list[Output] = []
        self._steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request, now: float = 0.0) -> None:
        assert request.id not in self._requests, f"request id {request.id} is in use"
        self._arrivals += 1
        request.arrival, request.arrived_s = self._arrivals, now
        request.stops = frozenset(request.params.stop_token_ids + (() if request.params.ignore_eos else self._eos))
        request.draft_with(self._drafts.drafter(request.params.draft_tokens))
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget the request and free its blocks. False if it is unknown or finished already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove([request])
        return True

    def abort_all(self) -> list[str]:
        ids = list(self._requests)
        for request_id in ids:
            self.abort(request_id)
        return ids

    def plan(self, now: float = 0.0) -> StepPlan:
        """The next step: which request computes which positions. Empty if nothing can run."""
        self._evict_on_schedule(now)
        step = StepInTheMaking(self._waiting, self._running, self.kv, now)
        self.policy.plan(step)
        self.num_evictions += len(step.evicted)
        self.notes.update(step.notes)
        for request, reason in step.failed.items():
            self._failures.append(Output(request.id, finish_reason=FinishReason.ERROR, error=reason))
            self._remove([request])
        if not step.tokens:
            return StepPlan([], [], [])
        return step.decided(self.kv.take_moves())

    def take_failures(self) -> list[Output]:
        """The last outputs of requests that a policy gave up since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def resolve(self, plan: StepPlan, sampled: Sampled) -> StepOutput:
        """Take in what a step produced: publish blocks, append tokens, finish what is finished."""
        output = self._resolver.resolve(plan, sampled)
        self._remove([self._requests[other.request_id] for other in output.others if other.finish_reason is not None])
        return output

    def check(self) -> None:
        """Conservation of requests and blocks; cheap enough for every step of a test."""
        self.kv.check(self._running)
        assert len(self._waiting) + len(self._running) == len(self._requests)
        assert not any(request.blocks or request.promised or request.draft for request in self._waiting)

    def _remove(self, requests: Sequence[Request]) -> None:
        """Their blocks are free, and whatever a step in flight gives them will not count."""
        for request in requests:
            del self._requests[request.id]
            request.life += 1
            if not request.blocks:
                self._waiting.remove(request)
            self.kv.release(request)
        if len(requests) == 1 and requests[0] in self._running:
            self._running.remove(requests[0])
        elif requests:
            gone = set(requests)
            self._running[:] = [request for request in self._running if request not in gone]

    def _evict_on_schedule(self, now: float) -> None:
        """The testing device evicts in a step of its own, before the policy sees the queues.

        Only a request that has sampled since it was admitted, so that every life of a request gives a token.
        """
        self._steps += 1
        if not self._evict_every or self._steps % self._evict_every:
            return
        victim = next(
            (request for request in reversed(self._running) if len(request.tokens) > request.admitted_len), None
        )
        if victim is not None:
            StepInTheMaking(self._waiting, self._running, self.kv, now).evict(victim)
            self.num_evictions += 1
