"""The host tier: blocks that the device has no room for go down to host memory, and come up again on a hit.

Least recently used goes first. Only bookkeeping here: the copies are Moves, which the executor makes in this order.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.cache.events import EventSink, Tier
from engine.contract import Move, Route


class HostTier(Protocol):
    def find(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """The longest run of these, from the first, whose blocks are here."""
        ...

    def keep(self, digest: bytes, block: int) -> None:
        """The device is about to reuse `block`: copy it down unless its content is here already."""
        ...

    def bring_up(self, digests: Sequence[bytes], take: Callable[[int], list[int]]) -> list[int]:
        """Blocks on the device, from `take`, into which these are copied. They stay here, too."""
        ...

    def clear(self) -> None: ...

    def take_moves(self) -> Sequence[Move]:
        """The copies owed since the last call."""
        ...

    def check(self) -> None: ...


class HostMemory:
    """`num_blocks` blocks in host memory, each free or holding the content of one hash."""

    def __init__(self, num_blocks: int, events: EventSink) -> None:
        self._num_blocks = num_blocks
        self._events = events
        self._block_of: dict[bytes, int] = {}  # least recently used first
        self._free = list(range(num_blocks - 1, -1, -1))
        self._moves: list[Move] = []

    def find(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        for count, digest in enumerate(digests):
            if digest not in self._block_of:
                return digests[:count]
        return digests

    def keep(self, digest: bytes, block: int) -> None:
        if digest in self._block_of:
            self._block_of[digest] = self._block_of.pop(digest)
            return
        if not self._free and not self._drop_oldest():
            return
        target = self._block_of[digest] = self._free.pop()
        self._moves.append(Move(Route.DOWN, block, target))
        self._events.stored(Tier.HOST, digest)

    def bring_up(self, digests: Sequence[bytes], take: Callable[[int], list[int]]) -> list[int]:
        """While blocks are taken others go down, and must not push out those that are on their way up."""
        sources = [self._block_of.pop(digest) for digest in digests]
        targets = take(len(digests))
        for digest, source, target in zip(digests, sources, targets, strict=True):
            self._moves.append(Move(Route.UP, source, target))
            if self._block_of.setdefault(digest, source) != source:
                self._free.append(source)  # an equal block came down meanwhile
        return targets

    def clear(self) -> None:
        self._free += self._block_of.values()
        self._block_of.clear()

    def take_moves(self) -> Sequence[Move]:
        moves, self._moves = self._moves, []
        return moves

    def check(self) -> None:
        """Conservation: every block is free or holds one content, never both."""
        assert sorted([*self._free, *self._block_of.values()]) == list(range(self._num_blocks))

    def _drop_oldest(self) -> bool:
        """False if all are on their way up."""
        for digest in self._block_of:
            self._free.append(self._block_of.pop(digest))
            self._events.removed(Tier.HOST, digest)
            return True
        return False


class NoHostTier:
    """What leaves the device is gone."""

    def find(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        return ()

    def keep(self, digest: bytes, block: int) -> None: ...

    def bring_up(self, digests: Sequence[bytes], take: Callable[[int], list[int]]) -> list[int]:
        return []

    def clear(self) -> None: ...

    def take_moves(self) -> Sequence[Move]:
        return ()

    def check(self) -> None: ...
