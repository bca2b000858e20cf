"""The pool of KV blocks: reference counts, and the order in which unreferenced blocks are reused.

Block 0 is never handed out, so that padded writes have somewhere to go. Pure bookkeeping: no tensor here.
"""

from collections.abc import Callable, Iterable


class BlockPool:
    """`num_blocks` blocks, each free, cached (unreferenced but findable) or referenced.

    free ──take──▶ referenced ──drop──▶ free, or cached if it was marked findable
      ▲                 ▲                          │
      │                 └─────────hold─────────────┤
      └───────── reused, oldest first ─────────────┘
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        """`forget` is told of each cached block that is about to be reused, before its contents change."""
        assert num_blocks >= 2, "block 0 alone holds nothing"
        self._num_blocks = num_blocks
        self._forget = forget
        self._references = [0] * num_blocks
        self._findable = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, 0, -1))
        self._cached: dict[int, None] = {}  # unreferenced and findable, oldest first

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def usable(self) -> int:
        return self._num_blocks - 1

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_referenced(self, block: int) -> bool:
        return self._references[block] > 0

    def take(self, count: int) -> list[int]:
        """`count` blocks nobody else holds, free ones before cached ones."""
        assert count <= len(self._free) + len(self._cached)
        return [self._take_one() for _ in range(count)]

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holder for each of these findable blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def drop(self, blocks: list[int]) -> None:
        """One holder fewer. In reverse, so that the deepest block of a sequence is reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} dropped twice"
            if self._references[block] == 0:
                self._put_back(block)

    def mark_findable(self, block: int) -> None:
        assert self._references[block] > 0
        self._findable[block] = 1

    def forget_all(self) -> None:
        """No block is findable any more, without a word to `forget`."""
        self._findable = bytearray(self._num_blocks)
        self._free += self._cached
        self._cached.clear()

    def check(self) -> None:
        """Conservation: every block but 0 is exactly one of free, cached, referenced."""
        referenced = sum(count > 0 for count in self._references)
        assert len(self._free) + len(self._cached) + referenced == self.usable
        assert self._references[0] == 0 and 0 not in self._free
        assert len(set(self._free)) == len(self._free)
        assert all(self._references[block] == 0 and self._findable[block] for block in self._cached)
        assert all(self._references[block] == 0 and not self._findable[block] for block in self._free)

    def _take_one(self) -> int:
        block = self._free.pop() if self._free else self._reuse_oldest()
        self._references[block] = 1
        return block

    def _reuse_oldest(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        self._findable[block] = 0
        self._forget(block)
        return block

    def _put_back(self, block: int) -> None:
        if self._findable[block]:
            self._cached[block] = None
        else:
            self._free.append(block)
