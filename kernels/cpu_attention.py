"""Compiled paged attention for the CPU: block tables are walked in place, nothing of the context is copied.

Batch-invariant by construction: a row's scores, their softmax and its blend of values are computed by the same
operations in the same order whatever runs beside it. Shapes as in `reference.py`; X rows that share K and V, S
positions that they look at. Arrays are handed over as addresses.
"""

from typing import Any

import numpy as np
from numba import carray, njit, prange

from kernels.cpu_linear import FLOAT_BYTES, multiply_halves, multiply_rows
from kernels.tile import MOST_ROWS, exponentiate, largest
from kernels.vector import WIDTH
from kernels.views import floats, integers

HIDDEN = np.float32(-np.inf)
Shape = tuple[int, int, int, int, int, int]  # KV heads of a block, from and to which of them, D, B, bytes of a number


@njit(cache=True)
def _score(q_XD: Any, scores_XS: Any, k: int, table_M: Any, shape: Shape, rows: int, first: int, last: int) -> None:
    """scores[heads, rows, span] = q[heads, rows, D] · K of blocks first … last - 1, for some KV heads of each block."""
    q, scores = q_XD.ctypes.data, scores_XS.ctypes.data
    groups, group_from, group_to, dim, size, number = shape
    span, group_bytes = (last - first) * size, dim * size * number
    for index in range(first, last):
        for group in range(group_from, group_to):
            block = k + (table_M[index] * groups + group) * group_bytes
            above = (group - group_from) * rows
            for lane in range(0, size, WIDTH):
                column = (index - first) * size + lane
                for row in range(0, rows, MOST_ROWS):
                    count = min(MOST_ROWS, rows - row)
                    a = q + (above + row) * dim * FLOAT_BYTES
                    c = scores + ((above + row) * span + column) * FLOAT_BYTES
                    if number == 2:
                        multiply_halves(count, a, dim, block + lane * number, size, c, span, dim)
                    else:
                        multiply_rows(count, a, dim, block + lane * number, size, c, span, dim)


@njit(cache=True)
def _blend(
    weights_XS: Any,
    out_XD: Any,
    v: int,
    table_M: Any,
    shape: Shape,
    rows: int,
    first: int,
    last: int,
) -> None:
    """out[heads, rows, D] += weights[heads, rows, span] · V of blocks first … last - 1, block after block."""
    weights, out = weights_XS.ctypes.data, out_XD.ctypes.data
    groups, group_from, group_to, dim, size, number = shape
    span, group_bytes = (last - first) * size, dim * size * number
    for index in range(first, last):
        for group in range(group_from, group_to):
            block = v + (table_M[index] * groups + group) * group_bytes
            above = (group - group_from) * rows
            for lane in range(0, dim, WIDTH):
                for row in range(0, rows, MOST_ROWS):
                    count = min(MOST_ROWS, rows - row)
                    a = weights + ((above + row) * span + (index - first) * size) * FLOAT_BYTES
                    c = out + ((above + row) * dim + lane) * FLOAT_BYTES
                    if number == 2:
                        multiply_halves(count, a, span, block + lane * number, dim, c, dim, size)
                    else:
                        multiply_rows(count, a, span, block + lane * number, dim, c, dim, size)


@njit(cache=True)
def _softmax_row(scores_S: Any, visible_from: int, visible_to: int, soft_cap: float) -> Any:
    """exp(score - largest) in place over the visible positions, 0 elsewhere; returns the sum."""
    if soft_cap > 0:
        for i in range(visible_from, visible_to):
            scores_S[i] = soft_cap * np.tanh(scores_S[i] / soft_cap)
    scores_S[:visible_from] = HIDDEN
    scores_S[visible_to:] = HIDDEN
    count = scores_S.shape[0]
    return exponentiate(scores_S.ctypes.data, count, largest(scores_S.ctypes.data, count))


@njit(cache=True)
def _attend_tile(
    q_TX: Any,
    k: int,
    v: int,
    table_M: Any,
    out_TX: Any,
    start: int,
    count: int,
    position: int,
    shape: Shape,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """`count` neighbouring tokens, the first at `position`, all query heads of some KV heads."""
    groups, group_from, group_to, dim, size, _ = shape
    shared = out_TX.shape[1] // (groups * dim)
    rows = count * shared
    total = (group_to - group_from) * rows
    first = max(0, position - window + 1) // size if window > 0 else 0
    last = (position + count - 1) // size + 1
    q_XD = np.empty((total, dim), np.float32)
    for row in range(total):
        head = ((group_from + row // rows) * shared + row % shared) * dim
        for d in range(dim):
            q_XD[row, d] = q_TX[start + row % rows // shared, head + d] * scale
    scores_XS = np.zeros((total, (last - first) * size), np.float32)
    _score(q_XD, scores_XS, k, table_M, shape, rows, first, last)
    blended_XD = np.zeros((total, dim), np.float32)
    sums_X = np.empty(total, np.float32)
    for row in range(total):
        at = position + row % rows // shared
        oldest = max(0, at - window + 1) if window > 0 else 0
        sums_X[row] = _softmax_row(scores_XS[row], max(0, oldest - first * size), at + 1 - first * size, soft_cap)
    _blend(scores_XS, blended_XD, v, table_M, shape, rows, first, last)
    for row in range(total):
        head = ((group_from + row // rows) * shared + row % shared) * dim
        for d in range(dim):
            out_TX[start + row % rows // shared, head + d] = blended_XD[row, d] / sums_X[row]


@njit("void(i8,i8,i8,i8,i8,i8,i8,i8,i8,i8,i8,UniTuple(i8,4),f8,i8,f8,i8)", parallel=True, cache=True)
def paged_attention(
    q: int,
    row: int,
    k: int,
    v: int,
    starts: int,
    contexts: int,
    tables: int,
    columns: int,
    out: int,
    requests: int,
    heads: int,
    pool: tuple[int, int, int, int],
    scale: float,
    window: int,
    soft_cap: float,
    workers: int,
) -> None:
    """Causal attention of every chunk over its request's context, walking the block tables [R, columns] in place.

    Tokens of q are `row` numbers apart; `pool` is (groups, D, B, bytes of a number).
    """
    groups, dim, size, number = pool
    starts_R1, contexts_R = carray(integers(starts), (requests + 1,)), carray(integers(contexts), (requests,))
    tables_RM = carray(integers(tables), (requests, columns))
    tokens = starts_R1[requests]
    q_TX, out_TX = carray(floats(q), (tokens, row)), carray(floats(out), (tokens, heads * dim))
    together = max(1, MOST_ROWS // (heads // groups))
    taken = groups if requests >= workers and tokens == requests else 1  # heads at once: decodes enough for all
    for worker in prange(workers):
        task = 0
        for request in range(requests):
            before = contexts_R[request] - starts_R1[request + 1]
            for group in range(0, groups, taken):
                for start in range(starts_R1[request], starts_R1[request + 1], together):
                    task += 1
                    if task % workers == worker:
                        count = min(together, starts_R1[request + 1] - start)
                        _attend_tile(
                            q_TX, k, v, tables_RM[request], out_TX, start, count, start + before,
                            (groups, group, group + taken, dim, size, number), scale, window, soft_cap,
                        )  # fmt: skip
