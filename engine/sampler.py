"""Chooses tokens from logits. Noise is a function of (seed, position) alone, so a choice never depends on the batch.

Shapes: R = rows that sample, V = vocabulary, W = the most likely tokens that filters look at.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import Logprob, SamplingParams

MASK64 = (1 << 64) - 1
CANDIDATES = 1024


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position), without state.

    Two rounds of the SplitMix64 finaliser (Steele, Lea and Flood, 2014), 53 bits of the result.
    """
    mixed = _mix((_mix(seed & MASK64) + position * 0x9E3779B97F4A7C15) & MASK64)
    return (mixed >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits to sample from: `position` is that of the token to come, `banned` may not be chosen now."""

    params: SamplingParams
    position: int
    banned: tuple[int, ...] = ()


def sample(logits_RV: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token per row. The common path, all greedy, has no Python work per row."""
    for index, row in enumerate(rows):
        if row.banned:
            logits_RV[index, list(row.banned)] = float("-inf")
    chosen_R = torch.argmax(logits_RV, dim=-1)
    random = [index for index, row in enumerate(rows) if not row.params.greedy]
    if random:
        chosen_R[random] = _sample_random(logits_RV[random], [rows[index] for index in random])
    return [int(token) for token in chosen_R.tolist()]


def _sample_random(logits_RV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Inverse transform sampling in float64: the token whose stretch of the cumulative sum holds the noise."""
    device, vocab = logits_RV.device, logits_RV.shape[-1]
    temperature_R1 = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64, device=device)
    noise = [[uniform(row.params.seed, row.position)] for row in rows]
    noise_R1 = torch.tensor(noise, dtype=torch.float64, device=device)
    probability_RV = torch.softmax(logits_RV.double() / temperature_R1, dim=-1)
    filtered = [index for index, row in enumerate(rows) if _top_k(row, vocab) < vocab or row.params.top_p < 1.0]
    plain = sorted(set(range(len(rows))) - set(filtered))
    chosen_R = torch.empty(len(rows), dtype=torch.int64, device=device)
    if plain:
        mass_RV = torch.cumsum(probability_RV[plain], dim=-1)
        chosen_R[plain] = _look_up(mass_RV, noise_R1[plain] * mass_RV[:, -1:])
    if filtered:
        rows = [rows[index] for index in filtered]
        chosen_R[filtered] = _sample_filtered(probability_RV[filtered], noise_R1[filtered], rows, CANDIDATES)
    return chosen_R


def _sample_filtered(probability_RV: Tensor, noise_R1: Tensor, rows: Sequence[Row], width: int) -> Tensor:
    """Top-k, then top-p of what is left, on the `width` most likely tokens; rows that need more take all of them.

    Which path a row takes depends on that row alone.
    """
    vocab = probability_RV.shape[-1]
    width = min(width, vocab)
    best_RW, token_RW = torch.topk(probability_RV, width, dim=-1)
    mass_RW = torch.cumsum(best_RW, dim=-1)
    top_k = [_top_k(row, vocab) for row in rows]
    keep_R1 = torch.tensor([[min(k, width)] for k in top_k], device=mass_RW.device)
    whole_R1 = torch.tensor([[width < k] for k in top_k], device=mass_RW.device)
    top_p_R1 = torch.tensor([[row.params.top_p] for row in rows], dtype=torch.float64, device=mass_RW.device)
    limit_R1 = top_p_R1 * torch.where(whole_R1, 1.0, mass_RW.gather(-1, keep_R1 - 1))
    kept_R1 = torch.minimum(torch.searchsorted(mass_RW, limit_R1) + 1, keep_R1)
    target_R1 = noise_R1 * mass_RW.gather(-1, kept_R1 - 1)
    chosen_R = token_RW.gather(-1, _look_up(mass_RW, target_R1)[:, None]).squeeze(-1)
    reached = (mass_RW[:, -1:] >= limit_R1).flatten().tolist()
    short = [index for index, k in enumerate(top_k) if width < k and (k < vocab or not reached[index])]
    if short:
        rows = [rows[index] for index in short]
        chosen_R[short] = _sample_filtered(probability_RV[short], noise_R1[short], rows, vocab)
    return chosen_R


def _look_up(mass_RV: Tensor, target_R1: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds the target. The noise is below 1 - 2**-53, so there always is one."""
    return torch.searchsorted(mass_RV, target_R1, right=True).squeeze(-1)


def _top_k(row: Row, vocab: int) -> int:
    return row.params.top_k if 0 < row.params.top_k < vocab else vocab


def logprobs(logits_RV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprob]:
    """For each row the log probability of its token and of the `counts` best, from the model's own distribution.

    Temperature, filters and bans do not enter: it is what the model believes, not how the choice was made.
    """
    logprob_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    token_R1 = torch.tensor(tokens, device=logits_RV.device)[:, None]
    chosen_R = logprob_RV.gather(-1, token_R1).squeeze(-1).tolist()
    best = torch.topk(logprob_RV, max(1, *counts), dim=-1)
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        Logprob(token, chosen_R[row], tuple(zip(indices[row][:count], values[row][:count], strict=True)))
        for row, (token, count) in enumerate(zip(tokens, counts, strict=True))
    ]
