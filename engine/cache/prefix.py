"""The content address of KV: chained block hashes, and the index that finds a block by its hash.

A hash names a block's tokens and everything before them, so one dictionary look-up a block finds the longest prefix.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

DIGEST_BYTES = 16
ROOT = blake2b(b"sluice kv root", digest_size=DIGEST_BYTES).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """128 bits of BLAKE2b over the parent's hash and the token ids of one full block, as 32-bit integers."""
    return blake2b(array("I", tokens).tobytes(), digest_size=DIGEST_BYTES, key=parent).digest()


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes` until every full block of `tokens` has its own."""
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = hashes[-1] if hashes else ROOT
        hashes.append(block_hash(parent, tokens[start : start + block_size]))


class PrefixIndex(Protocol):
    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of known hashes from the start."""
        ...

    def add(self, digest: bytes, block: int) -> bool:
        """Make a block findable. False if its content already is, in another block."""
        ...

    def forget(self, block: int) -> None: ...


class HashedPrefix:
    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        found = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def add(self, digest: bytes, block: int) -> bool:
        if digest in self._block_of:
            return False
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    def forget(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]


class NoPrefix:
    """Nothing is ever found: the cache without reuse."""

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        return []

    def add(self, digest: bytes, block: int) -> bool:
        return False

    def forget(self, block: int) -> None:
        raise AssertionError("nothing was ever findable")
