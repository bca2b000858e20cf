"""Stand-ins that verify: a memory that holds token ids where K and V would be, and reads every position back."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

from engine.contract import Chunk, Move, Sampled

EOS = 7
VOCAB = 64


def next_token(tokens: Sequence[int]) -> int:
    """What the pretend model says after these tokens; every earlier token matters."""
    digest = blake2b(bytes(token % 256 for token in tokens), digest_size=2).digest()
    return int.from_bytes(digest) % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What an undisturbed run gives."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class TokenMemory:
    """An executor whose model sees only what was written to the blocks: lost or foreign KV gives other tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._memory: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._block_size = block_size
        self.steps: list[list[tuple[str, int, int]]] = []

    def submit(self, chunks: Sequence[Chunk], moves: Sequence[Move] = ()) -> Callable[[], Sampled]:
        self.steps.append([(chunk.request.id, chunk.start, chunk.length) for chunk in chunks])
        self._check_owners(chunks)
        for chunk in chunks:
            self._write(chunk)
        sampled = Sampled([next_token(self._read(chunk)) for chunk in chunks if chunk.samples])
        return lambda: sampled

    def _write(self, chunk: Chunk) -> None:
        for position in range(chunk.start, chunk.end):
            block = chunk.request.blocks[position // self._block_size]
            self._memory[block][position % self._block_size] = chunk.request.tokens[position]

    def _read(self, chunk: Chunk) -> list[int]:
        tokens = []
        for position in range(chunk.end):
            block = chunk.request.blocks[position // self._block_size]
            token = self._memory[block][position % self._block_size]
            assert token == chunk.request.tokens[position], f"position {position} of {chunk.request.id} reads {token}"
            tokens.append(token)
        return tokens

    def _check_owners(self, chunks: Sequence[Chunk]) -> None:
        """No two chunks write the same block, and nobody writes block 0."""
        written: set[int] = set()
        for chunk in chunks:
            first, last = chunk.start // self._block_size, (chunk.end - 1) // self._block_size
            blocks = set(chunk.request.blocks[first : last + 1])
            assert 0 not in blocks, "block 0 was handed out"
            assert not blocks & written, "two requests write one block"
            written |= blocks
