"""The scheduling contract: who may ask what of whom. A policy orders, chooses and asks; only the step acts.

Pure Python: no torch, no Ray, no clock.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from engine.request import Logprob, Request, SamplingParams


class Route(Enum):
    DOWN = "device to host"
    UP = "host to device"


class Move(NamedTuple):
    """A block copy owed before the forward pass: block `source` of one pool → block `target` of the other."""

    route: Route
    source: int
    target: int


class Chunk(NamedTuple):
    """What one request computes in one step: positions `start` … `start + length - 1`.

    The last ones are those of `draft`, if it has one. A chunk that `samples` gives one token behind its last known
    position and one behind each guess. One that starts at `len(request.tokens)` begins with the token that the step
    before it samples, which only the executor can know. `life` is the request's at the time of planning.
    """

    request: Request
    start: int
    length: int
    samples: bool
    life: int
    draft: Sequence[int] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def num_sampled(self) -> int:
        return 1 + len(self.draft) if self.samples else 0


@dataclass(slots=True)
class StepPlan:
    """One step: what runs, and the block copies that come before it. Iterating gives all chunks, decodes first.

    Most chunks of a busy engine are decodes: one position, one token, nothing else wanted. An object for each would
    cost more than scheduling it, so they are kept as columns: the request, and its life at the time of planning.
    """

    decodes: list[Request]
    lives: list[int]
    chunks: list[Chunk]
    moves: Sequence[Move] = ()

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    def __len__(self) -> int:
        return len(self.decodes) + len(self.chunks)

    def __iter__(self) -> Iterator[Chunk]:
        """To be used before the next step is planned: a decode is at its request's last computed position."""
        for request, life in zip(self.decodes, self.lives, strict=True):
            yield Chunk(request, request.computed - 1, 1, samples=True, life=life)
        yield from self.chunks


@dataclass(slots=True)
class Sampled:
    """What a step produced: `num_sampled` tokens for each chunk, in the plan's order.

    `logprobs` holds as many entries for each chunk whose request wants them, by request id; `prompt_logprobs` the
    entries for the prompt positions `start + 1 …` that this chunk predicts, by request id.
    """

    tokens: list[int]
    logprobs: dict[str, list[Logprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Logprob]] = field(default_factory=dict)


class KVCache(Protocol):
    """Who may hold which blocks. It alone writes `Request.blocks`, `capacity`, `hashes`, `published`, `cached`."""

    @property
    def room(self) -> int:
        """Blocks that can still be taken, reusing cached ones if need be."""
        ...

    @property
    def block_size(self) -> int: ...

    @property
    def usable_blocks(self) -> int:
        """Blocks of the empty pool."""
        ...

    def cached(self, request: Request) -> int:
        """Tokens that a first `reserve` would adopt; 0 for a request that holds blocks."""
        ...

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks to be taken from the pool before the request holds `tokens` positions.

        Its cached prefix counts once: blocks that others hold cost nothing, those that nobody holds are revived.
        """
        ...

    def lacking(self, requests: Iterable[Request]) -> int:
        """Blocks to be taken before each of these running requests can sample its next token, guesses aside."""
        ...

    def freed(self, requests: Sequence[Request]) -> int:
        """Blocks that the pool would gain if these were released now."""
        ...

    def reserve(self, request: Request, limit: int) -> int:
        """Blocks for at most `limit` of the pending positions. Tokens granted; 0: no room, and nothing changed.

        Positions below `capacity` need no leave.
        A request without blocks adopts its cached prefix first: `computed` moves to its end.
        """
        ...

    def publish(self, request: Request, computed: int) -> None:
        """The full blocks among the first `computed` positions become findable: a step has written them."""
        ...

    def release(self, request: Request) -> None:
        """Give the blocks back; published ones stay findable until they are reused."""
        ...


class Step(Protocol):
    """One step in the making, as a policy sees it."""

    @property
    def waiting(self) -> Sequence[Request]:
        """In order of arrival, evicted requests first."""
        ...

    @property
    def running(self) -> Sequence[Request]:
        """In order of admission."""
        ...

    @property
    def kv(self) -> KVCache: ...

    @property
    def tokens(self) -> int:
        """Granted so far in this step."""
        ...

    @property
    def evicted(self) -> Sequence[Request]: ...

    @property
    def now(self) -> float:
        """Seconds on the engine's clock; a policy has none of its own."""
        ...

    def run(self, request: Request, limit: int) -> bool:
        """Grant up to `limit` tokens of the request's pending ones. False: no room, nothing changed.

        Guesses are granted only from room that nobody else may need in this step: they never cause an eviction.
        """
        ...

    def run_all(self, requests: Sequence[Request], limit: int, each: int) -> int:
        """`run` for every running one of these, in order, `limit` tokens in all and at most `each` for one.

        Ends early at the first for which there is no room, or when `limit` is spent; returns how many it has passed.
        """
        ...

    def evict(self, request: Request) -> None:
        """Undo the request's chunk, release its blocks, put it back at the front of the queue."""
        ...

    def fail(self, request: Request, reason: str) -> None:
        """End a running request that can never go on: it keeps its output and reports an error."""
        ...

    def note(self, what: str, amount: int = 1) -> None:
        """Count something that a user may want to know of this policy, e.g. which budget closed the batch."""
        ...


class Policy(Protocol):
    """Decides one step. Deterministic: equal inputs give equal plans; ties are broken by arrival."""

    @property
    def max_num_seqs(self) -> int: ...

    @property
    def kind(self) -> str: ...

    def plan(self, step: Step) -> None: ...


class Executor(Protocol):
    """The model runner, a simulator, or a test's token memory."""

    def prepare(self, params: SamplingParams) -> None:
        """What a request needs before its first step, such as a compiled grammar; again it costs nothing.

        May take a second, and be called from any thread. Raises RequestError if it cannot be had.
        """
        ...

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        """Start the step; the returned call waits for its result.

        Steps, and the moves before each of them, take effect in the order of submission. So a block may be given to
        the next step while one in flight still writes it.
        """
        ...
