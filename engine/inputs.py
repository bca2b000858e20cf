"""Turns a step's chunks into tensors. Work per token is vectorised; block tables grow by what is new.

Shapes: T tokens of this step, R requests in it, M most blocks of any of them.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.contract import Chunk
from engine.model import Tokens
from engine.request import Request
from engine.transfer import together
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


Padding = Callable[[int], int]


def no_padding(requests: int) -> int:
    return requests


class InputBuilder:
    """`padding` says to how many a step of that many single tokens is filled up, for executors that know few sizes.

    What fills it up is a token at position 0 whose K and V go to block 0, which belongs to nobody.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        padding: Padding = no_padding,
    ) -> None:
        self._tables = BlockTables(max_num_seqs, max_blocks)
        self._block_size = block_size
        self._device = device
        self._padding = padding

    def build(self, chunks: Sequence[Chunk], *others: Sequence[int]) -> tuple[Tokens, list[Tensor]]:
        """The step's tokens, and other numbers that ride along on the same copy, as int32."""
        length_R = np.array([chunk.length for chunk in chunks])
        start_R = np.array([chunk.start for chunk in chunks])
        table_RM = self._tables.gather([self._tables.row(chunk.request) for chunk in chunks])
        id_T = np.array(_token_ids(chunks))
        if len(id_T) == len(chunks) and (missing := self._padding(len(chunks)) - len(chunks)):
            length_R, start_R = np.pad(length_R, (0, missing), constant_values=1), np.pad(start_R, (0, missing))
            table_RM, id_T = np.pad(table_RM, ((0, missing), (0, 0))), np.pad(id_T, (0, missing))
        starts_R1 = np.concatenate(([0], np.cumsum(length_R)))
        row_T = np.repeat(np.arange(len(length_R)), length_R)
        position_T = np.arange(starts_R1[-1]) - np.repeat(starts_R1[:-1] - start_R, length_R)
        slot_T = table_RM[row_T, position_T // self._block_size] * self._block_size + position_T % self._block_size
        context_R = start_R + length_R
        arrays = [id_T, position_T, slot_T, starts_R1, context_R, table_RM, *map(np.array, others)]
        ids, positions, slots, starts, contexts, tables, *rest = together(arrays, self._device)
        lists = starts_R1.tolist(), context_R.tolist()
        return Tokens(ids, positions, AttentionBatch(*lists, starts, contexts, tables, slots)), rest


def _token_ids(chunks: Sequence[Chunk]) -> list[int]:
    ids: list[int] = []
    for chunk in chunks:
        known = chunk.request.tokens[chunk.start : chunk.end]
        ids += known or [0]  # a token that the step before samples is filled in when that has run
        ids += chunk.draft
    return ids
