"""What became findable and what is gone, told once per step to whoever routes requests by what an engine remembers."""

from enum import StrEnum
from typing import NamedTuple, Protocol


class Tier(StrEnum):
    DEVICE = "device"
    HOST = "host"


class Address(NamedTuple):
    """A block's content, and where it lies."""

    tier: Tier
    digest: bytes


class CacheEvents(NamedTuple):
    """The net change of one step, no address in both. `cleared` comes first: it undoes all that was stored before."""

    stored: tuple[Address, ...] = ()
    removed: tuple[Address, ...] = ()
    cleared: bool = False


class EventSink(Protocol):
    def stored(self, tier: Tier, digest: bytes) -> None: ...

    def removed(self, tier: Tier, digest: bytes) -> None: ...

    def cleared(self) -> None: ...

    def take(self) -> CacheEvents:
        """The net change since the last call."""
        ...


class EventLog:
    def __init__(self) -> None:
        self._stored: dict[Address, None] = {}
        self._removed: dict[Address, None] = {}
        self._cleared = False

    def stored(self, tier: Tier, digest: bytes) -> None:
        _move(Address(tier, digest), self._removed, self._stored)

    def removed(self, tier: Tier, digest: bytes) -> None:
        _move(Address(tier, digest), self._stored, self._removed)

    def cleared(self) -> None:
        self._stored.clear()
        self._removed.clear()
        self._cleared = True

    def take(self) -> CacheEvents:
        events = CacheEvents(tuple(self._stored), tuple(self._removed), self._cleared)
        self._stored, self._removed, self._cleared = {}, {}, False
        return events


class NoEvents:
    """Nobody listens."""

    def stored(self, tier: Tier, digest: bytes) -> None: ...

    def removed(self, tier: Tier, digest: bytes) -> None: ...

    def cleared(self) -> None: ...

    def take(self) -> CacheEvents:
        return CacheEvents()


def _move(address: Address, undone: dict[Address, None], done: dict[Address, None]) -> None:
    """Stored and removed again, or the other way round, is no change."""
    if address in undone:
        del undone[address]
    else:
        done[address] = None
