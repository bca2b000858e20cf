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
        """Tokens that can still be reserved, evicting cached blocks if need be."""
        ...

    def fits(self, request: Request) -> bool:
        """Whether the whole sequence as it stands could be reserved now, its cached prefix counted once."""
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

    def run(self, request: Request, limit: int) -> bool:
        """Grant up to `limit` tokens of the request's pending ones. False: no room, nothing changed."""
        ...

    def evict(self, request: Request) -> None:
        """Undo the request's chunk, release its blocks, put it back at the front of the queue."""
        ...


class Policy(Protocol):
    """Decides one step. Deterministic: equal inputs give equal plans; ties are broken by (arrival, id)."""

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
