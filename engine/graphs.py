"""Decode steps on a GPU as recorded graphs: one launch for the whole model instead of hundreds.

A graph knows one number of requests and fixed places in memory, so steps are filled up to the next size that was
recorded, and what they need is copied there first. Shapes: R requests of a size, M most blocks of a request.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention import PagedAttention
from engine.model import Model, Tokens
from kernels.attention_batch import AttentionBatch

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, then in steps of 8, 16 and 32: from 33 requests on, less than a fifth of a step is filling."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max(257, most), 32)]
    return [size for size in sizes if size < most] + [most]


class CudaCapture:
    """All graphs take their memory from one pool: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        run()  # what is compiled or allocated at first use must not be so while it is recorded
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest context that a request can have."""

    blocks: int
    positions: int


class GraphedModel:
    """See `model.Model`. Steps of single tokens are replayed, all others run as they come."""

    def __init__(
        self,
        model: Model,
        attend: PagedAttention,
        capture: Capture,
        sizes: Sequence[int],
        longest: Longest,
    ) -> None:
        self._model = model
        self._sizes = sorted(sizes)
        self._graphs: dict[int, _Graph] = {}
        for size in tqdm(reversed(self._sizes), desc="Recording decode graphs", total=len(sizes), disable=None):
            self._graphs[size] = _Graph(model, attend, capture, _places(size, longest, attend.device))

    def padding(self, requests: int) -> int:
        """To how many a step of that many single tokens is filled up."""
        index = bisect_left(self._sizes, requests)
        return self._sizes[index] if index < len(self._sizes) else requests

    def forward(self, tokens: Tokens, rows_R: Tensor, attend: PagedAttention) -> Tensor:
        requests = len(tokens.batch.context_lens)
        graph = self._graphs.get(requests)
        if graph is None or len(tokens.id_T) > requests:
            return self._model.forward(tokens, rows_R, attend)
        logits_RV: Tensor = graph.run(tokens)
        return logits_RV.index_select(0, rows_R)


class _Graph:
    @torch.inference_mode()
    def __init__(self, model: Model, attend: PagedAttention, capture: Capture, places: Tokens) -> None:
        self._places = places
        rows_R = torch.arange(len(places.id_T), dtype=torch.int32, device=places.id_T.device)
        self._replay = capture(lambda: model.forward(places, rows_R, attend))

    def run(self, tokens: Tokens) -> Tensor:
        """Logits of every request, in memory that the next run writes to."""
        mine, given = self._places.batch, tokens.batch
        self._places.id_T.copy_(tokens.id_T)
        self._places.position_T.copy_(tokens.position_T)
        mine.slots_T.copy_(given.slots_T)
        mine.context_lens_R.copy_(given.context_lens_R)
        columns = given.block_tables_RM.shape[1]
        mine.block_tables_RM[:, :columns].copy_(given.block_tables_RM)
        return self._replay()


def _places(size: int, longest: Longest, device: torch.device) -> Tokens:
    """Where a graph of this size looks for its tokens; as if each request had the longest context there can be."""

    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    starts_R1 = torch.arange(size + 1, dtype=torch.int32, device=device)
    contexts_R = numbers(size) + 1
    lists = list(range(size + 1)), [longest.positions] * size
    batch = AttentionBatch(*lists, starts_R1, contexts_R, numbers(size, longest.blocks), numbers(size))
    return Tokens(numbers(size), numbers(size), batch)
