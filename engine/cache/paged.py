"""Paged KV: gives requests the blocks for their next positions, all or nothing, sharing cached prefixes.

Pure bookkeeping: no tensor here. The model runner reads `Request.blocks` and writes K and V there.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.cache.blocks import BlockPool
from engine.cache.events import CacheEvents, EventSink, NoEvents, Tier
from engine.cache.host import HostTier, NoHostTier
from engine.cache.prefix import PrefixIndex
from engine.contract import Move
from engine.request import Request


class Prefix(NamedTuple):
    """What is known of a request's beginning: blocks on the device, behind them hashes of blocks in the host tier."""

    blocks: Sequence[int] = ()
    host: Sequence[bytes] = ()


class PagedKV:
    """Blocks of `block_size` tokens out of `num_blocks`, with a prefix index to share the full ones.

    What the device forgets goes down to `host`; `events` is told of all that becomes findable and all that is gone.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        index: PrefixIndex,
        host: HostTier | None = None,
        events: EventSink | None = None,
    ) -> None:
        self.block_size = block_size
        self._index = index
        self._host = host or NoHostTier()
        self._events = events or NoEvents()
        self._pool = BlockPool(num_blocks, self._forget)

    @property
    def room(self) -> int:
        return self._pool.available

    @property
    def capacity(self) -> int:
        """Tokens that the empty pool holds."""
        return self._pool.usable * self.block_size

    @property
    def used_blocks(self) -> int:
        return self._pool.usable - self._pool.available

    @property
    def usable_blocks(self) -> int:
        return self._pool.usable

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def cached(self, request: Request) -> int:
        return 0 if request.blocks else self._tokens_in(self._find(request))

    def missing(self, request: Request, tokens: int) -> int:
        if request.blocks:
            return max(0, self.blocks_for(tokens) - len(request.blocks))
        return self._missing_behind(self._find(request), tokens)

    def lacking(self, requests: Iterable[Request]) -> int:
        short = [request for request in requests if len(request.tokens) + request.promised > request.capacity]
        return sum(self.missing(request, request.due) for request in short)

    def freed(self, requests: Iterable[Request]) -> int:
        holders = Counter(block for request in requests for block in request.blocks)
        return sum(self._pool.references(block) == count for block, count in holders.items())

    def reserve(self, request: Request, limit: int) -> int:
        assert limit > 0
        if request.blocks:
            return self._grow(request, limit)
        return self._admit(request, limit)

    def publish(self, request: Request, computed: int) -> None:
        first, last = request.published // self.block_size, computed // self.block_size
        if first == last:
            return
        hashes = self._index.hashes(request, self.block_size)
        for place in range(first, min(last, len(hashes))):
            self._make_findable(hashes[place], request.blocks[place])
        request.published = last * self.block_size

    def release(self, request: Request) -> None:
        self._pool.drop(request.blocks)
        request.blocks = []
        request.computed = request.published = request.capacity = 0

    def clear(self) -> None:
        """Forget every prefix, on the device and below. Running requests go on; what they computed is not reused."""
        self._pool.forget_all()
        self._index.clear()
        self._host.clear()
        self._events.cleared()

    def take_moves(self) -> Sequence[Move]:
        """The copies owed before the next step, in the order in which they must be made."""
        return self._host.take_moves()

    def take_events(self) -> CacheEvents:
        return self._events.take()

    def check(self, holders: Iterable[Request]) -> None:
        """Conservation: the pool's references are exactly those of `holders`."""
        self._pool.check()
        self._host.check()
        held: Counter[int] = Counter()
        for request in holders:
            assert len(request.blocks) == len(set(request.blocks)), "a request holds a block twice"
            assert request.computed <= request.capacity == len(request.blocks) * self.block_size
            held.update(request.blocks)
        assert len(held) == self.used_blocks, "blocks leaked or were given away twice"
        assert all(self._pool.references(block) == count for block, count in held.items()), "references leaked"

    def _admit(self, request: Request, limit: int) -> int:
        """Judges before it holds the prefix, so that a refusal leaves even the order of reuse as it was."""
        prefix = self._find(request)
        cached = self._tokens_in(prefix)
        granted = min(limit, len(request.tokens) - cached)
        if self._missing_behind(prefix, cached + granted) > self._pool.available:
            return 0
        self._pool.hold(prefix.blocks)
        request.blocks = [*prefix.blocks, *self._bring_up(prefix.host)]
        request.computed = request.published = request.capacity = cached
        if not request.evictions:
            request.cached = cached
        return self._grow(request, limit)

    def _grow(self, request: Request, limit: int) -> int:
        granted = min(limit, request.pending)
        missing = self.blocks_for(request.computed + granted) - len(request.blocks)
        if missing > 0:
            if missing > self._pool.available:
                return 0
            request.blocks += self._pool.take(missing)
            request.capacity = len(request.blocks) * self.block_size
        return granted

    def _bring_up(self, digests: Sequence[bytes]) -> list[int]:
        """The copy is made before any later step, so the blocks are findable at once."""
        blocks = self._host.bring_up(digests, self._pool.take)
        for digest, block in zip(digests, blocks, strict=True):
            self._make_findable(digest, block)
        return blocks

    def _make_findable(self, digest: bytes, block: int) -> None:
        if self._index.add(digest, block):
            self._pool.mark_findable(block)
            self._events.stored(Tier.DEVICE, digest)

    def _forget(self, block: int) -> None:
        digest = self._index.forget(block)
        self._events.removed(Tier.DEVICE, digest)
        self._host.keep(digest, block)

    def _missing_behind(self, prefix: Prefix, tokens: int) -> int:
        """Blocks to take for `tokens` positions that begin with `prefix`. A block is a hit or free, never both."""
        revived = sum(not self._pool.is_referenced(block) for block in prefix.blocks)
        return self.blocks_for(tokens) - len(prefix.blocks) + revived

    def _tokens_in(self, prefix: Prefix) -> int:
        return (len(prefix.blocks) + len(prefix.host)) * self.block_size

    def _find(self, request: Request) -> Prefix:
        """Whole blocks, and never the last position: something must be computed to sample from."""
        if request.params.prompt_logprobs is not None:
            return Prefix()  # each prompt position has to be run to be scored
        most = (len(request.tokens) - 1) // self.block_size
        hashes = self._index.hashes(request, self.block_size)[:most]
        blocks = self._index.find(hashes)
        return Prefix(blocks, self._host.find(hashes[len(blocks) :]))
