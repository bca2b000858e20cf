"""The content address of KV: chained block hashes, and the index that finds a block on the device by its hash.

A hash names a block's tokens and everything before them, so one dictionary look-up a block finds the longest prefix.
"""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from engine.request import Request

DIGEST_BYTES = 16


def root_hash(keys: Mapping[str, str]) -> bytes:
    """The parent of every first block: what must be equal, beside the tokens, for KV to be shared.

    Each key is tagged with its domain, and lengths stand before both, so that no two sets of keys read the same: a
    salt "x" is not an adapter "x".
    """
    root = blake2b(b"sluice kv", digest_size=DIGEST_BYTES)
    for domain, value in sorted(keys.items()):
        for part in (domain.encode(), value.encode("utf-8", "surrogatepass")):
            root.update(len(part).to_bytes(8, "little") + part)
    return root.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """128 bits of BLAKE2b over the parent's hash and the token ids of one full block, as 32-bit integers."""
    return blake2b(parent + array("I", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def extend_hashes(hashes: list[bytes], parent: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `hashes` until every full block of `tokens` has its own. `parent` is the last of them, or the root."""
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = block_hash(parent, tokens[start : start + block_size])
        hashes.append(parent)


class PrefixIndex(Protocol):
    def hashes(self, request: Request, block_size: int) -> Sequence[bytes]:
        """One for each full block of the request's tokens."""
        ...

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest run of known hashes from the start."""
        ...

    def add(self, digest: bytes, block: int) -> bool:
        """Make a block findable. False if its content already is, in another block."""
        ...

    def forget(self, block: int) -> bytes:
        """The block's hash, which from now on finds nothing."""
        ...

    def clear(self) -> None: ...


class HashedPrefix:
    """`namespace` holds what all requests of this engine share, such as the model, so that engines can compare."""

    def __init__(self, namespace: Mapping[str, str] | None = None) -> None:
        self._namespace = dict(namespace or {})
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def hashes(self, request: Request, block_size: int) -> Sequence[bytes]:
        hashes = request.hashes
        if (len(hashes) + 1) * block_size <= len(request.tokens):
            root = hashes[-1] if hashes else root_hash({**self._namespace, "salt": request.cache_salt})
            extend_hashes(hashes, root, request.tokens, block_size)
        return hashes

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

    def forget(self, block: int) -> bytes:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        return digest

    def clear(self) -> None:
        self._block_of.clear()
        self._hash_of.clear()


class NoPrefix:
    """Nothing is ever found, and nothing is hashed: the cache without reuse."""

    def hashes(self, request: Request, block_size: int) -> Sequence[bytes]:
        return ()

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        return []

    def add(self, digest: bytes, block: int) -> bool:
        return False

    def forget(self, block: int) -> bytes:
        raise AssertionError("nothing was ever findable")

    def clear(self) -> None: ...
