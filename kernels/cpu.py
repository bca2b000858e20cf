"""Compiled CPU kernels: linear layers and paged attention in float32, built on the register tiles of `tile.py`.

Batch-invariant by construction: an output row is computed by the same operations in the same order whatever runs
beside it. Shapes as in `reference.py`; M rows, K inputs and N outputs of a linear, packed [N / 16, K, 16]. Explicit
signatures: one machine code for every layout, compiled once and cached on disk.
"""

from typing import Any

import numpy as np
from numba import njit, prange

from kernels.tile import MOST_ROWS, WIDTH, exponentiate, largest, multiply_add

DEPTH = 128  # partial sums of this many products: rounding errors grow with the length of a chain
PANEL = 96  # rows that share one pass over the weights: 96 rows of 1,536 floats stay in the second-level cache
FLOAT_BYTES = 4
HIDDEN = np.float32(-np.inf)

_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = (multiply_add(rows) for rows in range(1, MOST_ROWS + 1))
_half1, _half2, _half3, _half4, _half5, _half6 = (multiply_add(rows, half=True) for rows in range(1, MOST_ROWS + 1))


@njit(inline="always")
def _multiply_rows(rows: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, depth: int) -> None:
    if rows == 6:
        _tile6(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 1:
        _tile1(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 2:
        _tile2(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 3:
        _tile3(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 4:
        _tile4(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 5:
        _tile5(a, a_row, b, b_row, c, c_row, depth)


@njit(inline="always")
def _multiply_halves(rows: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, depth: int) -> None:
    if rows == 6:
        _half6(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 1:
        _half1(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 2:
        _half2(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 3:
        _half3(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 4:
        _half4(a, a_row, b, b_row, c, c_row, depth)
    elif rows == 5:
        _half5(a, a_row, b, b_row, c, c_row, depth)


@njit("void(f4[:,::1], u1[:,::1], f4[::1], f4[:,::1], i8)", parallel=True, cache=True)
def linear(x_MK: Any, packed: Any, bias_N: Any, out_MN: Any, workers: int) -> None:
    """out = x · Wᵀ + bias. Each worker owns a range of output columns and streams its weights once a panel.

    `packed` holds a row of bytes per 16 outputs: float32 or float16, which its length tells.
    """
    rows, depth = x_MK.shape
    tiles, columns = packed.shape[0], out_MN.shape[1]
    size = packed.shape[1] // (depth * WIDTH)
    x, w, out = x_MK.ctypes.data, packed.ctypes.data, out_MN.ctypes.data
    share = (tiles + workers - 1) // workers
    for worker in prange(workers):
        for panel in range(0, rows, PANEL):
            panel_end = min(rows, panel + PANEL)
            for tile in range(worker * share, min(tiles, (worker + 1) * share)):
                column = tile * WIDTH
                for row in range(panel, panel_end):
                    for lane in range(WIDTH):
                        out_MN[row, column + lane] = bias_N[column + lane]
                for k in range(0, depth, DEPTH):
                    chain = min(DEPTH, depth - k)
                    weights = w + (tile * depth + k) * WIDTH * size
                    for row in range(panel, panel_end, MOST_ROWS):
                        count = min(MOST_ROWS, panel_end - row)
                        a, c = x + (row * depth + k) * FLOAT_BYTES, out + (row * columns + column) * FLOAT_BYTES
                        if size == 2:
                            _multiply_halves(count, a, depth, weights, WIDTH, c, columns, chain)
                        else:
                            _multiply_rows(count, a, depth, weights, WIDTH, c, columns, chain)


@njit("void(f4[:,:,:], f4[:,:,:], f4[:,:,:,::1], f4[:,:,:,::1], i8[::1])", cache=True)
def store_kv(k_TGD: Any, v_TGD: Any, k_NGDB: Any, v_NGBD: Any, slots_T: Any) -> None:
    size = k_NGDB.shape[3]
    for token in range(k_TGD.shape[0]):
        block, offset = slots_T[token] // size, slots_T[token] % size
        for group in range(k_TGD.shape[1]):
            for d in range(k_TGD.shape[2]):
                k_NGDB[block, group, d, offset] = k_TGD[token, group, d]
                v_NGBD[block, group, offset, d] = v_TGD[token, group, d]


@njit("void(f4[:,::1], f4[::1], f8, f4[:,::1])", cache=True)
def rms_norm(x_MK: Any, weight_K: Any, eps: float, out_MK: Any) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight, row by row."""
    rows, size = x_MK.shape
    for row in range(rows):
        squares = np.float32(0.0)
        for k in range(size):
            squares += x_MK[row, k] * x_MK[row, k]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + np.float32(eps))
        for k in range(size):
            out_MK[row, k] = x_MK[row, k] * scale * weight_K[k]


@njit("void(f4[:,:,:], f4[:,::1], f4[:,::1])", cache=True)
def rotate(x_THD: Any, cos_TF: Any, sin_TF: Any) -> None:
    """Rotary position embedding in place: the pair (i, i + D/2) turns by the angle of frequency i."""
    half = cos_TF.shape[1]
    for token in range(x_THD.shape[0]):
        for head in range(x_THD.shape[1]):
            for i in range(half):
                first, second = x_THD[token, head, i], x_THD[token, head, i + half]
                x_THD[token, head, i] = first * cos_TF[token, i] - second * sin_TF[token, i]
                x_THD[token, head, i + half] = second * cos_TF[token, i] + first * sin_TF[token, i]


@njit(cache=True)
def _score(q: int, scores: int, k_NGDB: Any, table_M: Any, group: int, rows: int, first: int, last: int) -> None:
    """scores[rows, span] = q[rows, D] · K of blocks first … last - 1."""
    groups, dim, size = k_NGDB.shape[1:]
    span = (last - first) * size
    for index in range(first, last):
        block = k_NGDB.ctypes.data + (table_M[index] * groups + group) * dim * size * FLOAT_BYTES
        for lane in range(0, size, WIDTH):
            column = (index - first) * size + lane
            for row in range(0, rows, MOST_ROWS):
                _multiply_rows(
                    min(MOST_ROWS, rows - row),
                    q + row * dim * FLOAT_BYTES,
                    dim,
                    block + lane * FLOAT_BYTES,
                    size,
                    scores + (row * span + column) * FLOAT_BYTES,
                    span,
                    dim,
                )


@njit(cache=True)
def _blend(weights: int, out: int, v_NGBD: Any, table_M: Any, group: int, rows: int, first: int, last: int) -> None:
    """out[rows, D] += weights[rows, span] · V of blocks first … last - 1, block after block."""
    groups, size, dim = v_NGBD.shape[1:]
    span = (last - first) * size
    for index in range(first, last):
        block = v_NGBD.ctypes.data + (table_M[index] * groups + group) * dim * size * FLOAT_BYTES
        for lane in range(0, dim, WIDTH):
            for row in range(0, rows, MOST_ROWS):
                _multiply_rows(
                    min(MOST_ROWS, rows - row),
                    weights + (row * span + (index - first) * size) * FLOAT_BYTES,
                    span,
                    block + lane * FLOAT_BYTES,
                    dim,
                    out + (row * dim + lane) * FLOAT_BYTES,
                    dim,
                    size,
                )


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
    q_THD: Any,
    k_NGDB: Any,
    v_NGBD: Any,
    table_M: Any,
    out_THD: Any,
    start: int,
    count: int,
    position: int,
    group: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> None:
    """`count` neighbouring tokens, the first at `position`, all query heads of one KV head: they share each K and V."""
    dim, size = q_THD.shape[2], k_NGDB.shape[3]
    shared = q_THD.shape[1] // k_NGDB.shape[1]
    rows = count * shared
    first = max(0, position - window + 1) // size if window > 0 else 0
    last = (position + count - 1) // size + 1
    q_XD = np.empty((rows, dim), np.float32)
    for row in range(rows):
        for d in range(dim):
            q_XD[row, d] = q_THD[start + row // shared, group * shared + row % shared, d] * scale
    scores_XS = np.zeros((rows, (last - first) * size), np.float32)
    _score(q_XD.ctypes.data, scores_XS.ctypes.data, k_NGDB, table_M, group, rows, first, last)
    blended_XD = np.zeros((rows, dim), np.float32)
    sums_X = np.empty(rows, np.float32)
    for row in range(rows):
        at = position + row // shared
        oldest = max(0, at - window + 1) if window > 0 else 0
        sums_X[row] = _softmax_row(scores_XS[row], max(0, oldest - first * size), at + 1 - first * size, soft_cap)
    _blend(scores_XS.ctypes.data, blended_XD.ctypes.data, v_NGBD, table_M, group, rows, first, last)
    for row in range(rows):
        for d in range(dim):
            out_THD[start + row // shared, group * shared + row % shared, d] = blended_XD[row, d] / sums_X[row]


@njit(
    "void(f4[:,:,:], f4[:,:,:,::1], f4[:,:,:,::1], i4[::1], i4[::1], i4[:,::1], f4[:,:,::1], f8, i8, f8, i8)",
    parallel=True,
    cache=True,
)
def paged_attention(
    q_THD: Any,
    k_NGDB: Any,
    v_NGBD: Any,
    starts_R1: Any,
    contexts_R: Any,
    tables_RM: Any,
    out_THD: Any,
    scale: float,
    window: int,
    soft_cap: float,
    workers: int,
) -> None:
    """Causal attention of every chunk over its request's context, walking the block tables in place."""
    groups = k_NGDB.shape[1]
    together = max(1, MOST_ROWS // (q_THD.shape[1] // groups))
    for worker in prange(workers):
        task = 0
        for request in range(contexts_R.shape[0]):
            before = contexts_R[request] - starts_R1[request + 1]
            for start in range(starts_R1[request], starts_R1[request + 1], together):
                count = min(together, starts_R1[request + 1] - start)
                for group in range(groups):
                    task += 1
                    if task % workers == worker:
                        _attend_tile(
                            q_THD, k_NGDB, v_NGBD, tables_RM[request], out_THD, start, count, start + before,
                            group, scale, window, soft_cap,
                        )  # fmt: skip
