"""Sampling for GPUs in Triton: one program per row, no sorting, and nothing that the host has to wait for.

Top-k, min-p and top-p each keep the likeliest tokens down to some logit, which is found by halving the range of all
float32 numbers; of tokens with equal logits the first are kept. What is kept, in the order of the vocabulary, shares
the interval [0, 1) that the noise falls in. Shapes: R rows, V vocabulary, B tokens at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
LEAST, MOST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)


@triton.jit
def _mix(value):  # type: ignore[no-untyped-def]
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    value = value + GOLDEN_GAMMA
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _noise(seed, position):  # type: ignore[no-untyped-def]
    """A number in [0, 1) that depends on seed and position alone: the top 53 bits of a hash."""
    mixed = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * GOLDEN_GAMMA)
    return (mixed >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _key(logit):  # type: ignore[no-untyped-def]
    """An int32 in the order of float32."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # there is one zero
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _block(logits_V, start, vocab, largest, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rank keys (int32 in the order of the logits) and weights (1 for the likeliest) of some tokens."""
    token_B = start + tl.arange(0, BLOCK)
    logit_B = tl.load(logits_V + token_B, mask=token_B < vocab, other=float("-inf"))
    key_B = _key(logit_B)
    weight_B = tl.where(token_B < vocab, tl.exp((logit_B - largest) / temperature), 0.0)
    return token_B, key_B, weight_B


@triton.jit
def _above(logits_V, vocab, largest, temperature, least_key, least_weight, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many tokens have at least this key and this weight, and their weights' sum."""
    count, mass = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        token_B, key_B, weight_B = _block(logits_V, start, vocab, largest, temperature, BLOCK)
        kept_B = (key_B >= least_key) & (weight_B >= least_weight) & (token_B < vocab)
        count += tl.sum(kept_B.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(kept_B, weight_B.to(tl.float64), 0.0), axis=0)
    return count, mass


@triton.jit
def _key_of_count(logits_V, vocab, largest, temperature, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The highest key that leaves this many tokens."""
    low, high = tl.full([], LEAST, tl.int64), tl.full([], MOST, tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        count, _mass = _above(logits_V, vocab, largest, temperature, middle, 0.0, BLOCK)
        if count >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _key_of_mass(  # type: ignore[no-untyped-def]
    logits_V, vocab, largest, temperature, least_key, least_weight, wanted, BLOCK: tl.constexpr
):
    """The highest key, from `least_key` on, that leaves tokens of this mass."""
    low, high = least_key, tl.full([], MOST, tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        _count, mass = _above(logits_V, vocab, largest, temperature, middle, least_weight, BLOCK)
        if mass >= wanted:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _nucleus(  # type: ignore[no-untyped-def]
    logits_V, vocab, largest, temperature, least_key, least_weight, ties, top_p, BLOCK: tl.constexpr
):
    """The key down to which top-p keeps of what is left, and how many of the tokens that have it."""
    above_count, above = _above(logits_V, vocab, largest, temperature, least_key + 1, least_weight, BLOCK)
    count, mass = _above(logits_V, vocab, largest, temperature, least_key, least_weight, BLOCK)
    tied = tl.maximum(count - above_count, 1)
    wanted = top_p * (above + (mass - above) * (tl.minimum(ties, tied).to(tl.float64) / tied.to(tl.float64)))
    key = _key_of_mass(logits_V, vocab, largest, temperature, least_key, least_weight, wanted, BLOCK)
    above_count, above = _above(logits_V, vocab, largest, temperature, key + 1, least_weight, BLOCK)
    count, mass = _above(logits_V, vocab, largest, temperature, key, least_weight, BLOCK)
    each = (mass - above) / tl.maximum(count - above_count, 1).to(tl.float64)
    needed = tl.maximum(tl.ceil((wanted - above) / tl.where(each > 0.0, each, 1.0)).to(tl.int32), 1)
    return key, tl.where(key > least_key, needed, tl.minimum(ties, needed))


@triton.jit
def _largest(logits_V, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    largest = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        token_B = start + tl.arange(0, BLOCK)
        logit_B = tl.load(logits_V + token_B, mask=token_B < vocab, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(logit_B, axis=0))
    return largest


@triton.jit
def sample_kernel(  # type: ignore[no-untyped-def]
    logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R, token_R, vocab, BLOCK: tl.constexpr
):
    """Everything that is kept has at least `least_key` and `least_weight`; of the tokens at `least_key`, `ties`."""
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_RV + row * vocab
    largest = _largest(logits_V, vocab, BLOCK)
    temperature = tl.load(temperature_R + row)
    greedy = temperature <= 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    least_weight = tl.load(min_p_R + row)
    least_key = tl.where(greedy, _key(largest).to(tl.int64), tl.full([], LEAST, tl.int64))
    ties = tl.where(greedy, 1, vocab)
    top_k, top_p = tl.load(top_k_R + row), tl.load(top_p_R + row)
    if (top_k > 0) & (top_k < vocab) & (greedy == 0):
        least_key = _key_of_count(logits_V, vocab, largest, temperature, top_k, BLOCK)
        above_count, _mass = _above(logits_V, vocab, largest, temperature, least_key + 1, 0.0, BLOCK)
        ties = (top_k - above_count).to(tl.int32)
    if (top_p < 1.0) & (greedy == 0):
        least_key, ties = _nucleus(
            logits_V, vocab, largest, temperature, least_key, least_weight, ties, top_p, BLOCK
        )  # fmt: skip
    noise = _noise(tl.load(seed_R + row), tl.load(position_R + row))
    token = _choose(logits_V, vocab, largest, temperature, least_key, least_weight, ties, noise, BLOCK)
    tl.store(token_R + row, token)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    logits_V, vocab, largest, temperature, least_key, least_weight, ties, noise, BLOCK: tl.constexpr
):
    """The first kept token whose stretch of the cumulated weights ends above the noise's share of them all."""
    total = tl.full([], 0.0, tl.float64)
    target = tl.full([], 0.0, tl.float64)
    token = tl.full([], 0, tl.int32) + vocab
    for attempt in range(2):  # first what all weigh together, then where the noise falls
        total = total * 0.0
        seen = tl.full([], 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            token_B, key_B, weight_B = _block(logits_V, start, vocab, largest, temperature, BLOCK)
            inside_B = (key_B >= least_key) & (weight_B >= least_weight) & (token_B < vocab)
            tied_B = inside_B & (key_B == least_key)
            rank_B = seen + tl.cumsum(tied_B.to(tl.int32), axis=0)
            kept_B = inside_B & ((tied_B == 0) | (rank_B <= ties))
            sums_B = total + tl.cumsum(tl.where(kept_B, weight_B.to(tl.float64), 0.0), axis=0)
            if attempt == 1:
                token = tl.minimum(token, tl.min(tl.where(kept_B & (sums_B > target), token_B, vocab), axis=0))
            total = tl.max(sums_B, axis=0)
            seen = tl.max(rank_B, axis=0)
        target = noise * total
    return tl.minimum(token, vocab - 1)  # logits that are no numbers keep none


def sample(
    logits_RV: Tensor,
    temperature_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    min_p_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
) -> Tensor:
    """One token for each row of float32 logits, int64 [R]. Temperature 0: the first of the likeliest.

    float32: temperature, top-p and min-p; int64: top-k (0: all), seed and position.
    """
    rows, vocab = logits_RV.shape
    token_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
    sample_kernel[(rows,)](
        logits_RV.contiguous(), temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R, token_R, vocab,
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return token_R
