"""Twenty thousand random steps under each policy, up to 1,024 requests at once: whatever happens, nothing is lost.

Requests of eight families share prefixes, some have a salt, priorities, bounds on drafts or no EOS; they come in bursts
and are aborted at random, while the pool is too small for them. Every position that a step reads is checked.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest

from engine.cache.events import NoEvents
from engine.cache.host import HostMemory, HostTier, NoHostTier
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, NoPrefix, PrefixIndex
from engine.contract import Chunk, Move, Route, Sampled, StepPlan
from engine.core import EngineCore
from engine.intake import Limits
from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduler import Scheduler
from engine.speculate import DraftConfig, NGramDrafts, NoDrafts
from engine.timing import StepTimer
from tests.fakes import EOS, VOCAB, LateLane

NO_GUESSES = NoDrafts()
BLOCK = 16
STEPS = 20_000
MASK = 2**61 - 1


def mix(state: int, token: int) -> int:
    """What position p holds: a number that depends on every token up to it."""
    return (state * 1_000_003 + token + 1) % MASK


def next_token(state: int, last: int) -> int:
    """Often a function of the last token alone, so that text repeats and guesses are right; else of all tokens."""
    number = state >> 7
    if number % 8:
        return (last * 5 + 3) % VOCAB
    return number // 8 % VOCAB


def chain(tokens: Sequence[int], state: int = 0) -> list[int]:
    return list(accumulate(tokens, mix, initial=state))[1:]


def undisturbed(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    state, tokens = chain(prompt)[-1], [prompt[-1]]
    while len(tokens) <= params.max_tokens:
        tokens.append(next_token(state, tokens[-1]))
        state = mix(state, tokens[-1])
        if tokens[-1] == EOS and not params.ignore_eos:
            break
    return tokens[1:]


class ChainMemory:
    """Blocks that hold what `mix` makes of all tokens up to a position. A step reads every position it attends to."""

    def __init__(self, num_blocks: int, host_blocks: int) -> None:
        self._device = [[0] * BLOCK for _ in range(num_blocks)]
        self._host = [[0] * BLOCK for _ in range(host_blocks)]
        self._chains: dict[Request, list[int]] = {}
        self._last: dict[Request, int] = {}
        self._lane = LateLane()
        self.most_running = 0

    def prepare(self, params: SamplingParams) -> None: ...

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        self.most_running = max(self.most_running, len(plan))
        rows = [(chunk, list(chunk.request.blocks), chunk.request.tokens[chunk.start : chunk.end]) for chunk in plan]

        def compute() -> Sampled:
            for move in plan.moves:
                self._copy(move)
            return Sampled([token for row in rows for token in self._run(*row)])

        return self._lane.submit(compute)

    def _run(self, chunk: Chunk, blocks: list[int], known: list[int]) -> list[int]:
        request, start, end = chunk.request, chunk.start, chunk.end
        tokens = [*(known or [self._last[request]]), *chunk.draft]
        states = self._chains.setdefault(request, [])
        if len(states) < start:  # adopted, and never run for this request
            states += chain(request.tokens[len(states) : start], states[-1] if states else 0)
        del states[start:]
        states += chain(tokens, states[-1] if states else 0)
        assert len(states) == end
        self._write(blocks, states, start)
        if not chunk.samples:
            return []
        self._read(request, blocks, states)
        back = chunk.num_sampled
        given = [next_token(state, token) for state, token in zip(states[-back:], tokens[-back:], strict=True)]
        self._last[request] = given[-1]
        return given

    def _write(self, blocks: list[int], states: list[int], start: int) -> None:
        for place in range(start // BLOCK, (len(states) - 1) // BLOCK + 1):
            first, last = max(start, place * BLOCK), min(len(states), place * BLOCK + BLOCK)
            assert blocks[place] != 0, "block 0 was handed out"
            self._device[blocks[place]][first - place * BLOCK : last - place * BLOCK] = states[first:last]

    def _read(self, request: Request, blocks: list[int], states: list[int]) -> None:
        full, rest = divmod(len(states), BLOCK)
        device = self._device
        for place in range(full):
            assert device[blocks[place]] == states[place * BLOCK : place * BLOCK + BLOCK], f"{request.id}, {place}"
        if rest:
            assert device[blocks[full]][:rest] == states[full * BLOCK :], f"{request.id}, {full}"

    def _copy(self, move: Move) -> None:
        source, target = (self._device, self._host) if move.route is Route.DOWN else (self._host, self._device)
        target[move.target] = list(source[move.source])


@dataclass(frozen=True)
class Scene:
    """`burst` is the most requests that come at once, `every` the steps between bursts."""

    num_blocks: int
    burst: int
    every: int
    longest: int
    host_blocks: int = 0
    prefix: bool = True
    drafts: DraftConfig = NO_GUESSES
    depth: int = 0
    evict_every_steps: int = 0


SCENES = (
    Scene(num_blocks=10_000, burst=1_600, every=400, longest=80, drafts=NGramDrafts()),
    Scene(num_blocks=1_000, burst=60, every=25, longest=200, host_blocks=500, depth=1),
    Scene(num_blocks=3_000, burst=150, every=60, longest=150, host_blocks=2_000, drafts=NGramDrafts(), depth=1),
    Scene(num_blocks=1_000, burst=60, every=40, longest=300, prefix=False, evict_every_steps=3),
)
MOST_OPEN = 2_000


class Blast:
    def __init__(self, policy: PolicyConfig, scene: Scene, seed: int) -> None:
        self._random = random.Random(seed)
        self._scene = scene
        index: PrefixIndex = HashedPrefix() if scene.prefix else NoPrefix()
        host: HostTier = HostMemory(scene.host_blocks, NoEvents()) if scene.host_blocks else NoHostTier()
        self.kv = PagedKV(scene.num_blocks, BLOCK, index, host)
        self.scheduler = Scheduler(
            policy.build(), self.kv, (EOS,), drafts=scene.drafts, evict_every_steps=scene.evict_every_steps
        )
        self.memory = ChainMemory(scene.num_blocks, scene.host_blocks)
        timer = StepTimer(lambda: float(self.steps))
        limits = Limits(scene.longest * 3, self.kv.capacity, VOCAB, (EOS,))
        self.core = EngineCore(self.scheduler, self.memory, limits, timer, depth=scene.depth)
        self.steps = self.finished = self.aborted = 0
        self._count = 0
        self._families = [[self._random.randrange(VOCAB) for _ in range(scene.longest * 2)] for _ in range(8)]
        self._open: dict[str, tuple[list[int], SamplingParams, list[int]]] = {}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.steps % self._scene.every == 0 and len(self._open) < MOST_OPEN:
                for _ in range(self._random.randint(1, self._scene.burst)):
                    self._add()
            if self._open and self._random.random() < 0.05:
                self._abort(self._random.choice(list(self._open)))
            self._step()
        while self.core.has_work:
            self._step()
        self.scheduler.check()
        assert self.kv.used_blocks == 0 and not self._open

    def _add(self) -> None:
        draw = self._random
        shared = draw.choice(self._families)[: draw.randint(0, self._scene.longest)]
        prompt = [*shared, *(draw.randrange(VOCAB) for _ in range(draw.randint(1, self._scene.longest)))]
        params = SamplingParams(
            max_tokens=draw.randint(1, self._scene.longest),
            temperature=0.0,
            ignore_eos=draw.random() < 0.6,
            draft_tokens=draw.choice([None, None, 0, 2]),
        )
        self._count += 1
        salt = draw.choice(["", "", "", "tenant"])
        self.core.add(f"r{self._count}", prompt, params, priority=draw.randint(-3, 3), cache_salt=salt)
        self._open[f"r{self._count}"] = (prompt, params, [])

    def _abort(self, request_id: str) -> None:
        assert self.core.abort(request_id)
        prompt, params, given = self._open.pop(request_id)
        assert given == undisturbed(prompt, params)[: len(given)]
        self.aborted += 1

    def _step(self) -> None:
        before = self.core.steps, self.core.in_flight
        idle = not self.core.has_work
        for output in self.core.step():
            prompt, params, given = self._open[output.request_id]
            given += output.tokens
            if output.finish_reason is not None:
                assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                assert given == undisturbed(prompt, params)
                del self._open[output.request_id]
                self.finished += 1
        self.steps += 1
        assert idle or before != (self.core.steps, self.core.in_flight), "requests wait and nothing runs"
        if self.steps % 50 == 0:
            self.scheduler.check()


POLICIES: list[PolicyConfig] = [
    Preemption(max_num_seqs=1024, max_num_batched_tokens=2048, order="priority", aging_seconds=200.0),
    Retract(max_num_seqs=1024, chunked_prefill_size=2048, clip_max_new_tokens=1, order="shortest-prefill"),
    Static(max_num_seqs=1024),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.kind}")
def test_a_storm_of_requests_leaves_an_empty_engine(policy: PolicyConfig) -> None:
    blasts = [Blast(policy, scene, seed) for seed, scene in enumerate(SCENES)]
    for blast in blasts:
        blast.run(STEPS // len(SCENES))
    evictions = sum(blast.scheduler.num_evictions for blast in blasts)
    print(
        f"{policy.kind}: {sum(blast.steps for blast in blasts)} steps, {sum(blast.finished for blast in blasts)} "
        f"requests, {sum(blast.aborted for blast in blasts)} aborted, {evictions} evictions, "
        f"at most {max(blast.memory.most_running for blast in blasts)} in a step"
    )
    assert evictions > 0
