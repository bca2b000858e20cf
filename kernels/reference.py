"""The truth in plain torch: what every kernel must compute, on any device. Slow and short on purpose.

Shapes: T tokens of this step over all requests, R requests, H query heads, G KV heads, D head dim,
N blocks in the pool, B tokens per block, M most blocks of a request. K blocks are stored [D, B]: the tile that scores
are computed from is contiguous.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.attention_batch import AttentionBatch, AttentionSpec
from kernels.noise import noise


def store_kv(k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
    """Write this step's K and V into their blocks, in place."""
    block_T = batch.slots_T // k_NGDB.shape[-1]
    offset_T = batch.slots_T % k_NGDB.shape[-1]
    largest = torch.finfo(k_NGDB.dtype).max
    k_NGDB[block_T, :, :, offset_T] = k_TGD.clamp(-largest, largest).to(k_NGDB.dtype)
    v_NGBD[block_T, :, offset_T, :] = v_TGD.clamp(-largest, largest).to(v_NGBD.dtype)


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


def copy_blocks(source: Tensor, target: Tensor, sources_C: Tensor, targets_C: Tensor) -> None:
    """Block `sources[i]` of one pool → block `targets[i]` of the other; both [blocks, layers, …], no target twice."""
    target[targets_C.to(target.device)] = source[sources_C.to(source.device)].to(target.device)


def rms_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, of size K."""
    return functional.rms_norm(x, weight_K.shape, weight_K, eps)


def add_norm(x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """x += delta in place; returns the norm of the new x."""
    return rms_norm(x_MK.add_(delta_MK), weight_K, eps)


def silu_mul(gate_up_MN: Tensor) -> Tensor:
    """silu of the first half of each row times its second half, [M, N / 2]."""
    gate, up = gate_up_MN.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def rotate(q_THD: Tensor, k_TGD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
    """Rotary position embedding of both, in place: the pair (i, i + D/2) turns by the angle of frequency i."""
    for x_THD in (q_THD, k_TGD):
        first, second = x_THD.chunk(2, dim=-1)
        cos, sin = cos_TF[:, None].to(x_THD.dtype), sin_TF[:, None].to(x_THD.dtype)
        x_THD.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token for each row of float32 logits. Temperature 0: the first of the likeliest.

    Top-k and min-p, then top-p of what they left; of equal logits the first are kept. What is kept shares [0, 1) in
    the order of the vocabulary, and the noise falls somewhere in it.
    """
    vocab = logits_RV.shape[-1]
    greedy_R1 = (temperature_R <= 0)[:, None]
    scale_R1 = torch.where(greedy_R1, 1.0, temperature_R[:, None])
    sorted_RV, order_RV = torch.sort(logits_RV, dim=-1, descending=True, stable=True)
    weight_RV = torch.exp((sorted_RV - sorted_RV[:, :1]) / scale_R1)
    rank_V = torch.arange(vocab, device=logits_RV.device)
    most_R1 = torch.where(top_k_R > 0, top_k_R, vocab)[:, None]
    kept_RV = (rank_V < torch.where(greedy_R1, 1, most_R1)) & (weight_RV >= min_p_R[:, None])
    mass_RV = torch.cumsum(torch.where(kept_RV, weight_RV.double(), 0.0), dim=-1)
    before_RV = functional.pad(mass_RV[:, :-1], (1, 0))
    limited_R1 = (top_p_R < 1)[:, None]
    kept_RV &= ~limited_R1 | (rank_V == 0) | (before_RV < top_p_R.double()[:, None] * mass_RV[:, -1:])
    share_RV = torch.where(kept_RV, weight_RV.double(), 0.0)
    mass_RV = torch.cumsum(torch.zeros_like(share_RV).scatter(-1, order_RV, share_RV), dim=-1)
    target_R1 = noise(seed_R, position_R)[:, None] * mass_RV[:, -1:]
    return torch.searchsorted(mass_RV, target_R1, right=True).squeeze(-1)
