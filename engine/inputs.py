"""Turns a step's chunks into tensors. Work per token is vectorised; block tables grow by what is new.

Shapes: T tokens of this step, R requests in it, M most blocks of any of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.contract import Chunk
from engine.model import Tokens
from engine.request import Request
from kernels.attention_batch import AttentionBatch


class BlockTables:
    """One row per running request, kept over the steps. A row whose request got other blocks, or none, is reused.

    Blocks are only ever appended to a request's list; a request that was evicted or finished has another list. So
    the identity of the list tells whether a row is still true, and nobody has to tell us of evictions.
    """

    def __init__(self, rows: int, columns: int) -> None:
        self._table = np.zeros((rows, columns), np.int32)
        self._filled = [0] * rows
        self._owners: list[tuple[Request, list[int]] | None] = [None] * rows
        self._row_of: dict[Request, int] = {}
        self._free = list(range(rows - 1, -1, -1))

    def row(self, request: Request) -> int:
        """The request's row, brought up to date."""
        row = self._row_of.get(request)
        if row is None:
            row = self._row_of[request] = self._take_row()
        owner = self._owners[row]
        if owner is None or owner[1] is not request.blocks:
            self._owners[row] = (request, request.blocks)
            self._filled[row] = 0
        filled, blocks = self._filled[row], request.blocks
        if filled < len(blocks):
            self._table[row, filled : len(blocks)] = blocks[filled:]
            self._filled[row] = len(blocks)
        return row

    def gather(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """[R, M], one row per request of this step."""
        columns = max(self._filled[row] for row in rows)
        return np.ascontiguousarray(self._table[list(rows), :columns])

    def _take_row(self) -> int:
        if not self._free:
            self._reclaim()
        if not self._free:
            self._grow()
        return self._free.pop()

    def _reclaim(self) -> None:
        for row, owner in enumerate(self._owners):
            if owner is not None and owner[0].blocks is not owner[1]:
                del self._row_of[owner[0]]
                self._owners[row] = None
                self._free.append(row)

    def _grow(self) -> None:
        """A policy changed at run time may allow more running requests than the table was made for."""
        rows = len(self._owners)
        self._table = np.concatenate((self._table, np.zeros_like(self._table)))
        self._filled += [0] * rows
        self._owners += [None] * rows
        self._free = list(range(2 * rows - 1, rows - 1, -1))


class InputBuilder:
    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._tables = BlockTables(max_num_seqs, max_blocks)
        self._block_size = block_size
        self._device = device

    def build(self, chunks: Sequence[Chunk]) -> Tokens:
        length_R = np.array([chunk.length for chunk in chunks])
        start_R = np.array([chunk.start for chunk in chunks])
        query_starts = np.concatenate(([0], np.cumsum(length_R)))
        table_RM = self._tables.gather([self._tables.row(chunk.request) for chunk in chunks])
        row_T = np.repeat(np.arange(len(chunks)), length_R)
        position_T = np.arange(query_starts[-1]) - np.repeat(query_starts[:-1] - start_R, length_R)
        block_T = table_RM[row_T, position_T // self._block_size].astype(np.int64)
        contexts = start_R + length_R
        batch = AttentionBatch(
            query_starts=query_starts.tolist(),
            context_lens=contexts.tolist(),
            query_starts_R1=self._tensor(query_starts.astype(np.int32)),
            context_lens_R=self._tensor(contexts.astype(np.int32)),
            block_tables_RM=self._tensor(table_RM),
            slots_T=self._tensor(block_T * self._block_size + position_T % self._block_size),
        )
        return Tokens(self._tensor(np.array(_token_ids(chunks))), self._tensor(position_T), batch)

    def _tensor(self, array: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _token_ids(chunks: Sequence[Chunk]) -> list[int]:
    ids: list[int] = []
    for chunk in chunks:
        known = chunk.request.tokens[chunk.start : chunk.end]
        ids += known or [0]  # a token that the step before samples is filled in when that has run
        ids += chunk.draft
    return ids
