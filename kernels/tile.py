"""Register tiles for the CPU: vector loops in LLVM IR, out of which linears, attention and norms are built.

Each output element is summed over the depth in one fixed order, whatever the number of rows beside it: results do
not depend on the batch. LLVM maps the 16-wide vectors to what the machine has (two AVX2 registers, four of NEON).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.vector import (
    WIDTH,
    call,
    constant,
    f32,
    i32,
    i64,
    ivector,
    load,
    load_half,
    offset,
    splat,
    store,
    sum_lanes,
    vector,
)

MOST_ROWS = 6  # six rows of two AVX2 registers each leave room for the operands: sixteen registers in all
LOWEST_EXPONENT = -87.0
HIGHEST_EXPONENT = 88.0
LARGEST_HALF = 65504.0


def multiply_add(rows: int, half: bool = False) -> Any:
    """C[rows, 16] += A[rows, depth] · B[depth, 16]; the product is summed from zero, then added.

    Addresses are integers; `a_row`, `b_row`, `c_row` are the distances between rows in numbers. With `half`, B holds
    float16: half the memory to read, and the sums are float32 all the same.
    """
    load_b, b_size = (load_half, 2) if half else (load, 4)

    @intrinsic
    def tile(typing: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, b, b_row, c, c_row, depth = arguments
            sums = [cgutils.alloca_once(builder, vector) for _ in range(rows)]
            for total in sums:
                builder.store(constant(0.0), total)
            a_rows = [offset(builder, a, builder.mul(a_row, i64(row))) for row in range(rows)]
            with cgutils.for_range(builder, depth, intp=i64) as loop:
                b_vector = load_b(builder, offset(builder, b, builder.mul(b_row, loop.index), b_size))
                for a_start, total in zip(a_rows, sums, strict=True):
                    address = offset(builder, a_start, loop.index)
                    scalar = builder.load(builder.inttoptr(address, f32.as_pointer()))
                    fused = call(builder, "fma", splat(builder, scalar), b_vector, builder.load(total))
                    builder.store(fused, total)
            for row, total in enumerate(sums):
                address = offset(builder, c, builder.mul(c_row, i64(row)))
                store(builder, builder.fadd(load(builder, address), builder.load(total)), address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return tile


@intrinsic
def largest(typing: Any, x: Any, count: Any) -> Any:
    """The largest of `count` floats at address x; `count` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, count = arguments
        best = cgutils.alloca_once(builder, vector)
        builder.store(load(builder, x), best)
        with cgutils.for_range(builder, builder.udiv(count, i64(WIDTH)), intp=i64) as loop:
            value = load(builder, offset(builder, x, builder.mul(loop.index, i64(WIDTH))))
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, old), value, old), best)
        lanes = [builder.extract_element(builder.load(best), i32(lane)) for lane in range(WIDTH)]
        result = lanes[0]
        for lane in lanes[1:]:
            result = builder.select(builder.fcmp_ordered(">", lane, result), lane, result)
        return result

    return types.float32(types.int64, types.int64), generate


@intrinsic
def exponentiate(typing: Any, x: Any, count: Any, shift: Any) -> Any:
    """x = exp(x - shift) in place for `count` floats, a multiple of 16, none above `shift`; returns their sum.

    Below -87 the result is exactly 0, so that hidden positions weigh nothing.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, count, shift = arguments
        shifts = splat(builder, shift)
        total = cgutils.alloca_once(builder, vector)
        builder.store(constant(0.0), total)
        with cgutils.for_range(builder, builder.udiv(count, i64(WIDTH)), intp=i64) as loop:
            address = offset(builder, x, builder.mul(loop.index, i64(WIDTH)))
            value = _exp(builder, builder.fsub(load(builder, address), shifts))
            store(builder, value, address)
            builder.store(builder.fadd(builder.load(total), value), total)
        return sum_lanes(builder, builder.load(total))

    return types.float32(types.int64, types.int64, types.float32), generate


@intrinsic
def sum_of_squares(typing: Any, x: Any, count: Any) -> Any:
    """Of `count` floats at address x, a multiple of 16: each lane sums every 16th, then they are added in order."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, count = arguments
        total = cgutils.alloca_once(builder, vector)
        builder.store(constant(0.0), total)
        with cgutils.for_range(builder, builder.udiv(count, i64(WIDTH)), intp=i64) as loop:
            value = load(builder, offset(builder, x, builder.mul(loop.index, i64(WIDTH))))
            builder.store(call(builder, "fma", value, value, builder.load(total)), total)
        return sum_lanes(builder, builder.load(total))

    return types.float32(types.int64, types.int64), generate


@intrinsic
def silu_multiply(typing: Any, gate: Any, up: Any, out: Any, count: Any) -> Any:
    """out = gate / (1 + exp(-gate)) · up for `count` floats, a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out, count = arguments
        with cgutils.for_range(builder, builder.udiv(count, i64(WIDTH)), intp=i64) as loop:
            shift = builder.mul(loop.index, i64(WIDTH * 4))
            value = load(builder, builder.add(gate, shift))
            negative = builder.fsub(constant(0.0), value)
            bounded = builder.fcmp_ordered("<", negative, constant(HIGHEST_EXPONENT))
            power = _exp(builder, builder.select(bounded, negative, constant(HIGHEST_EXPONENT)))
            silu = builder.fdiv(value, builder.fadd(power, constant(1.0)))
            store(builder, builder.fmul(silu, load(builder, builder.add(up, shift))), builder.add(out, shift))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def store_half(typing: Any, value: Any, address: Any) -> Any:
    """A float32 as float16, rounded to the nearest; one that is too large becomes the largest there is."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, address = arguments
        for limit, outside in ((LARGEST_HALF, ">"), (-LARGEST_HALF, "<")):
            bound = ir.Constant(f32, limit)
            value = builder.select(builder.fcmp_ordered(outside, value, bound), bound, value)
        half = ir.HalfType()
        builder.store(builder.fptrunc(value, half), builder.inttoptr(address, half.as_pointer())).align = 2
        return context.get_dummy_value()

    return types.void(types.float32, types.int64), generate


def _exp(builder: Any, x: Any) -> Any:
    """exp by range reduction to 2**n · e**r, |r| <= ln 2 / 2, and the degree-5 polynomial of Cephes' expf."""
    enough = builder.fcmp_ordered(">", x, constant(LOWEST_EXPONENT))
    x = builder.select(enough, x, constant(0.0))
    n = call(builder, "floor", call(builder, "fma", x, constant(1.4426950408889634), constant(0.5)))
    r = call(builder, "fma", n, constant(-0.693359375), x)
    r = call(builder, "fma", n, constant(2.12194440e-4), r)
    y = constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = call(builder, "fma", y, r, constant(coefficient))
    y = builder.fadd(call(builder, "fma", y, builder.fmul(r, r), r), constant(1.0))
    exponent = builder.add(builder.fptosi(n, ivector), ir.Constant(ivector, [127] * WIDTH))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(ivector, [23] * WIDTH)), vector)
    return builder.select(enough, builder.fmul(y, power), constant(0.0))
