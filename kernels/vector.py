"""Small words of LLVM IR that the register tiles are written in: 16-wide float32 vectors, addresses as integers."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

WIDTH = 16

f32 = ir.FloatType()
i32 = ir.IntType(32)
i64 = ir.IntType(64)
vector = ir.VectorType(f32, WIDTH)
half_vector = ir.VectorType(ir.HalfType(), WIDTH)
ivector = ir.VectorType(i32, WIDTH)


def splat(builder: Any, scalar: Any, target: Any = vector) -> Any:
    undefined = ir.Constant(target, ir.Undefined)
    first = builder.insert_element(undefined, scalar, i32(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(i32, target.count), [0] * target.count))


def constant(value: float) -> Any:
    return ir.Constant(vector, [value] * WIDTH)


def call(builder: Any, name: str, *operands: Any) -> Any:
    """A vector operation of LLVM's own, e.g. fma: one rounding, on every target the same."""
    signature = ir.FunctionType(vector, (vector,) * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.v{WIDTH}f32")
    return builder.call(function, operands)


def load_as(builder: Any, address: Any, kind: Any, align: int) -> Any:
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def load(builder: Any, address: Any) -> Any:
    return load_as(builder, address, vector, 4)


def load_half(builder: Any, address: Any) -> Any:
    """Sixteen float16 as float32: exact."""
    return builder.fpext(load_as(builder, address, half_vector, 2), vector)


def store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, vector.as_pointer())).align = 4


def offset(builder: Any, address: Any, count: Any, size: int = 4) -> Any:
    return builder.add(address, builder.mul(count, i64(size)))


def sum_lanes(builder: Any, total: Any) -> Any:
    """The 16 lanes of a vector, added from the first to the last."""
    result = builder.extract_element(total, i32(0))
    for lane in range(1, WIDTH):
        result = builder.fadd(result, builder.extract_element(total, i32(lane)))
    return result
