"""The scheduling contract: who may ask what of whom. A policy orders, chooses and asks; only the step acts.

Pure Python: no torch, no Ray, no clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.request import Logprob, Request


class Move(NamedTuple):
    """A block copy owed before the forward pass, within one pool: `source` → `target`."""

    source: int
    target: int


class Chunk(NamedTuple):
    """What one request computes in one step: positions `start` … `start + length - 1` of its tokens."""

    request: Request
    start: int
    length: int
    samples: bool

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class Sampled:
    """What a step produced, one entry per chunk that samples, in chunk order.

    `logprobs` holds an entry for each chunk whose request wants them, by request id; `prompt_logprobs` the entries
    for the prompt positions `start + 1 …` that this chunk predicts, by request id.
    """

    tokens: list[int]
    logprobs: dict[str, Logprob] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Logprob]] = field(default_factory=dict)


class KVCache(Protocol):
    """Who may hold which blocks. It alone writes `Request.blocks`, `hashes`, `published` and `cached`."""

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

    def freed(self, requests: Sequence[Request]) -> int:
        """Blocks that the pool would gain if these were released now."""
        ...

    def reserve(self, request: Request, limit: int) -> int:
        """Blocks for at most `limit` of the pending positions. Tokens granted; 0: no room, and nothing changed.

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
        """Grant up to `limit` tokens of the request's pending ones. False: no room, nothing changed."""
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

    def submit(self, chunks: Sequence[Chunk], moves: Sequence[Move]) -> Callable[[], Sampled]:
        """Start the step; returns at once. The returned call waits for its result."""
        ...
