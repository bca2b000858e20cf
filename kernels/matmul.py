"""A linear for GPUs whose result for a row never depends on the rows beside it: one tile shape, one order of sums.

Shapes: M rows, K inputs, N outputs. Libraries choose tiles, and how K is split, by M: that is what makes them fast, and
equal requests differ in the last bit. Here each output is the sum over K in steps of BLOCK_K, from 0, in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M, BLOCK_N, BLOCK_K = 16, 64, 64  # 16 rows are the least that tensor cores take: a decode wastes few of them
WARPS, STAGES = 4, 4


@triton.jit
def linear_kernel(  # type: ignore[no-untyped-def] # Triton reads annotations as types of its own
    x_MK,
    weight_NK,
    bias_N,
    out_MN,
    rows,
    outputs,
    inputs,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per tile of the output. All matrices are contiguous."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_K):
        k_K = start + tl.arange(0, BLOCK_K)
        x_tile = tl.load(
            x_MK + row_M[:, None] * inputs + k_K[None, :],
            mask=(row_M[:, None] < rows) & (k_K[None, :] < inputs),
            other=0.0,
        )
        weight_tile = tl.load(
            weight_NK + column_N[None, :] * inputs + k_K[:, None],
            mask=(column_N[None, :] < outputs) & (k_K[:, None] < inputs),
            other=0.0,
        )
        sums_MN = tl.dot(x_tile, weight_tile, sums_MN, input_precision="ieee")
    if HAS_BIAS:
        bias_tile = tl.load(bias_N + column_N, mask=column_N < outputs, other=0.0)
        sums_MN += bias_tile[None, :].to(tl.float32)
    tl.store(
        out_MN + row_M[:, None] * outputs + column_N[None, :],
        sums_MN.to(out_MN.dtype.element_ty),
        mask=(row_M[:, None] < rows) & (column_N[None, :] < outputs),
    )


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · Wᵀ + bias, [M, N], in x's type; sums in float32."""
    rows, inputs = x_MK.shape
    outputs = weight_NK.shape[0]
    out_MN = torch.empty(rows, outputs, dtype=x_MK.dtype, device=x_MK.device)
    linear_kernel[(triton.cdiv(rows, BLOCK_M), triton.cdiv(outputs, BLOCK_N))](
        x_MK.contiguous(),
        weight_NK,
        weight_NK if bias_N is None else bias_N,
        out_MN,
        rows,
        outputs,
        inputs,
        HAS_BIAS=bias_N is not None,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out_MN
