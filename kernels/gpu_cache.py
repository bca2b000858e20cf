"""Writes to the paged KV pool in Triton: this step's K and V into their slots, and whole blocks from pool to pool.

Shapes: T tokens, G KV heads, D head dim, N blocks of B tokens; C copies, L layers, W words of a block in one layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_batch import AttentionBatch

WORDS = 2048  # of a block, for one program


@triton.jit
def store_kernel(  # type: ignore[no-untyped-def]
    k_TGD, v_TGD, k_NGDB, v_NGBD, slots_T, k_row, v_row, largest,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program per token and KV head. Numbers beyond what the pool's type holds become the largest that it does."""
    token, group, groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d_D = tl.arange(0, DIM_PADDED)
    inside_D = d_D < DIM
    slot = tl.load(slots_T + token).to(tl.int64)
    base = (slot // BLOCK * groups + group) * DIM * BLOCK
    offset = slot % BLOCK
    k_D = tl.load(k_TGD + token * k_row + group * DIM + d_D, mask=inside_D, other=0.0).to(tl.float32)
    v_D = tl.load(v_TGD + token * v_row + group * DIM + d_D, mask=inside_D, other=0.0).to(tl.float32)
    k_D = tl.minimum(tl.maximum(k_D, -largest), largest).to(k_NGDB.dtype.element_ty)
    v_D = tl.minimum(tl.maximum(v_D, -largest), largest).to(v_NGBD.dtype.element_ty)
    tl.store(k_NGDB + base + d_D * BLOCK + offset, k_D, mask=inside_D)
    tl.store(v_NGBD + base + offset * DIM + d_D, v_D, mask=inside_D)


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    source, target, sources_C, targets_C, size, source_block, source_layer, target_block, target_layer,
    WORDS: tl.constexpr,
):  # fmt: skip
    """A program per copy, layer and stretch of a block."""
    copy, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    word_W = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    read = tl.load(sources_C + copy).to(tl.int64) * source_block + layer * source_layer
    write = tl.load(targets_C + copy).to(tl.int64) * target_block + layer * target_layer
    value_W = tl.load(source + read + word_W, mask=word_W < size)
    tl.store(target + write + word_W, value_W, mask=word_W < size)


def store_kv(k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
    """Write this step's K and V into their blocks, in place. Tokens may lie apart, their heads follow each other."""
    tokens, groups, dim = k_TGD.shape
    assert all(x.stride(1) == dim and x.stride(2) == 1 for x in (k_TGD, v_TGD)), "heads must follow each other"
    store_kernel[(tokens, groups)](
        k_TGD, v_TGD, k_NGDB, v_NGBD, batch.slots_T, k_TGD.stride(0), v_TGD.stride(0), torch.finfo(k_NGDB.dtype).max,
        DIM=dim, DIM_PADDED=triton.next_power_of_2(dim), BLOCK=k_NGDB.shape[3], num_warps=1,
    )  # fmt: skip


def copy_blocks(source: Tensor, target: Tensor, sources_C: Tensor, targets_C: Tensor) -> None:
    """Block `sources[i]` of one pool → block `targets[i]` of the other, all layers, in one launch; no target twice.

    Each pool is a view [blocks, layers, …] of whatever layout, with the numbers of a block in one layer side by side;
    one of them may lie in pinned host memory, which a GPU reads and writes where it is.
    """
    source, target = (_words(pool) for pool in (source, target))
    layers, size = source.shape[1:]
    copy_kernel[(len(sources_C), layers, triton.cdiv(size, WORDS))](
        source, target, sources_C, targets_C, size,
        source.stride(0), source.stride(1), target.stride(0), target.stride(1), WORDS=WORDS, num_warps=4,
    )  # fmt: skip


def _words(pool: Tensor) -> Tensor:
    """As int32 [blocks, layers, W]: a copy need not know what it copies."""
    return pool.flatten(2).view(torch.int32)
