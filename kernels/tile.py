"""Register tiles for the CPU: three vector loops in LLVM IR, out of which linears and attention are built.

Each output element is summed over the depth in one fixed order, whatever the number of rows beside it: results do
not depend on the batch. LLVM maps the 16-wide vectors to what the machine has (two AVX2 registers, four of NEON).
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16
MOST_ROWS = 6  # six rows of two AVX2 registers each leave room for the operands: sixteen registers in all
LOWEST_EXPONENT = -87.0

_f32 = ir.FloatType()
_f16 = ir.HalfType()
_i32 = ir.IntType(32)
_i64 = ir.IntType(64)
_vector = ir.VectorType(_f32, WIDTH)
_half_vector = ir.VectorType(_f16, WIDTH)
_ivector = ir.VectorType(_i32, WIDTH)

Codegen = Callable[[Any, Any, Any, Any], Any]


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, _i32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_ivector, [0] * WIDTH))


def _constant(value: float) -> Any:
    return ir.Constant(_vector, [value] * WIDTH)


def _call(builder: Any, name: str, *operands: Any) -> Any:
    """A vector operation of LLVM's own, e.g. fma: one rounding, on every target the same."""
    signature = ir.FunctionType(_vector, (_vector,) * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{WIDTH}f32")
    return builder.call(function, operands)


def _load(builder: Any, address: Any) -> Any:
    value = builder.load(builder.inttoptr(address, _vector.as_pointer()))
    value.align = 4
    return value


def _load_half(builder: Any, address: Any) -> Any:
    """Sixteen float16 as float32: exact."""
    value = builder.load(builder.inttoptr(address, _half_vector.as_pointer()))
    value.align = 2
    return builder.fpext(value, _vector)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, _vector.as_pointer())).align = 4


def _offset(builder: Any, address: Any, count: Any, size: int = 4) -> Any:
    return builder.add(address, builder.mul(count, _i64(size)))


def multiply_add(rows: int, half: bool = False) -> Any:
    """C[rows, 16] += A[rows, depth] · B[depth, 16]; the product is summed from zero, then added.

    Addresses are integers; `a_row`, `b_row`, `c_row` are the distances between rows in numbers. With `half`, B holds
    float16: half the memory to read, and the sums are float32 all the same.
    """
    load_b, b_size = (_load_half, 2) if half else (_load, 4)

    @intrinsic
    def tile(typing: Any, a: Any, a_row: Any, b: Any, b_row: Any, c: Any, c_row: Any, depth: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            a, a_row, b, b_row, c, c_row, depth = arguments
            sums = [cgutils.alloca_once(builder, _vector) for _ in range(rows)]
            for total in sums:
                builder.store(_constant(0.0), total)
            a_rows = [_offset(builder, a, builder.mul(a_row, _i64(row))) for row in range(rows)]
            with cgutils.for_range(builder, depth, intp=_i64) as loop:
                b_vector = load_b(builder, _offset(builder, b, builder.mul(b_row, loop.index), b_size))
                for a_start, total in zip(a_rows, sums, strict=True):
                    address = _offset(builder, a_start, loop.index)
                    scalar = builder.load(builder.inttoptr(address, _f32.as_pointer()))
                    fused = _call(builder, "fma", _splat(builder, scalar), b_vector, builder.load(total))
                    builder.store(fused, total)
            for row, total in enumerate(sums):
                address = _offset(builder, c, builder.mul(c_row, _i64(row)))
                _store(builder, builder.fadd(_load(builder, address), builder.load(total)), address)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return tile


@intrinsic
def largest(typing: Any, x: Any, count: Any) -> Any:
    """The largest of `count` floats at address x; `count` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, count = arguments
        best = cgutils.alloca_once(builder, _vector)
        builder.store(_load(builder, x), best)
        with cgutils.for_range(builder, builder.udiv(count, _i64(WIDTH)), intp=_i64) as loop:
            value = _load(builder, _offset(builder, x, builder.mul(loop.index, _i64(WIDTH))))
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", value, old), value, old), best)
        lanes = [builder.extract_element(builder.load(best), _i32(lane)) for lane in range(WIDTH)]
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
        shifts = _splat(builder, shift)
        total = cgutils.alloca_once(builder, _vector)
        builder.store(_constant(0.0), total)
        with cgutils.for_range(builder, builder.udiv(count, _i64(WIDTH)), intp=_i64) as loop:
            address = _offset(builder, x, builder.mul(loop.index, _i64(WIDTH)))
            value = _exp(builder, builder.fsub(_load(builder, address), shifts))
            _store(builder, value, address)
            builder.store(builder.fadd(builder.load(total), value), total)
        result = builder.extract_element(builder.load(total), _i32(0))
        for lane in range(1, WIDTH):
            result = builder.fadd(result, builder.extract_element(builder.load(total), _i32(lane)))
        return result

    return types.float32(types.int64, types.int64, types.float32), generate


def _exp(builder: Any, x: Any) -> Any:
    """exp by range reduction to 2**n · e**r, |r| <= ln 2 / 2, and the degree-5 polynomial of Cephes' expf."""
    enough = builder.fcmp_ordered(">", x, _constant(LOWEST_EXPONENT))
    x = builder.select(enough, x, _constant(0.0))
    n = _call(builder, "floor", _call(builder, "fma", x, _constant(1.4426950408889634), _constant(0.5)))
    r = _call(builder, "fma", n, _constant(-0.693359375), x)
    r = _call(builder, "fma", n, _constant(2.12194440e-4), r)
    y = _constant(1.9875691500e-4)
    for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = _call(builder, "fma", y, r, _constant(coefficient))
    y = builder.fadd(_call(builder, "fma", y, builder.fmul(r, r), r), _constant(1.0))
    exponent = builder.add(builder.fptosi(n, _ivector), ir.Constant(_ivector, [127] * WIDTH))
    power = builder.bitcast(builder.shl(exponent, ir.Constant(_ivector, [23] * WIDTH)), _vector)
    return builder.select(enough, builder.fmul(y, power), _constant(0.0))
