"""Chooses tokens from logits. Noise is a function of (seed, position) alone, so a choice never depends on the batch.

Shapes: R = rows that sample, V = vocabulary, W = the most likely tokens that filters look at.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from engine.logits import Row, adjust
from engine.request import Logprob
from engine.transfer import on, read
from kernels.noise import noise

CANDIDATES = 1024
NO_MASKS: Mapping[int, Tensor] = MappingProxyType({})


Sampler = Callable[[Tensor, Sequence[Row], Mapping[int, Tensor]], Tensor]


def sample(logits_RV: Tensor, rows: Sequence[Row], masks: Mapping[int, Tensor] = NO_MASKS) -> Tensor:
    """One token per row, int64 [R]. Changes the logits as rows and grammars' `masks` [V] of some rows demand."""
    adjust(logits_RV, rows, masks)
    chosen_R = torch.argmax(logits_RV, dim=-1)
    random = [index for index, row in enumerate(rows) if not row.params.greedy]
    if random:
        chosen_R[random] = _sample_random(logits_RV[random], [rows[index] for index in random])
    return chosen_R


def sample_on_gpu(logits_RV: Tensor, rows: Sequence[Row], masks: Mapping[int, Tensor]) -> Tensor:
    """The same contract in one kernel that nothing waits for. Kept tokens share [0, 1) in the vocabulary's order."""
    from kernels import gpu_sampling  # needs Triton: only for those who use it

    adjust(logits_RV, rows, masks)
    params = [row.params for row in rows]
    if all(one.greedy for one in params):
        return torch.argmax(logits_RV, dim=-1)
    device, vocab = logits_RV.device, logits_RV.shape[-1]
    temperature, top_p, min_p = on(
        device,
        [[0.0 if p.greedy else p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]],
        torch.float32,
    )
    top_k, seed, position = on(
        device,
        [[_top_k(row, vocab) for row in rows], [p.seed for p in params], [row.position for row in rows]],
        torch.int64,
    )
    return gpu_sampling.sample(logits_RV.float(), temperature, top_k, top_p, min_p, seed, position)


def _sample_random(logits_RV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Inverse transform sampling in float64: the token whose stretch of the cumulative sum holds the noise."""
    temperature_R1, noise_R1 = _floats([row.params.temperature for row in rows], logits_RV), _noise(rows, logits_RV)
    probability_RV, vocab = torch.softmax(logits_RV.double() / temperature_R1, dim=-1), logits_RV.shape[-1]
    filtered = [index for index, row in enumerate(rows) if _is_ranked(row, vocab) or row.params.top_p < 1.0]
    plain = sorted(set(range(len(rows))) - set(filtered))
    chosen_R = torch.empty(len(rows), dtype=torch.int64, device=logits_RV.device)
    if plain:
        mass_RV = torch.cumsum(probability_RV[plain], dim=-1)
        chosen_R[plain] = _look_up(mass_RV, noise_R1[plain] * mass_RV[:, -1:])
    if filtered:
        rows = [rows[index] for index in filtered]
        chosen_R[filtered] = _sample_filtered(probability_RV[filtered], noise_R1[filtered], rows, CANDIDATES)
    return chosen_R


def _noise(rows: Sequence[Row], like: Tensor) -> Tensor:
    seeds = on(like.device, [row.params.seed for row in rows], torch.int64)
    return noise(seeds, on(like.device, [row.position for row in rows], torch.int64))[:, None]


def _floats(values: Sequence[float], like: Tensor) -> Tensor:
    return on(like.device, values, torch.float64)[:, None]


def _is_ranked(row: Row, vocab: int) -> bool:
    return _top_k(row, vocab) < vocab or row.params.min_p > 0.0


def _sample_filtered(probability_RV: Tensor, noise_R1: Tensor, rows: Sequence[Row], width: int) -> Tensor:
    """Top-k and min-p, then top-p of what they left, on the `width` likeliest tokens; rows that need more take all.

    Which path a row takes depends on that row alone.
    """
    vocab = probability_RV.shape[-1]
    width = min(width, vocab)
    best_RW, token_RW = torch.topk(probability_RV, width, dim=-1)
    mass_RW = torch.cumsum(best_RW, dim=-1)
    keep_R1 = _kept_by_rank(best_RW, rows, vocab)
    within_R1 = keep_R1 <= width
    keep_R1 = keep_R1.clamp(max=width)
    limit_R1 = _floats([row.params.top_p for row in rows], best_RW)
    limit_R1 = limit_R1 * torch.where(within_R1, mass_RW.gather(-1, keep_R1 - 1), 1.0)
    kept_R1 = torch.minimum(torch.searchsorted(mass_RW, limit_R1) + 1, keep_R1)
    target_R1 = noise_R1 * mass_RW.gather(-1, kept_R1 - 1)
    chosen_R = token_RW.gather(-1, _look_up(mass_RW, target_R1)[:, None]).squeeze(-1)
    bounded = [_is_ranked(row, vocab) for row in rows]
    reached = (mass_RW[:, -1:] >= limit_R1).flatten().tolist()
    enough = zip(within_R1.flatten().tolist(), bounded, reached, strict=True)
    short = [
        index for index, (within, by_rank, by_mass) in enumerate(enough) if not within and (by_rank or not by_mass)
    ]
    if short:
        rows = [rows[index] for index in short]
        chosen_R[short] = _sample_filtered(probability_RV[short], noise_R1[short], rows, vocab)
    return chosen_R


def _kept_by_rank(best_RW: Tensor, rows: Sequence[Row], vocab: int) -> Tensor:
    """How many of the likeliest tokens top-k and min-p leave; more than W if these do not show where that ends."""
    width = best_RW.shape[-1]
    top_k_R1 = _floats([_top_k(row, vocab) for row in rows], best_RW).long()
    likely_R1 = (best_RW >= best_RW[:, :1] * _floats([row.params.min_p for row in rows], best_RW)).sum(-1, keepdim=True)
    likely_R1 = torch.where(likely_R1 == width, vocab, likely_R1)
    return torch.minimum(top_k_R1, likely_R1)


def _look_up(mass_RV: Tensor, target_R1: Tensor) -> Tensor:
    """First index whose cumulative mass exceeds the target. The noise is below 1 - 2**-53, so there always is one."""
    return torch.searchsorted(mass_RV, target_R1, right=True).squeeze(-1)


def _top_k(row: Row, vocab: int) -> int:
    return row.params.top_k if 0 < row.params.top_k < vocab else vocab


class Scores(NamedTuple):
    """Log probabilities on their way to the host. W: the most that any row asked for."""

    token_R: Callable[[], Tensor]
    chosen_R: Callable[[], Tensor]
    value_RW: Callable[[], Tensor]
    index_RW: Callable[[], Tensor]
    counts: Sequence[int]

    def entries(self) -> list[Logprob]:
        """One for each row: its token's and those of its best."""
        values, indices = self.value_RW().tolist(), self.index_RW().tolist()
        chosen = zip(self.token_R().tolist(), self.chosen_R().tolist(), self.counts, strict=True)
        return [
            Logprob(token, own, tuple(zip(indices[row][:count], values[row][:count], strict=True)))
            for row, (token, own, count) in enumerate(chosen)
        ]


def logprobs(logits_RV: Tensor, token_R: Tensor, counts: Sequence[int]) -> Scores:
    """For each row the log probability of its token and of the `counts` best, from the model's own distribution.

    Temperature, filters and bans do not enter: it is what the model believes, not how the choice was made.
    """
    logprob_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    chosen_R = logprob_RV.gather(-1, token_R[:, None].long()).squeeze(-1)
    best = torch.topk(logprob_RV, max(1, *counts), dim=-1)
    return Scores(read(token_R), read(chosen_R), read(best.values), read(best.indices), counts)
