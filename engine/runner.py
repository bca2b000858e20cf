"""The executor that owns the model: one forward pass over a step's chunks, then sampling.

Shapes: R rows that need logits, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention import PagedAttention
from engine.contract import Chunk, Move, Sampled
from engine.inputs import InputBuilder
from engine.model import Model
from engine.request import Logprob, Request
from engine.sampler import Row, logprobs, sample
from engine.timing import StepTimer


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """See `contract.Executor`. `eos_token_ids` are what `min_tokens` holds back."""

    model: Model
    attend: PagedAttention
    inputs: InputBuilder
    eos_token_ids: tuple[int, ...]
    timer: StepTimer

    def submit(self, chunks: Sequence[Chunk], moves: Sequence[Move] = ()) -> Callable[[], Sampled]:
        assert not moves, "this executor has no second pool to copy from"
        sampled = self._run(chunks)
        return lambda: sampled

    @torch.inference_mode()
    def _run(self, chunks: Sequence[Chunk]) -> Sampled:
        with self.timer.part("prepare"):
            tokens = self.inputs.build(chunks)
            sampling = [chunk for chunk in chunks if chunk.samples]
            rows = _rows(tokens.batch.query_starts, chunks)
            rows_R = torch.tensor(rows, dtype=torch.int64, device=tokens.id_T.device)
        with self.timer.part("forward"):
            logits_RV = self.model.forward(tokens, rows_R, self.attend)
        with self.timer.part("sample"):
            sampled = self._sample(logits_RV[: len(sampling)], [chunk.request for chunk in sampling])
            sampled.prompt_logprobs = _score_prompts(logits_RV[len(sampling) :], chunks)
        return sampled

    def _sample(self, logits_RV: Tensor, requests: list[Request]) -> Sampled:
        if not requests:
            return Sampled([])
        wanted = [index for index, request in enumerate(requests) if request.params.logprobs is not None]
        believed_RV = logits_RV[wanted]  # before bans change the logits
        tokens = sample(logits_RV, [self._row(request) for request in requests])
        if not wanted:
            return Sampled(tokens)
        counts = [requests[index].params.logprobs or 0 for index in wanted]
        entries = logprobs(believed_RV, [tokens[index] for index in wanted], counts)
        ids = [requests[index].id for index in wanted]
        return Sampled(tokens, dict(zip(ids, entries, strict=True)))

    def _row(self, request: Request) -> Row:
        params = request.params
        banned: tuple[int, ...] = ()
        if request.num_output < params.min_tokens:
            banned = (() if params.ignore_eos else self.eos_token_ids) + params.stop_token_ids
        return Row(params, len(request.tokens), banned)


def _scored(chunk: Chunk) -> range:
    """The positions of a chunk that predict a prompt token whose log probability is wanted."""
    if chunk.request.params.prompt_logprobs is None:
        return range(0)
    return range(chunk.start, min(chunk.end, chunk.request.prompt_len - 1))


def _rows(query_starts: Sequence[int], chunks: Sequence[Chunk]) -> list[int]:
    """Rows of the step that need logits: the last of each chunk that samples, then the scored prompt positions."""
    starts = list(zip(query_starts, chunks, strict=False))
    rows = [start + chunk.length - 1 for start, chunk in starts if chunk.samples]
    for start, chunk in starts:
        rows += [start + position - chunk.start for position in _scored(chunk)]
    return rows


def _score_prompts(logits_RV: Tensor, chunks: Sequence[Chunk]) -> dict[str, list[Logprob]]:
    scored = {}
    row = 0
    for chunk in chunks:
        positions = _scored(chunk)
        if positions:
            request = chunk.request
            following = request.tokens[positions.start + 1 : positions.stop + 1]
            counts = [request.params.prompt_logprobs or 0] * len(positions)
            scored[request.id] = logprobs(logits_RV[row : row + len(positions)], following, counts)
            row += len(positions)
    return scored
