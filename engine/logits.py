"""What a request asks of the logits before anything is sampled: bias, penalties, tokens that may not be chosen.

Each row is changed by its own request alone, so no row depends on the rows beside it. Shapes: R rows that sample,
P rows among them that are penalised, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.transfer import on, to_device

MINUS_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits to sample from: `position` is that of the token to come.

    `history` holds all tokens before it, guesses included, if the request's parameters look back at them; the first
    `prompt_len` are the prompt. `banned` may not be chosen now.
    """

    params: SamplingParams
    position: int
    banned: Sequence[int] = ()
    history: Sequence[int] = ()
    prompt_len: int = 0


Numbered = Sequence[tuple[int, Row]]


def adjust(logits_RV: Tensor, rows: Sequence[Row], masks: Mapping[int, Tensor]) -> None:
    """In place. Bias and penalties first, so that nothing makes up for being forbidden.

    `masks` are what grammars allow, by row. Rows that ask for none of this cost nothing but the look at them.
    """
    asking = [(index, row) for index, row in enumerate(rows) if row.banned or row.params.adjusts]
    if not asking:
        return
    _add_bias(logits_RV, asking)
    _penalise(logits_RV, [(index, row) for index, row in asking if row.params.penalised])
    _forbid(logits_RV, asking)
    for index, row in asking:
        if row.params.allowed_token_ids is not None:
            _keep_only(logits_RV, index, _integers(row.params.allowed_token_ids, logits_RV))
    for index, mask_V in masks.items():
        _keep_masked(logits_RV, index, to_device(mask_V, logits_RV.device))


def _add_bias(logits_RV: Tensor, rows: Numbered) -> None:
    biased = [(index, token, bias) for index, row in rows for token, bias in row.params.logit_bias]
    if biased:
        index, token, bias = zip(*biased, strict=True)
        place = (_integers(index, logits_RV), _integers(token, logits_RV))
        logits_RV.index_put_(place, on(logits_RV.device, bias, logits_RV.dtype), accumulate=True)


def _penalise(logits_RV: Tensor, rows: Numbered) -> None:
    """Repetition (Keskar et al., 2019) looks at prompt and output, presence and frequency (OpenAI) at the output alone.

    A token that was seen: l ← l / r if l > 0 else l · r. One c times in the output: l ← l − c · f − [c > 0] · p.
    """
    if not rows:
        return
    index_P = _integers([index for index, _ in rows], logits_RV)
    output_PV = _counts([row.history[row.prompt_len :] for _, row in rows], logits_RV)
    seen_PV = output_PV + _counts([row.history[: row.prompt_len] for _, row in rows], logits_RV) > 0
    repetition_P1 = _column([row.params.repetition_penalty for _, row in rows], logits_RV)
    frequency_P1 = _column([row.params.frequency_penalty for _, row in rows], logits_RV)
    presence_P1 = _column([row.params.presence_penalty for _, row in rows], logits_RV)
    own_PV = logits_RV[index_P]
    repeated_PV = torch.where(own_PV > 0, own_PV / repetition_P1, own_PV * repetition_P1)
    own_PV = torch.where(seen_PV, repeated_PV, own_PV)
    logits_RV[index_P] = own_PV - output_PV * frequency_P1 - (output_PV > 0) * presence_P1


def _keep_only(logits_RV: Tensor, index: int, tokens: Tensor) -> None:
    """Of one row. If all of these are forbidden otherwise they count alike: some token must be chosen."""
    kept_V = torch.zeros(logits_RV.shape[-1], dtype=torch.bool, device=logits_RV.device)
    _keep_masked(logits_RV, index, kept_V.index_fill_(0, tokens, True))


def _keep_masked(logits_RV: Tensor, index: int, kept_V: Tensor) -> None:
    logits_V = logits_RV[index]
    possible = (torch.isfinite(logits_V) & kept_V).any()
    logits_RV[index] = torch.where(kept_V, torch.where(possible, logits_V, 0.0), MINUS_INFINITY)


def _forbid(logits_RV: Tensor, rows: Numbered) -> None:
    forbidden = [(index, token) for index, row in rows for token in (*row.banned, *_word_ends(row))]
    if forbidden:
        index, token = zip(*forbidden, strict=True)
        logits_RV[_integers(index, logits_RV), _integers(token, logits_RV)] = MINUS_INFINITY


def _word_ends(row: Row) -> Iterator[int]:
    """The last tokens of bad words whose other tokens have just been written."""
    for *start, last in row.params.bad_words:
        if not start or list(row.history[-len(start) :]) == start:
            yield last


def _counts(histories: Sequence[Sequence[int]], logits_RV: Tensor) -> Tensor:
    """[P, V]: how often each token occurs."""
    row = [index for index, history in enumerate(histories) for _ in history]
    token = [token for history in histories for token in history]
    counts_PV = logits_RV.new_zeros(len(histories), logits_RV.shape[-1])
    ones = logits_RV.new_ones(len(token))
    return counts_PV.index_put_((_integers(row, logits_RV), _integers(token, logits_RV)), ones, accumulate=True)


def _integers(values: Sequence[int], like: Tensor) -> Tensor:
    return on(like.device, values, torch.int64)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return on(like.device, values, like.dtype)[:, None]
