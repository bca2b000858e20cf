"""Paged attention for GPUs in Triton: one launch for a step's chunks and decodes, block tables walked in place.

A row's context is cut into splits of fixed length from position 0, and a split into tiles; splits are folded from the
first to the last. Whether they were computed by one program or by many is no difference to any bit.

Shapes as in `reference.py`; X rows of a program: the query heads of some neighbouring tokens that share a KV head; S
positions of a tile; P splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from kernels.attention_batch import AttentionBatch, AttentionSpec

LOWEST = tl.constexpr(-1.0e30)  # in place of minus infinity, whose difference with itself is not a number
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How the work is cut. `rows` of a program if some request has more than one token, else `decode_rows`.

    Splits run in programs of their own while there are fewer than `enough_programs` without, and while their partial
    results fit in `partial_bytes`. The result depends on `tile` and `split`, and on `rows` where hardware does.
    """

    rows: int = 64
    decode_rows: int = 16
    tile: int = 64
    split: int = 256
    enough_programs: int = 264  # two for each processor of an H100
    partial_bytes: int = 1 << 28
    warps: int = 4
    stages: int = 3


DEFAULT = Tuning()
INVARIANT = Tuning(rows=16)


@triton.jit
def _request_of(starts_R1, requests, tile, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Request r owns the tiles from `starts[r] // QUERIES + r` on: never too few, and found by halving."""
    low, high = 0, requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_R1 + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _fold(sum_X, largest_X, blend_XD, split_sum_X, split_largest_X, split_blend_XD):  # type: ignore[no-untyped-def]
    """One more split; roundings spelled out, so that every kernel makes the same ones."""
    new_X = tl.maximum(largest_X, split_largest_X)
    old_weight_X, weight_X = tl.exp2(largest_X - new_X), tl.exp2(split_largest_X - new_X)
    sum_X = tl.fma(sum_X, old_weight_X, split_sum_X * weight_X)
    blend_XD = tl.fma(blend_XD, old_weight_X[:, None], split_blend_XD * weight_X[:, None])
    return sum_X, new_X, blend_XD


@triton.jit
def _attend_split(  # type: ignore[no-untyped-def]
    q_XD, position_X, k_NGDB, v_NGBD, table_M, group, first, last, scale, window, soft_cap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Online softmax (Milakov and Gimelshein, 2018) over positions first … last, from the first tile on."""
    d_D = tl.arange(0, DIM_PADDED)
    sum_X = tl.zeros_like(position_X).to(tl.float32)
    largest_X = sum_X + LOWEST
    blend_XD = tl.zeros([position_X.shape[0], DIM_PADDED], dtype=tl.float32)
    for start in range(first, last + 1, TILE):
        position_S = start + tl.arange(0, TILE)
        inside_S = position_S <= last
        block_S = tl.load(table_M + position_S // BLOCK, mask=inside_S, other=0).to(tl.int64)
        base_S = (block_S * GROUPS + group) * DIM * BLOCK
        k_DS = tl.load(
            k_NGDB + base_S[None, :] + d_D[:, None] * BLOCK + (position_S % BLOCK)[None, :],
            mask=inside_S[None, :] & (d_D[:, None] < DIM),
            other=0.0,
        ).to(q_XD.dtype)
        v_SD = tl.load(
            v_NGBD + base_S[:, None] + (position_S % BLOCK)[:, None] * DIM + d_D[None, :],
            mask=inside_S[:, None] & (d_D[None, :] < DIM),
            other=0.0,
        ).to(q_XD.dtype)
        if WIDEN:  # the interpreter multiplies the bits of bfloat16 as integers
            score_XS = tl.dot(q_XD.to(tl.float32), k_DS.to(tl.float32), input_precision="ieee") * scale
        else:
            score_XS = tl.dot(q_XD, k_DS, input_precision="ieee") * scale
        if CAPPED:  # tanh x = 1 - 2 / (exp 2x + 1)
            score_XS = soft_cap - 2.0 * soft_cap / (tl.exp2(score_XS * (2.0 * LOG2_E / soft_cap)) + 1.0)
        visible_XS = position_S[None, :] <= position_X[:, None]
        if WINDOWED:
            visible_XS = visible_XS & (position_S[None, :] > position_X[:, None] - window)
        score_XS = tl.where(visible_XS, score_XS * LOG2_E, float("-inf"))
        new_X = tl.maximum(largest_X, tl.max(score_XS, axis=1))
        weight_XS = tl.exp2(score_XS - new_X[:, None])
        old_weight_X = tl.exp2(largest_X - new_X)
        sum_X = tl.fma(sum_X, old_weight_X, tl.sum(weight_XS, axis=1))
        blend_XD = blend_XD * old_weight_X[:, None]
        if WIDEN:
            weight_XS = weight_XS.to(q_XD.dtype).to(tl.float32)
            blend_XD = tl.dot(weight_XS, v_SD.to(tl.float32), blend_XD, input_precision="ieee")
        else:
            blend_XD = tl.dot(weight_XS.to(q_XD.dtype), v_SD, blend_XD, input_precision="ieee")
        largest_X = new_X
    return sum_X, largest_X, blend_XD


@triton.jit
def _fold_splits(  # type: ignore[no-untyped-def]
    q_XD, position_X, k_NGDB, v_NGBD, table_M, group, oldest, last, first_split, end_split, scale, window, soft_cap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Splits first_split … end_split - 1, one after the other."""
    sum_X = tl.zeros_like(position_X).to(tl.float32)
    largest_X = sum_X + LOWEST
    blend_XD = tl.zeros([position_X.shape[0], DIM_PADDED], dtype=tl.float32)
    for split in range(first_split, end_split):
        first = split * SPLIT
        if WINDOWED:
            first = tl.maximum(first, oldest // TILE * TILE)
        one_sum_X, one_largest_X, one_blend_XD = _attend_split(
            q_XD, position_X, k_NGDB, v_NGBD, table_M, group,
            first, tl.minimum(last, split * SPLIT + SPLIT - 1), scale, window, soft_cap,
            GROUPS, DIM, DIM_PADDED, BLOCK, TILE, WINDOWED, CAPPED, WIDEN,
        )  # fmt: skip
        sum_X, largest_X, blend_XD = _fold(sum_X, largest_X, blend_XD, one_sum_X, one_largest_X, one_blend_XD)
    return sum_X, largest_X, blend_XD


@triton.jit
def attention_kernel(  # type: ignore[no-untyped-def]
    q_THD, k_NGDB, v_NGBD, starts_R1, contexts_R, tables_RM, out_THD, blend_RGPXD, sum_RGPX, largest_RGPX,
    requests, columns, q_row, splits, scale, window, soft_cap,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, SPREAD: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """A program per tile of tokens and KV head; with SPREAD also per split, for requests that are one tile."""
    SHARED: tl.constexpr = HEADS // GROUPS
    QUERIES: tl.constexpr = ROWS // SHARED
    tile, group, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = _request_of(starts_R1, requests, tile, QUERIES)
    begin, end = tl.load(starts_R1 + request), tl.load(starts_R1 + request + 1)
    token = begin + (tile - begin // QUERIES - request) * QUERIES
    if token >= end:
        return
    before = tl.load(contexts_R + request) - end  # a token's position less its place in the step
    last = before + tl.minimum(token + QUERIES, end) - 1
    oldest = tl.maximum(before + token - window + 1, 0) if WINDOWED else 0
    first_split, end_split = oldest // SPLIT, last // SPLIT + 1
    spread = SPREAD & (end - begin <= QUERIES) & (end_split - first_split > 1)
    if spread:
        first_split, end_split = tl.maximum(first_split, lane), tl.minimum(end_split, lane + 1)
    if (first_split >= end_split) | ((lane > 0) & (spread == 0)):
        return
    row_X, d_D = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    token_X, head_X = token + row_X // SHARED, group * SHARED + row_X % SHARED
    used_XD = ((row_X < QUERIES * SHARED) & (token_X < end))[:, None] & (d_D[None, :] < DIM)
    q_XD = tl.load(q_THD + (token_X * q_row + head_X * DIM)[:, None] + d_D[None, :], mask=used_XD, other=0.0)
    sum_X, largest_X, blend_XD = _fold_splits(
        q_XD, tl.minimum(before + token_X, last), k_NGDB, v_NGBD, tables_RM + request * columns, group,
        oldest, last, first_split, end_split, scale, window, soft_cap,
        GROUPS, DIM, DIM_PADDED, BLOCK, TILE, SPLIT, WINDOWED, CAPPED, WIDEN,
    )  # fmt: skip
    if spread:
        place_X = ((request * GROUPS + group) * splits + lane) * ROWS + row_X
        tl.store(sum_RGPX + place_X, sum_X)
        tl.store(largest_RGPX + place_X, largest_X)
        tl.store(blend_RGPXD + place_X[:, None] * DIM_PADDED + d_D[None, :], blend_XD)
    else:
        out_XD = (blend_XD / sum_X[:, None]).to(out_THD.dtype.element_ty)
        tl.store(out_THD + (token_X * HEADS + head_X)[:, None] * DIM + d_D[None, :], out_XD, mask=used_XD)


@triton.jit
def fold_kernel(  # type: ignore[no-untyped-def]
    starts_R1, contexts_R, out_THD, blend_RGPXD, sum_RGPX, largest_RGPX, splits, window,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """A program per request and KV head: folds what other programs computed of one tile."""
    SHARED: tl.constexpr = HEADS // GROUPS
    QUERIES: tl.constexpr = ROWS // SHARED
    request, group = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(starts_R1 + request), tl.load(starts_R1 + request + 1)
    before = tl.load(contexts_R + request) - end
    oldest = tl.maximum(before + begin - window + 1, 0) if WINDOWED else 0
    first_split, end_split = oldest // SPLIT, (before + end - 1) // SPLIT + 1
    if (end - begin > QUERIES) | (end_split - first_split <= 1):
        return
    row_X, d_D = tl.arange(0, ROWS), tl.arange(0, DIM_PADDED)
    sum_X = tl.zeros([ROWS], dtype=tl.float32)
    largest_X = sum_X + LOWEST
    blend_XD = tl.zeros([ROWS, DIM_PADDED], dtype=tl.float32)
    for split in range(first_split, end_split):
        place_X = ((request * GROUPS + group) * splits + split) * ROWS + row_X
        one_blend_XD = tl.load(blend_RGPXD + place_X[:, None] * DIM_PADDED + d_D[None, :])
        sum_X, largest_X, blend_XD = _fold(
            sum_X, largest_X, blend_XD, tl.load(sum_RGPX + place_X), tl.load(largest_RGPX + place_X), one_blend_XD
        )
    token_X = begin + row_X // SHARED
    used_XD = ((row_X < QUERIES * SHARED) & (token_X < end))[:, None] & (d_D[None, :] < DIM)
    place_X = token_X * HEADS + group * SHARED + row_X % SHARED
    out_XD = (blend_XD / sum_X[:, None]).to(out_THD.dtype.element_ty)
    tl.store(out_THD + place_X[:, None] * DIM + d_D[None, :], out_XD, mask=used_XD)


def stages(element: str, tuning: Tuning) -> int:
    """How many tiles are on their way at once; float32 ones are twice as large."""
    return 1 if element in ("fp32", "torch.float32") else tuning.stages


def paged_attention(
    q_THD: Tensor,
    k_NGDB: Tensor,
    v_NGBD: Tensor,
    batch: AttentionBatch,
    spec: AttentionSpec,
    tuning: Tuning = DEFAULT,
) -> Tensor:
    """Causal attention of each chunk over its request's whole context; returns [T, H, D] in q's type.

    q's tokens may lie apart, their heads follow each other. K and V may be of any float type, 8 bits included.
    """
    tokens, heads, dim = q_THD.shape
    groups, size, requests = k_NGDB.shape[1], k_NGDB.shape[3], len(batch.context_lens)
    assert q_THD.stride(1) == dim and q_THD.stride(2) == 1, "a token's heads must follow each other"
    rows = max(tuning.decode_rows if tokens == requests else tuning.rows, triton.next_power_of_2(heads // groups))
    tiles = tokens // (rows // (heads // groups)) + requests
    dim_padded, splits = max(16, triton.next_power_of_2(dim)), -(-max(batch.context_lens) // tuning.split)
    partial = requests * groups * splits * rows
    spread = splits > 1 and tiles * groups < tuning.enough_programs and 4 * partial * dim_padded <= tuning.partial_bytes
    out_THD = torch.empty(tokens, heads, dim, dtype=q_THD.dtype, device=q_THD.device)
    scratch = _scratch(partial if spread else 0, dim_padded, q_THD.device)
    sizes = {
        "HEADS": heads,
        "GROUPS": groups,
        "DIM": dim,
        "DIM_PADDED": dim_padded,
        "ROWS": rows,
        "SPLIT": tuning.split,
    }
    where = batch.query_starts_R1, batch.context_lens_R
    attention_kernel[(tiles, groups, splits if spread else 1)](
        q_THD, k_NGDB, v_NGBD, *where, batch.block_tables_RM, out_THD, *scratch,
        requests, batch.block_tables_RM.shape[1], q_THD.stride(0), splits, spec.scale, spec.window, spec.soft_cap,
        BLOCK=size, TILE=tuning.tile, SPREAD=spread, WINDOWED=spec.window > 0, CAPPED=spec.soft_cap > 0,
        WIDEN=isinstance(attention_kernel, InterpretedFunction),
        num_warps=tuning.warps, num_stages=stages(str(q_THD.dtype), tuning), **sizes,
    )  # fmt: skip
    if spread:
        fold_kernel[(requests, groups)](
            *where, out_THD, *scratch, splits, spec.window, WINDOWED=spec.window > 0, num_warps=tuning.warps, **sizes
        )
    return out_THD


def _scratch(rows: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Blends, sums and largest scores of splits."""
    blend, sums, largest = (
        torch.empty(max(1, size), dtype=torch.float32, device=device) for size in (rows * dim, rows, rows)
    )
    return blend, sums, largest
