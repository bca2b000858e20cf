"""Does a row's result depend on the rows beside it? Asked of the loaded model at start, with shapes that will occur.

What makes eviction, batching and chunks invisible is that it does not, to the last bit. Our CPU kernels are built that
way; of other kernels nobody knows until it was tried.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.attention import PagedAttention
from engine.contract import Chunk
from engine.errors import ConfigError
from engine.inputs import InputBuilder
from engine.model import Model
from engine.request import Request

logger = logging.getLogger(__name__)
LENGTH = 17  # a block of the usual size, and a token
ADVICE = "Requests may get other tokens when they are batched, cut or evicted otherwise"


@dataclass(frozen=True, slots=True)
class Probe:
    """Runs chunks of made-up requests through the model; their blocks must belong to nobody."""

    model: Model
    attend: PagedAttention
    inputs: InputBuilder

    @torch.inference_mode()
    def run(self, *chunks: Chunk) -> Tensor:
        """Logits behind the last position of each chunk."""
        last = [end - 1 for end in accumulate(chunk.length for chunk in chunks)]
        tokens, (rows_R,) = self.inputs.build(chunks, last)
        return self.model.forward(tokens, rows_R, self.attend)


def is_invariant(probe: Probe, vocab_size: int, block_size: int) -> bool:
    """One sequence alone and in one piece, then in two pieces with others beside it; then a token more, both ways."""
    blocks = -(-(LENGTH + 1) // block_size)

    def request(number: int, length: int) -> Request:
        tokens = [(number * 97 + place * 31) % vocab_size for place in range(length)]
        return Request(f"probe {number}", tokens, length)

    alone, cut, mate, other = request(0, LENGTH + 1), request(0, LENGTH + 1), request(1, 9), request(2, 2)
    for number, owner in enumerate((alone, cut, mate, other)):
        owner.blocks = [1 + number * blocks + place for place in range(blocks)]
    first = probe.run(_chunk(alone, 0, LENGTH))[0], probe.run(_chunk(alone, LENGTH, LENGTH + 1))[0]
    probe.run(_chunk(mate, 0, 5), _chunk(cut, 0, 8))
    second = (
        probe.run(_chunk(cut, 8, LENGTH), _chunk(other, 0, 1))[0],
        probe.run(_chunk(mate, 5, 9), _chunk(cut, LENGTH, LENGTH + 1), _chunk(other, 1, 2))[1],
    )
    return all(torch.equal(one, another) for one, another in zip(first, second, strict=True))


def _chunk(request: Request, start: int, end: int) -> Chunk:
    return Chunk(request, start, end - start, samples=True, life=0)


Check = Callable[[Callable[[], bool]], None]


def require(holds: Callable[[], bool]) -> None:
    if not holds():
        raise ConfigError(
            f"batch_invariant is require, but results depend on the batch with this model, dtype and device. {ADVICE}. "
            "Write batch_invariant: check to accept that, or on a CPU dtype: float32.",
            param="batch_invariant",
        )


def warn(holds: Callable[[], bool]) -> None:
    if not holds():
        logger.warning("Results depend on the batch with this model, dtype and device. %s.", ADVICE)


def skip(holds: Callable[[], bool]) -> None: ...


CHECKS: dict[str, Check] = {"require": require, "check": warn, "off": skip}


def needed_blocks(block_size: int) -> int:
    """How many blocks of the pool the check writes to, block 0 not counted."""
    return 4 * -(-(LENGTH + 1) // block_size)
