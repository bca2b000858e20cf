"""What lies between linears and attention, compiled for the CPU: norm, rotation, activation, KV store; one pass each.

Shapes as in `reference.py`; rows M of size K. Arrays are handed over as addresses; K and D are multiples of 16.
"""

from typing import Any

import numpy as np
from numba import carray, njit, prange

from kernels.tile import silu_multiply, store_half, sum_of_squares
from kernels.views import floats, integers

SERIAL_ROWS = 4  # so few are done before other threads have woken up
FLOAT_BYTES = 4


@njit(cache=True)
def _norm_row(x_MK: Any, weight_K: Any, eps: Any, out_MK: Any, row: int) -> None:
    size = weight_K.shape[0]
    squares = sum_of_squares(x_MK.ctypes.data + row * size * FLOAT_BYTES, size)
    scale = np.float32(1.0) / np.sqrt(squares / np.float32(size) + eps)
    for k in range(size):
        out_MK[row, k] = x_MK[row, k] * scale * weight_K[k]


@njit("void(i8,i8,f8,i8,i8,i8,i8)", parallel=True, cache=True)
def rms_norm(x: int, weight: int, eps: float, out: int, rows: int, size: int, workers: int) -> None:
    """out = x / sqrt(mean(x²) + eps) · weight, row by row."""
    x_MK, out_MK = carray(floats(x), (rows, size)), carray(floats(out), (rows, size))
    weight_K, small = carray(floats(weight), (size,)), np.float32(eps)
    if rows <= SERIAL_ROWS:
        for row in range(rows):
            _norm_row(x_MK, weight_K, small, out_MK, row)
    else:
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                _norm_row(x_MK, weight_K, small, out_MK, row)


@njit(cache=True)
def _add_row(x_MK: Any, delta_MK: Any, row: int) -> None:
    for k in range(x_MK.shape[1]):
        x_MK[row, k] += delta_MK[row, k]


@njit("void(i8,i8,i8,f8,i8,i8,i8,i8)", parallel=True, cache=True)
def add_norm(x: int, delta: int, weight: int, eps: float, out: int, rows: int, size: int, workers: int) -> None:
    """x += delta, then out = norm of x: one pass over both."""
    x_MK, delta_MK = carray(floats(x), (rows, size)), carray(floats(delta), (rows, size))
    out_MK, weight_K = carray(floats(out), (rows, size)), carray(floats(weight), (size,))
    small = np.float32(eps)
    if rows <= SERIAL_ROWS:
        for row in range(rows):
            _add_row(x_MK, delta_MK, row)
            _norm_row(x_MK, weight_K, small, out_MK, row)
    else:
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                _add_row(x_MK, delta_MK, row)
                _norm_row(x_MK, weight_K, small, out_MK, row)


@njit("void(i8,i8,i8,i8,i8)", parallel=True, cache=True)
def silu_mul(gate_up: int, out: int, rows: int, size: int, workers: int) -> None:
    """out = silu(gate) · up, where each row of `gate_up` holds `size` gates, then as many ups."""
    row_bytes = size * FLOAT_BYTES
    if rows <= SERIAL_ROWS:
        for row in range(rows):
            gate = gate_up + 2 * row * row_bytes
            silu_multiply(gate, gate + row_bytes, out + row * row_bytes, size)
    else:
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                gate = gate_up + 2 * row * row_bytes
                silu_multiply(gate, gate + row_bytes, out + row * row_bytes, size)


@njit(cache=True)
def _rotate_token(x_TX: Any, cos_TF: Any, sin_TF: Any, token: int, heads: int) -> None:
    half = cos_TF.shape[1]
    for head in range(heads):
        start = head * 2 * half
        for i in range(start, start + half):
            cos, sin = cos_TF[token, i - start], sin_TF[token, i - start]
            first, second = x_TX[token, i], x_TX[token, i + half]
            x_TX[token, i] = first * cos - second * sin
            x_TX[token, i + half] = second * cos + first * sin


@njit("void(i8,i8,i8,i8,i8,i8,i8,i8)", parallel=True, cache=True)
def rotate(x: int, row: int, cos: int, sin: int, tokens: int, heads: int, half: int, workers: int) -> None:
    """Rotary position embedding in place: the pair (i, i + D/2) turns by the angle of frequency i.

    Tokens are `row` numbers apart; their heads follow each other.
    """
    x_TX = carray(floats(x), (tokens, row))
    cos_TF, sin_TF = carray(floats(cos), (tokens, half)), carray(floats(sin), (tokens, half))
    if tokens <= SERIAL_ROWS:
        for token in range(tokens):
            _rotate_token(x_TX, cos_TF, sin_TF, token, heads)
    else:
        for worker in prange(workers):
            for token in range(worker, tokens, workers):
                _rotate_token(x_TX, cos_TF, sin_TF, token, heads)


@njit(cache=True)
def _store_token(k_TX: Any, v_TX: Any, k: int, v: int, slot: int, token: int, pool: tuple[int, int, int, int]) -> None:
    """K as [D, B] and V as [B, D] of each KV head of the slot's block."""
    groups, dim, size, number = pool
    block, offset = slot // size, slot % size
    for group in range(groups):
        start = (block * groups + group) * dim * size
        for d in range(dim):
            k_address, v_address = k + (start + d * size + offset) * number, v + (start + offset * dim + d) * number
            k_value, v_value = k_TX[token, group * dim + d], v_TX[token, group * dim + d]
            if number == 2:
                store_half(k_value, k_address)
                store_half(v_value, v_address)
            else:
                carray(floats(k_address), (1,))[0] = k_value
                carray(floats(v_address), (1,))[0] = v_value


@njit("void(i8,i8,i8,i8,i8,i8,i8,UniTuple(i8,4),i8)", parallel=True, cache=True)
def store_kv(
    k: int,
    v: int,
    row: int,
    k_pool: int,
    v_pool: int,
    slots: int,
    tokens: int,
    pool: tuple[int, int, int, int],
    workers: int,
) -> None:
    """Tokens of k and v are `row` numbers apart, the KV heads of one follow each other.

    `pool` is (groups, D, B, bytes of a number): 4 for float32, 2 for float16.
    """
    slots_T = carray(integers(slots), (tokens,))
    k_TX, v_TX = carray(floats(k), (tokens, row)), carray(floats(v), (tokens, row))
    if tokens <= SERIAL_ROWS:
        for token in range(tokens):
            _store_token(k_TX, v_TX, k_pool, v_pool, slots_T[token], token, pool)
    else:
        for worker in prange(workers):
            for token in range(worker, tokens, workers):
                _store_token(k_TX, v_TX, k_pool, v_pool, slots_T[token], token, pool)
