"""The register tile for int8 weights: int16 activations, exact int32 sums, so no order of them can change a bit.

Two neighbouring products are added at once: that is the multiply instruction that every x86-64 machine with AVX2 has.
"""

from typing import Any

import numba.core.registry
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.vector import f32, i32, i64, load_as, offset, splat

LANES = 8
HALVES = 2  # a tile is 16 outputs wide: two vectors of eight sums
PAIR_BYTES = 2 * LANES * HALVES  # the weights of one pair of inputs for 16 outputs

_bytes = ir.VectorType(ir.IntType(8), 2 * LANES)
_shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
_sums = ir.VectorType(i32, LANES)
_floats = ir.VectorType(f32, LANES)


def _has_avx2() -> bool:
    return "+avx2" in numba.core.registry.cpu_target.target_context.codegen().magic_tuple()[2]


def _add_products(builder: Any, x: Any, y: Any) -> Any:
    """x₀·y₀ + x₁·y₁, x₂·y₂ + x₃·y₃, …: sixteen int16 each → eight int32."""
    if _has_avx2():
        signature = ir.FunctionType(_sums, (_shorts, _shorts))
        return builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.x86.avx2.pmadd.wd"), (x, y))
    return builder.add(*(builder.mul(_every_other(builder, x, i), _every_other(builder, y, i)) for i in (0, 1)))


def _every_other(builder: Any, value: Any, first: int) -> Any:
    places = ir.Constant(_sums, [2 * lane + first for lane in range(LANES)])
    return builder.sext(builder.shuffle_vector(value, ir.Constant(_shorts, ir.Undefined), places), _sums)


def _accumulate(builder: Any, rows: list[Any], weights: Any, pair: Any, sums: list[list[Any]]) -> None:
    """One pair of inputs: its weights for 16 outputs against the same pair of every row."""
    start = offset(builder, weights, pair, PAIR_BYTES)
    halves = [load_as(builder, builder.add(start, i64(2 * LANES * half)), _bytes, 1) for half in range(HALVES)]
    wide = [builder.sext(half, _shorts) for half in halves]
    for row, totals in zip(rows, sums, strict=True):
        both = load_as(builder, offset(builder, row, pair, 4), i32, 2)
        x = builder.bitcast(splat(builder, both, _sums), _shorts)
        for total, weight in zip(totals, wide, strict=True):
            builder.store(builder.add(builder.load(total), _add_products(builder, x, weight)), total)


def multiply_int8(rows: int) -> Any:
    """C[rows, 16] = A[rows, 2 · pairs] · B[2 · pairs, 16] · (scale of the row) · (scale of the output) + bias.

    A holds int16, B int8 as [pairs, 16, 2], all else float32. Addresses are integers; `a_row` and `c_row` are the
    distances between rows in numbers. The caller sees to it that no sum can leave int32.
    """

    @intrinsic
    def tile(
        typing: Any, a: Any, a_row: Any, b: Any, pairs: Any, c: Any, c_row: Any, row_scale: Any, scale: Any, bias: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, b, pairs, c, c_row, row_scale, scale, bias = arguments
            sums = [[cgutils.alloca_once(builder, _sums) for _ in range(HALVES)] for _ in range(rows)]
            for total in (one for totals in sums for one in totals):
                builder.store(ir.Constant(_sums, [0] * LANES), total)
            starts = [offset(builder, a, builder.mul(a_row, i64(row)), 2) for row in range(rows)]
            with cgutils.for_range(builder, pairs, intp=i64) as loop:
                _accumulate(builder, starts, b, loop.index, sums)
            for row, totals in enumerate(sums):
                factor = splat(builder, load_as(builder, offset(builder, row_scale, i64(row)), f32, 4), _floats)
                target = offset(builder, c, builder.mul(c_row, i64(row)))
                for half, total in enumerate(totals):
                    shift = i64(4 * LANES * half)
                    scales, biases = (
                        load_as(builder, builder.add(address, shift), _floats, 4) for address in (scale, bias)
                    )
                    value = builder.fmul(builder.sitofp(builder.load(total), _floats), builder.fmul(factor, scales))
                    place = builder.inttoptr(builder.add(target, shift), _floats.as_pointer())
                    builder.store(builder.fadd(value, biases), place).align = 4
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return tile
