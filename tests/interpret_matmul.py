"""The fixed-tile linear for GPUs in Triton's interpreter. Run by test_gpu_kernels.py in a process of its own."""

import pytest
import torch

from kernels import matmul

SIZES = [(1, 64, 64), (2, 100, 70), (16, 33, 64), (17, 576, 96), (37, 130, 200)]


def operands(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(size, inputs, generator=generator).to(dtype) for size in (rows, outputs))
    return x, weight, torch.randn(outputs, generator=generator).to(dtype)


# bfloat16 is left to the compiler: the interpreter multiplies its bits as if they were integers.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_is_x_times_the_weights_plus_bias(size: tuple[int, int, int], dtype: torch.dtype, with_bias: bool) -> None:
    x, weight, bias = operands(*size, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    given = matmul.linear(x, weight, bias if with_bias else None)
    assert given.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(given.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 5, 15, 16, 17, 33])
def test_a_row_is_the_same_bit_for_bit_among_any_number(rows: int) -> None:
    """At the same place: numpy, which computes a tile here, treats the rows of one differently; tensor cores do not."""
    x, weight, bias = operands(37, 130, 70, torch.float32)
    assert torch.equal(matmul.linear(x[:rows], weight, bias), matmul.linear(x, weight, bias)[:rows])
