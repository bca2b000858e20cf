"""The executor that owns the model: one forward pass over a step's chunks, then sampling.

Shapes: T tokens of this step, R rows that need logits, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
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

SCORED_ROWS = 64  # prompt positions scored at once: 64 rows of a 49,152-word vocabulary are 12 MB


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
        with self.timer.part("forward"):
            hidden_TE = self.model.forward(tokens, self.attend)
            ends = [start + chunk.length - 1 for start, chunk in zip(tokens.batch.query_starts, chunks, strict=False)]
            sampling = [index for index, chunk in enumerate(chunks) if chunk.samples]
            logits_RV = self.model.logits(hidden_TE[[ends[index] for index in sampling]]) if sampling else None
        with self.timer.part("sample"):
            requests = [chunks[index].request for index in sampling]
            sampled = self._sample(logits_RV, requests) if logits_RV is not None else Sampled([])
            sampled.prompt_logprobs = self._score_prompts(hidden_TE, tokens.batch.query_starts, chunks)
        return sampled

    def _sample(self, logits_RV: Tensor, requests: list[Request]) -> Sampled:
        wanted = [index for index, request in enumerate(requests) if request.params.logprobs is not None]
        believed_RV = logits_RV[wanted]  # before bans change the logits
        tokens = sample(logits_RV, [self._row(request) for request in requests])
        counts = [requests[index].params.logprobs or 0 for index in wanted]
        entries = logprobs(believed_RV, [tokens[index] for index in wanted], counts) if wanted else []
        ids = [requests[index].id for index in wanted]
        return Sampled(tokens, dict(zip(ids, entries, strict=True)))

    def _row(self, request: Request) -> Row:
        params = request.params
        banned: tuple[int, ...] = ()
        if request.num_output < params.min_tokens:
            banned = (() if params.ignore_eos else self.eos_token_ids) + params.stop_token_ids
        return Row(params, len(request.tokens), banned)

    def _score_prompts(
        self, hidden_TE: Tensor, query_starts: Iterable[int], chunks: Sequence[Chunk]
    ) -> dict[str, list[Logprob]]:
        scored = {}
        for first_row, chunk in zip(query_starts, chunks, strict=False):
            request = chunk.request
            end = min(chunk.end, request.prompt_len - 1)
            if request.params.prompt_logprobs is not None and chunk.start < end:
                rows_RE = hidden_TE[first_row : first_row + end - chunk.start]
                next_tokens = request.tokens[chunk.start + 1 : end + 1]
                scored[request.id] = self._score(rows_RE, next_tokens, request.params.prompt_logprobs)
        return scored

    def _score(self, hidden_RE: Tensor, tokens: list[int], count: int) -> list[Logprob]:
        entries: list[Logprob] = []
        for start in range(0, len(tokens), SCORED_ROWS):
            some = tokens[start : start + SCORED_ROWS]
            logits_RV = self.model.logits(hidden_RE[start : start + SCORED_ROWS])
            entries += logprobs(logits_RV, some, [count] * len(some))
        return entries
