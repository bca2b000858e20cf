"""An engine core around the token memory: scheduler, policy and cache as they are served, without a model."""

from collections.abc import Sequence

from engine.cache.events import CacheEvents, EventLog
from engine.cache.host import HostMemory, HostTier, NoHostTier
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, NoPrefix, PrefixIndex
from engine.core import EngineCore
from engine.intake import Limits
from engine.policies import PolicyConfig, Preemption
from engine.request import Output, SamplingParams
from engine.scheduler import Scheduler
from engine.speculate import Drafts
from engine.timing import StepTimer
from tests.fakes import EOS, VOCAB, TokenMemory


class Harness:
    """Steps one at a time and checks conservation after each."""

    def __init__(  # noqa: PLR0913, every test names the two or three that it is about
        self,
        policy: PolicyConfig | None = None,
        *,
        num_blocks: int = 33,
        block_size: int = 16,
        max_model_len: int = 512,
        prefix: bool = False,
        evict_every_steps: int = 0,
        drafts: Drafts | None = None,
        host_blocks: int = 0,
        depth: int = 0,
    ) -> None:
        index: PrefixIndex = HashedPrefix() if prefix else NoPrefix()
        events = EventLog()
        host: HostTier = HostMemory(host_blocks, events) if host_blocks else NoHostTier()
        self.kv = PagedKV(num_blocks, block_size, index, host, events)
        self.scheduler = Scheduler(
            (policy or Preemption()).build(), self.kv, (EOS,), drafts=drafts, evict_every_steps=evict_every_steps
        )
        self.memory = TokenMemory(num_blocks, block_size, host_blocks)
        limits = Limits(max_model_len, self.kv.capacity, VOCAB, (EOS,))
        timer = StepTimer(lambda: float(len(self.memory.steps)))
        self.events: list[CacheEvents] = []
        self.core = EngineCore(self.scheduler, self.memory, limits, timer, depth=depth, on_events=self.events.append)
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, Output] = {}

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 16, *, priority: int = 0, **options: bool
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)  # type: ignore[arg-type]
        self.core.add(request_id, prompt, params, priority=priority)
        self.tokens[request_id] = []

    def step(self) -> list[tuple[str, int, int]]:
        """What was planned: (request, start, length) in order; empty if nothing could."""
        before = len(self.memory.steps)
        for output in self.core.step():
            assert output.request_id not in self.last or self.last[output.request_id].finish_reason is None
            self.tokens[output.request_id] += output.tokens
            self.last[output.request_id] = output
        self.scheduler.check()
        return self.memory.steps[-1] if len(self.memory.steps) > before else []

    def run(self, most_steps: int = 10_000) -> None:
        for _ in range(most_steps):
            if not self.core.has_work:
                break
            in_flight = self.core.in_flight
            assert self.step() or in_flight, "requests wait and nothing runs"
        assert not self.core.has_work, "not finished in time"
        assert self.kv.used_blocks == 0, "blocks leaked"
