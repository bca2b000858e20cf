"""Paged KV: gives requests the blocks for their next positions, all or nothing, sharing cached prefixes.

Pure bookkeeping: no tensor here. The model runner reads `Request.blocks` and writes K and V there.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.cache.blocks import BlockPool
from engine.cache.prefix import PrefixIndex, extend_hashes
from engine.request import Request


class PagedKV:
    """Blocks of `block_size` tokens out of `num_blocks`, with a prefix index to share the full ones."""

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex) -> None:
        self.block_size = block_size
        self._index = index
        self._pool = BlockPool(num_blocks, index.forget)

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
        return 0 if request.blocks else len(self._find_prefix(request)) * self.block_size

    def missing(self, request: Request, tokens: int) -> int:
        if request.blocks:
            return max(0, self.blocks_for(tokens) - len(request.blocks))
        return self._missing_behind(self._find_prefix(request), tokens)

    def freed(self, requests: Iterable[Request]) -> int:
        holders = Counter(block for request in requests for block in request.blocks)
        return sum(self._pool.references(block) == count for block, count in holders.items())

    def reserve(self, request: Request, limit: int) -> int:
        assert limit > 0
        if request.blocks:
            return self._grow(request, limit)
        return self._admit(request, limit)

    def publish(self, request: Request, computed: int) -> None:
        full = computed // self.block_size
        if full <= request.published:
            return
        extend_hashes(request.hashes, request.tokens, self.block_size)
        for position in range(request.published, full):
            block = request.blocks[position]
            if self._index.add(request.hashes[position], block):
                self._pool.mark_findable(block)
        request.published = full

    def release(self, request: Request) -> None:
        self._pool.drop(request.blocks)
        request.blocks = []
        request.computed = request.published = 0

    def check(self, holders: Iterable[Request]) -> None:
        """Conservation: the pool's references are exactly those of `holders`."""
        self._pool.check()
        held: Counter[int] = Counter()
        for request in holders:
            assert len(request.blocks) == len(set(request.blocks)), "a request holds a block twice"
            assert request.computed <= len(request.blocks) * self.block_size
            held.update(request.blocks)
        assert len(held) == self.used_blocks, "blocks leaked or were given away twice"
        assert all(self._pool.references(block) == count for block, count in held.items()), "references leaked"

    def _admit(self, request: Request, limit: int) -> int:
        """Judges before it holds the prefix, so that a refusal leaves even the order of reuse as it was."""
        prefix = self._find_prefix(request)
        cached = len(prefix) * self.block_size
        granted = min(limit, len(request.tokens) - cached)
        if self._missing_behind(prefix, cached + granted) > self._pool.available:
            return 0
        self._pool.hold(prefix)
        request.blocks = prefix
        request.published = len(prefix)
        request.computed = cached
        if not request.evictions:
            request.cached = cached
        return self._grow(request, limit)

    def _grow(self, request: Request, limit: int) -> int:
        granted = min(limit, request.pending)
        missing = self.blocks_for(request.computed + granted) - len(request.blocks)
        if missing > self._pool.available:
            return 0
        request.blocks += self._pool.take(max(missing, 0))
        return granted

    def _missing_behind(self, prefix: Sequence[int], tokens: int) -> int:
        """Blocks to take for `tokens` positions that begin with `prefix`. A block is a hit or free, never both."""
        revived = sum(not self._pool.is_referenced(block) for block in prefix)
        return self.blocks_for(tokens) - len(prefix) + revived

    def _find_prefix(self, request: Request) -> list[int]:
        """Whole blocks, and never the last position: something must be computed to sample from."""
        if request.params.prompt_logprobs is not None:
            return []  # each prompt position has to be run to be scored
        extend_hashes(request.hashes, request.tokens, self.block_size)
        most = (len(request.tokens) - 1) // self.block_size
        return self._index.find(request.hashes[:most])
