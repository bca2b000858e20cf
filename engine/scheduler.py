"""The mechanism under every policy: queues, chunks, blocks and what a step's tokens do to them.

A policy asks through `Step`; nobody else changes a queue. No torch, no Ray, no clock.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.cache.paged import PagedKV
from engine.contract import Chunk, KVCache, Policy, Sampled
from engine.request import FinishReason, Output, Request


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
        self.chunks: dict[Request, Chunk] = {}

    def run(self, request: Request, limit: int) -> bool:
        admitted = bool(request.blocks)
        granted = self.kv.reserve(request, limit)
        if not granted:
            return False
        if not admitted:
            self._admit(request)
        end = request.computed + granted
        self.chunks[request] = Chunk(request, request.computed, granted, samples=end == len(request.tokens))
        request.computed = end
        self.tokens += granted
        return True

    def evict(self, request: Request) -> None:
        self._withdraw(request)
        self.kv.release(request)
        request.evictions += 1
        self.running.remove(request)
        self.waiting.appendleft(request)
        self.evicted.append(request)

    def fail(self, request: Request, reason: str) -> None:
        self._withdraw(request)
        self.failed[request] = reason

    def note(self, what: str, amount: int = 1) -> None:
        self.notes[what] += amount

    def _withdraw(self, request: Request) -> None:
        chunk = self.chunks.pop(request, None)
        if chunk is not None:
            request.computed -= chunk.length
            self.tokens -= chunk.length

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
        self, policy: Policy, kv: PagedKV, eos_token_ids: Iterable[int] = (), *, evict_every_steps: int = 0
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.num_evictions = 0
        self._eos = frozenset(eos_token_ids)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._evict_every = evict_every_steps
        self._arrivals = 0
        self._failures: list[Output] = []
        self.notes: Counter[str] = Counter()
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
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget the request and free its blocks. False if it is unknown or finished already."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove(request)
        return True

    def abort_all(self) -> list[str]:
        ids = list(self._requests)
        for request_id in ids:
            self.abort(request_id)
        return ids

    def plan(self, now: float = 0.0) -> list[Chunk]:
        """The next step: which request computes which positions. Empty if nothing can run."""
        self._evict_on_schedule(now)
        step = StepInTheMaking(self._waiting, self._running, self.kv, now)
        self.policy.plan(step)
        self.num_evictions += len(step.evicted)
        self.notes += step.notes
        for request, reason in step.failed.items():
            self._failures.append(Output(request.id, finish_reason=FinishReason.ERROR, error=reason))
            self._remove(request)
        return list(step.chunks.values())

    def take_failures(self) -> list[Output]:
        """The last outputs of requests that a policy gave up since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def resolve(self, chunks: Sequence[Chunk], sampled: Sampled) -> list[Output]:
        """Take in what a step produced: publish blocks, append tokens, finish what is finished."""
        tokens = iter(sampled.tokens)
        outputs = []
        for chunk in chunks:
            token = next(tokens) if chunk.samples else None
            request = chunk.request
            if self._requests.get(request.id) is not request:
                continue  # aborted while the step ran
            self.kv.publish(request, chunk.end)
            self._keep_prompt_logprobs(chunk, sampled)
            if token is not None:
                outputs.append(self._append(request, token, sampled))
        return outputs

    def check(self) -> None:
        """Conservation of requests and blocks; cheap enough for every step of a test."""
        self.kv.check(self._running)
        assert len(self._waiting) + len(self._running) == len(self._requests)
        assert not any(request.blocks for request in self._waiting)

    def _append(self, request: Request, token: int, sampled: Sampled) -> Output:
        output = Output(request.id, cached_tokens=request.cached)
        if request.params.max_tokens:
            if request.num_output == 0:
                output.prompt_logprobs = request.prompt_logprobs
            request.tokens.append(token)
            output.tokens.append(token)
            if (logprob := sampled.logprobs.get(request.id)) is not None:
                output.logprobs = [logprob]
        else:
            output.prompt_logprobs = request.prompt_logprobs
        output.finish_reason = self._finish_reason(request, output)
        if output.finish_reason is not None:
            self._remove(request)
        return output

    def _finish_reason(self, request: Request, output: Output) -> FinishReason | None:
        params = request.params
        for token in output.tokens:
            ends_text = token in self._eos and not params.ignore_eos
            if ends_text or token in params.stop_token_ids:
                output.stop_token = token
                return FinishReason.STOP
        return FinishReason.LENGTH if request.num_output >= params.max_tokens else None

    def _keep_prompt_logprobs(self, chunk: Chunk, sampled: Sampled) -> None:
        """By position, so that a prompt that is computed again after an eviction is not scored twice."""
        request = chunk.request
        if request.params.prompt_logprobs is None:
            return
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * request.prompt_len
        for position, logprob in enumerate(sampled.prompt_logprobs.get(request.id, ()), chunk.start + 1):
            request.prompt_logprobs[position] = logprob

    def _remove(self, request: Request) -> None:
        del self._requests[request.id]
        if request.blocks:
            self._running.remove(request)
            self.kv.release(request)
        else:
            self._waiting.remove(request)

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
