"""The fixed-tile linear for GPUs, in Triton's interpreter, and compiled ahead of time for the GPUs it is made for."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
SIZES = [(1, 64, 64), (2, 100, 70), (16, 33, 64), (17, 576, 96), (37, 130, 200)]


@pytest.fixture
def matmul(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as it is where no GPU is: Triton decides at import."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop("kernels.matmul", None)
    yield importlib.import_module("kernels.matmul")
    sys.modules.pop("kernels.matmul", None)


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
def test_it_is_x_times_the_weights_plus_bias(
    matmul: Any, size: tuple[int, int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    x, weight, bias = operands(*size, dtype)
    expected = x.double() @ weight.double().T + (bias.double() if with_bias else 0.0)
    given = matmul.linear(x, weight, bias if with_bias else None)
    assert given.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(given.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 5, 15, 16, 17, 33])
def test_a_row_is_the_same_bit_for_bit_among_any_number(matmul: Any, rows: int) -> None:
    """At the same place: numpy, which computes a tile here, treats the rows of one differently; tensor cores do not."""
    x, weight, bias = operands(37, 130, 70, torch.float32)
    assert torch.equal(matmul.linear(x[:rows], weight, bias), matmul.linear(x, weight, bias)[:rows])


COMPILE = """
import itertools, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import matmul

options = {"num_warps": matmul.WARPS, "num_stages": matmul.STAGES}
sizes = {name: getattr(matmul, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
for element, has_bias, capability in itertools.product(("fp16", "bf16", "fp32"), (False, True), (80, 90)):
    constants = {"HAS_BIAS": has_bias, **sizes}
    pointers = dict.fromkeys(("x_MK", "weight_NK", "bias_N", "out_MN"), f"*{element}")
    numbers = dict.fromkeys(("rows", "outputs", "inputs"), "i32")
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=matmul.linear_kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"] and made.metadata.shared <= 163 * 1024
    assert element == "fp32" or "mma.sync" in made.asm["ptx"], "no tensor cores"
    print(element, has_bias, capability, made.metadata.shared)
"""


def test_it_compiles_for_the_gpus_it_is_made_for() -> None:
    """In a process of its own: where the interpreter was, nothing compiles any more."""
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 12
