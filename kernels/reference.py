"""The truth in plain torch: what every kernel must compute, on any device. Slow and short on purpose.

Shapes: T tokens of this step over all requests, R requests, H query heads, G KV heads, D head dim,
N blocks in the pool, B tokens per block, M most blocks of a request. K blocks are stored [D, B]: the tile that scores
are computed from is contiguous.
"""

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, AttentionSpec


def store_kv(k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
    """Write this step's K and V into their blocks, in place."""
    block_T = batch.slots_T // k_NGDB.shape[-1]
    offset_T = batch.slots_T % k_NGDB.shape[-1]
    k_NGDB[block_T, :, :, offset_T] = k_TGD.to(k_NGDB.dtype)
    v_NGBD[block_T, :, offset_T, :] = v_TGD.to(v_NGBD.dtype)


def paged_attention(
    q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
) -> Tensor:
    """Causal attention of each chunk over its request's whole context; returns [T, H, D]."""
    out_THD = torch.empty_like(q_THD)
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        length = batch.context_lens[row]
        blocks_M = batch.block_tables_RM[row, : -(-length // k_NGDB.shape[-1])].long()
        k_GDS = k_NGDB[blocks_M].permute(1, 2, 0, 3).flatten(2)[:, :, :length]
        v_GSD = v_NGBD[blocks_M].transpose(0, 1).flatten(1, 2)[:, :length]
        out_THD[start:end] = _attend(q_THD[start:end], k_GDS, v_GSD, spec)
    return out_THD


def _attend(q_QHD: Tensor, k_GDS: Tensor, v_GSD: Tensor, spec: AttentionSpec) -> Tensor:
    queries, heads, dim = q_QHD.shape
    groups, _, context = k_GDS.shape
    q_GXD = q_QHD.view(queries, groups, heads // groups, dim).transpose(0, 1).flatten(1, 2)
    score_GXS = (q_GXD.float() @ k_GDS.float()) * spec.scale
    if spec.soft_cap:
        score_GXS = spec.soft_cap * torch.tanh(score_GXS / spec.soft_cap)
    position_S = torch.arange(context, device=q_QHD.device)
    query_X = position_S[context - queries :].repeat_interleave(heads // groups)[:, None]
    hidden_XS = position_S > query_X
    if spec.window:
        hidden_XS |= position_S <= query_X - spec.window
    weight_GXS = torch.softmax(score_GXS.masked_fill(hidden_XS, float("-inf")), dim=-1)
    out_GXD = (weight_GXS @ v_GSD.float()).to(q_QHD.dtype)
    return out_GXD.view(groups, queries, heads // groups, dim).transpose(0, 1).reshape(queries, heads, dim)
