"""What lies between linears and attention, in Triton: norm, rotation, activation. One pass over memory each.

Shapes: M rows of size K; T tokens, H query heads, G KV heads, D head dim, F = D / 2 frequencies. Arithmetic is float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # of the activation, for one program


@triton.jit
def norm_kernel(  # type: ignore[no-untyped-def]
    x_MK, delta_MK, weight_K, out_MK, size, eps, SIZE_PADDED: tl.constexpr, ADDS: tl.constexpr
):
    """A program per row: x += delta if it ADDS, then out = x / sqrt(mean(x²) + eps) · weight."""
    start = tl.program_id(0).to(tl.int64) * size
    k_K = tl.arange(0, SIZE_PADDED)
    inside_K = k_K < size
    value_K = tl.load(x_MK + start + k_K, mask=inside_K, other=0.0).to(tl.float32)
    if ADDS:
        value_K += tl.load(delta_MK + start + k_K, mask=inside_K, other=0.0).to(tl.float32)
        sum_K = value_K.to(x_MK.dtype.element_ty)
        tl.store(x_MK + start + k_K, sum_K, mask=inside_K)
        value_K = sum_K.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value_K * value_K, axis=0) / size + eps)
    gain_K = tl.load(weight_K + k_K, mask=inside_K, other=0.0).to(tl.float32)
    tl.store(out_MK + start + k_K, (value_K * scale * gain_K).to(out_MK.dtype.element_ty), mask=inside_K)


@triton.jit
def rotate_kernel(  # type: ignore[no-untyped-def]
    q_THD, k_TGD, cos_TF, sin_TF, q_row, k_row, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr
):
    """A program per token and head, those of K behind those of Q. Pair (i, i + D/2) turns by the angle of i."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_F = tl.arange(0, HALF_PADDED)
    inside_F = i_F < HALF
    cos_F = tl.load(cos_TF + token * HALF + i_F, mask=inside_F, other=0.0)
    sin_F = tl.load(sin_TF + token * HALF + i_F, mask=inside_F, other=0.0)
    if head < HEADS:
        place_F = q_THD + token * q_row + head * 2 * HALF + i_F
    else:
        place_F = k_TGD + token * k_row + (head - HEADS) * 2 * HALF + i_F
    first_F = tl.load(place_F, mask=inside_F, other=0.0).to(tl.float32)
    second_F = tl.load(place_F + HALF, mask=inside_F, other=0.0).to(tl.float32)
    kind = place_F.dtype.element_ty
    tl.store(place_F, (first_F * cos_F - second_F * sin_F).to(kind), mask=inside_F)
    tl.store(place_F + HALF, (second_F * cos_F + first_F * sin_F).to(kind), mask=inside_F)


@triton.jit
def silu_mul_kernel(gate_up_MN, out_MK, size, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program per row and stretch of columns: out = gate / (1 + exp(-gate)) · up."""
    row = tl.program_id(0).to(tl.int64)
    k_K = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside_K = k_K < size
    gate_K = tl.load(gate_up_MN + row * 2 * size + k_K, mask=inside_K, other=0.0).to(tl.float32)
    up_K = tl.load(gate_up_MN + row * 2 * size + size + k_K, mask=inside_K, other=0.0).to(tl.float32)
    silu_K = gate_K / (1.0 + tl.exp(-gate_K))
    tl.store(out_MK + row * size + k_K, (silu_K * up_K).to(out_MK.dtype.element_ty), mask=inside_K)


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, of size K, in x's type."""
    x = x.contiguous()
    out, size = torch.empty_like(x), weight_K.shape[0]
    norm_kernel[(x.numel() // size,)](
        x, x, weight_K, out, size, eps, SIZE_PADDED=triton.next_power_of_2(size), ADDS=False, num_warps=warps(size)
    )
    return out


def add_norm(x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x += delta in place; returns the norm of the new x. Both contiguous."""
    out_MK, size = torch.empty_like(x_MK), weight_K.shape[0]
    norm_kernel[(x_MK.shape[0],)](
        x_MK, delta_MK, weight_K, out_MK, size, eps,
        SIZE_PADDED=triton.next_power_of_2(size), ADDS=True, num_warps=warps(size),
    )  # fmt: skip
    return out_MK


def rotate(q_THD: Tensor, k_TGD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
    """Rotary position embedding of both, in place. Tokens may lie apart, their heads follow each other.

    Scaled variants differ in the angles alone, which come as float32 tables.
    """
    tokens, heads, dim = q_THD.shape
    assert all(x.stride(1) == dim and x.stride(2) == 1 for x in (q_THD, k_TGD)), "heads must follow each other"
    rotate_kernel[(tokens, heads + k_TGD.shape[1])](
        q_THD, k_TGD, cos_TF, sin_TF, q_THD.stride(0), k_TGD.stride(0),
        HEADS=heads, HALF=dim // 2, HALF_PADDED=triton.next_power_of_2(dim // 2), num_warps=1,
    )  # fmt: skip


def silu_mul(gate_up_MN: Tensor) -> Tensor:
    """silu of the first half of each row times its second half, [M, N / 2]."""
    rows, both = gate_up_MN.shape
    size = both // 2
    out_MK = torch.empty(rows, size, dtype=gate_up_MN.dtype, device=gate_up_MN.device)
    silu_mul_kernel[(rows, triton.cdiv(size, COLUMNS))](gate_up_MN, out_MK, size, COLUMNS=COLUMNS, num_warps=4)
    return out_MK


def warps(size: int) -> int:
    """Threads for a row: eight numbers of it for each."""
    return min(16, max(1, int(triton.next_power_of_2(size)) // 256))
