"""Compiled linears for the CPU, built on the register tiles: weights in float32, float16 or int8, packed by outputs.

Batch-invariant by construction: an output row is computed by the same operations in the same order whatever runs
beside it. M rows, K inputs and N outputs, N in whole tiles; arrays are contiguous and handed over as addresses.
Explicit signatures: one machine code, compiled once and cached on disk.
"""

from typing import Any

import numpy as np
from numba import carray, njit, prange

from kernels.tile import MOST_ROWS, multiply_add, silu_multiply
from kernels.tile_int8 import multiply_int8
from kernels.vector import WIDTH
from kernels.views import floats

DEPTH = 128  # partial sums of this many products: rounding errors grow with the length of a chain
PANEL = 96  # rows that share one pass over the weights: 96 rows of 1,536 floats stay in the second-level cache
FLOAT_BYTES = 4
SHORT_BYTES = 2
ROWS = 5  # of a tile; six are no faster
INT8_ROWS = 4  # the sums of more do not fit in sixteen registers
SERIAL_ROWS = 8  # so few are quantised before other threads have woken up

_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = (multiply_add(rows) for rows in range(1, MOST_ROWS + 1))
_half1, _half2, _half3, _half4, _half5, _half6 = (multiply_add(rows, half=True) for rows in range(1, MOST_ROWS + 1))
_int1, _int2, _int3, _int4 = (multiply_int8(rows) for rows in range(1, INT8_ROWS + 1))


@njit(inline="always")
def multiply_rows(rows: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, depth: int) -> None:
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
def multiply_halves(rows: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, depth: int) -> None:
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


@njit(inline="always")
def _multiply_int8(
    rows: int, a: int, a_row: int, b: int, pairs: int, c: int, c_row: int, row_scale: int, scale: int, bias: int
) -> None:
    if rows == 4:
        _int4(a, a_row, b, pairs, c, c_row, row_scale, scale, bias)
    elif rows == 1:
        _int1(a, a_row, b, pairs, c, c_row, row_scale, scale, bias)
    elif rows == 2:
        _int2(a, a_row, b, pairs, c, c_row, row_scale, scale, bias)
    elif rows == 3:
        _int3(a, a_row, b, pairs, c, c_row, row_scale, scale, bias)


@njit("void(i8,i8,i8,i8,i8,i8,i8,i8,i8)", parallel=True, cache=True)
def linear(
    x: int, packed: int, bias: int, out: int, rows: int, depth: int, tiles: int, size: int, workers: int
) -> None:
    """out = x · Wᵀ + bias. Each worker owns a range of output columns and streams its weights once a panel.

    `packed` holds [N / 16, K, 16] numbers of `size` bytes: 4 for float32, 2 for float16.
    """
    columns = tiles * WIDTH
    out_MN, bias_N = carray(floats(out), (rows, columns)), carray(floats(bias), (columns,))
    share = (tiles + workers - 1) // workers
    for worker in prange(workers):
        for panel in range(0, rows, PANEL):
            panel_end = min(rows, panel + PANEL)
            height = panel_end - panel
            parts = (height + ROWS - 1) // ROWS  # of nearly equal height: low tiles are slow ones
            for tile in range(worker * share, min(tiles, (worker + 1) * share)):
                column = tile * WIDTH
                for row in range(panel, panel_end):
                    for lane in range(WIDTH):
                        out_MN[row, column + lane] = bias_N[column + lane]
                for k in range(0, depth, DEPTH):
                    chain = min(DEPTH, depth - k)
                    weights = packed + (tile * depth + k) * WIDTH * size
                    for part in range(parts):
                        row, end = panel + height * part // parts, panel + height * (part + 1) // parts
                        count = end - row
                        a, c = x + (row * depth + k) * FLOAT_BYTES, out + (row * columns + column) * FLOAT_BYTES
                        if size == 2:
                            multiply_halves(count, a, depth, weights, WIDTH, c, columns, chain)
                        else:
                            multiply_rows(count, a, depth, weights, WIDTH, c, columns, chain)


@njit(cache=True)
def _activate(both_PN: Any, out: int, columns: int, height: int) -> None:
    """Rows of 16 gates and 16 ups → 16 numbers of each row of out."""
    for row in range(height):
        gate = both_PN.ctypes.data + row * 2 * WIDTH * FLOAT_BYTES
        silu_multiply(gate, gate + WIDTH * FLOAT_BYTES, out + row * columns * FLOAT_BYTES, WIDTH)


@njit("void(i8,i8,i8,i8,i8,i8,i8,i8)", parallel=True, cache=True)
def gated(x: int, packed: int, out: int, rows: int, depth: int, tiles: int, size: int, workers: int) -> None:
    """out = silu(x · Gᵀ) · (x · Uᵀ), where tiles of G and U alternate: what is between them never leaves the core."""
    columns, share = tiles // 2 * WIDTH, (tiles // 2 + workers - 1) // workers
    for worker in prange(workers):
        both_PN = np.empty((PANEL, 2 * WIDTH), np.float32)
        both = both_PN.ctypes.data
        for panel in range(0, rows, PANEL):
            height = min(PANEL, rows - panel)
            parts = (height + ROWS - 1) // ROWS
            for pair in range(worker * share, min(tiles // 2, (worker + 1) * share)):
                both_PN[:height] = 0.0
                for half in range(2):
                    for k in range(0, depth, DEPTH):
                        chain = min(DEPTH, depth - k)
                        weights = packed + ((2 * pair + half) * depth + k) * WIDTH * size
                        for part in range(parts):
                            row, end = height * part // parts, height * (part + 1) // parts
                            a = x + ((panel + row) * depth + k) * FLOAT_BYTES
                            c = both + (row * 2 + half) * WIDTH * FLOAT_BYTES
                            if size == 2:
                                multiply_halves(end - row, a, depth, weights, WIDTH, c, 2 * WIDTH, chain)
                            else:
                                multiply_rows(end - row, a, depth, weights, WIDTH, c, 2 * WIDTH, chain)
                _activate(both_PN, out + (panel * columns + pair * WIDTH) * FLOAT_BYTES, columns, height)


@njit(cache=True)
def _quantize_row(x_MK: Any, quantized_MK: Any, scale_M: Any, row: int, limit: Any) -> None:
    largest = np.float32(0.0)
    for k in range(x_MK.shape[1]):
        largest = max(largest, abs(x_MK[row, k]))
    factor = limit / largest if largest > 0 else np.float32(0.0)
    for k in range(x_MK.shape[1]):
        quantized_MK[row, k] = np.int16(np.rint(x_MK[row, k] * factor))
    scale_M[row] = largest / limit


@njit("void(i8,i2[:,::1],f4[::1],i8)", parallel=True, cache=True)
def _quantize(x: int, quantized_MK: Any, scale_M: Any, workers: int) -> None:
    rows, depth = quantized_MK.shape
    limit = np.float32(min(32767, (2**31 - 1) // (127 * depth)) - 1)
    x_MK = carray(floats(x), (rows, depth))
    if rows <= SERIAL_ROWS:
        for row in range(rows):
            _quantize_row(x_MK, quantized_MK, scale_M, row, limit)
    else:
        for worker in prange(workers):
            for row in range(worker, rows, workers):
                _quantize_row(x_MK, quantized_MK, scale_M, row, limit)


@njit("void(i8,i8,i8,i8,i8,i8,i8,i8,i8)", parallel=True, cache=True)
def linear_int8(
    x: int, packed: int, scale: int, bias: int, out: int, rows: int, depth: int, tiles: int, workers: int
) -> None:
    """out = x · Wᵀ + bias for int8 weights, packed [N / 16, K / 2, 16, 2], with a float32 `scale` per output.

    Every row of x is scaled so that its largest number becomes the largest for which no sum can leave int32: at
    1,536 inputs that is 11,000, so that all the error that shows is that of the weights.
    """
    columns = tiles * WIDTH
    quantized_MK, scale_M = np.empty((rows, depth), np.int16), np.empty(rows, np.float32)
    _quantize(x, quantized_MK, scale_M, workers)
    share = (tiles + workers - 1) // workers
    for worker in prange(workers):
        quantized, row_scale = quantized_MK.ctypes.data, scale_M.ctypes.data  # in here: the arrays live as long
        for panel in range(0, rows, PANEL):
            panel_end = min(rows, panel + PANEL)
            height = panel_end - panel
            parts = (height + INT8_ROWS - 1) // INT8_ROWS  # of nearly equal height: low tiles are slow ones
            for tile in range(worker * share, min(tiles, (worker + 1) * share)):
                column = tile * WIDTH
                for part in range(parts):
                    row, end = panel + height * part // parts, panel + height * (part + 1) // parts
                    _multiply_int8(
                        end - row,
                        quantized + row * depth * SHORT_BYTES,
                        depth,
                        packed + column * depth,
                        depth // 2,
                        out + (row * columns + column) * FLOAT_BYTES,
                        columns,
                        row_scale + row * FLOAT_BYTES,
                        scale + column * FLOAT_BYTES,
                        bias + column * FLOAT_BYTES,
                    )


@njit("void(i8,i8,i8,i8,i8,i8,i8,i8,i8)", parallel=True, cache=True)
def gated_int8(
    x: int, packed: int, scale: int, bias: int, out: int, rows: int, depth: int, tiles: int, workers: int
) -> None:
    """As `gated`, for weights as `linear_int8` has them."""
    columns, share = tiles // 2 * WIDTH, (tiles // 2 + workers - 1) // workers
    quantized_MK, scale_M = np.empty((rows, depth), np.int16), np.empty(rows, np.float32)
    _quantize(x, quantized_MK, scale_M, workers)
    for worker in prange(workers):
        quantized, row_scale = quantized_MK.ctypes.data, scale_M.ctypes.data  # in here: the arrays live as long
        both_PN = np.empty((PANEL, 2 * WIDTH), np.float32)
        both = both_PN.ctypes.data
        for panel in range(0, rows, PANEL):
            height = min(PANEL, rows - panel)
            parts = (height + INT8_ROWS - 1) // INT8_ROWS
            for pair in range(worker * share, min(tiles // 2, (worker + 1) * share)):
                for half in range(2):
                    column = (2 * pair + half) * WIDTH
                    for part in range(parts):
                        row, end = height * part // parts, height * (part + 1) // parts
                        _multiply_int8(
                            end - row,
                            quantized + (panel + row) * depth * SHORT_BYTES,
                            depth,
                            packed + column * depth,
                            depth // 2,
                            both + (row * 2 + half) * WIDTH * FLOAT_BYTES,
                            2 * WIDTH,
                            row_scale + (panel + row) * FLOAT_BYTES,
                            scale + column * FLOAT_BYTES,
                            bias + column * FLOAT_BYTES,
                        )
                _activate(both_PN, out + (panel * columns + pair * WIDTH) * FLOAT_BYTES, columns, height)
