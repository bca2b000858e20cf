"""The executor that owns the model: block copies, one forward pass over a step's chunks, then sampling.

Shapes: T tokens of this step, R rows that need logits, S rows that sample, V vocabulary.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from engine.attention import PagedAttention
from engine.contract import Chunk, Move, Sampled, StepPlan
from engine.copies import BlockCopies
from engine.grammar import Grammars, Masks
from engine.inputs import InputBuilder
from engine.lanes import Lane
from engine.logits import Row
from engine.model import Model, Tokens
from engine.request import Logprob, Request, SamplingParams
from engine.sampler import logprobs, sample
from engine.timing import StepTimer


@dataclass(frozen=True, slots=True)
class Device:
    """What a step touches: KV blocks, their copies to and from the host tier, where it runs, and grammars."""

    attend: PagedAttention
    copies: BlockCopies
    lane: Lane
    grammars: Grammars


class _Fed(NamedTuple):
    """A token that the step before has yet to sample: it will be that of `row` in S, and is wanted at `place` in T."""

    place: int
    chunk: Chunk
    row: int


@dataclass(slots=True)
class _Work:
    """A step as it was submitted: nothing in it changes while earlier steps run.

    `histories` hold, for requests that look back, all tokens that are known, guesses included.
    """

    moves: Sequence[Move]
    chunks: Sequence[Chunk]
    tokens: Tokens
    rows_R: Tensor
    fed: list[_Fed]
    histories: dict[Request, list[int]]


@dataclass(slots=True)
class ModelRunner:
    """See `contract.Executor`. `eos_token_ids` are what `min_tokens` holds back."""

    model: Model
    device: Device
    inputs: InputBuilder
    eos_token_ids: tuple[int, ...]
    timer: StepTimer
    _row_of: dict[Request, int] = field(default_factory=dict)
    _last_tokens: list[int] = field(default_factory=list)

    def prepare(self, params: SamplingParams) -> None:
        if params.grammar is not None:
            self.device.grammars.compile(params.grammar)

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        with self.timer.part("prepare"):
            chunks = list(plan)
            tokens = self.inputs.build(chunks)
            starts = tokens.batch.query_starts
            rows_R = torch.tensor(_rows(starts, chunks), dtype=torch.int64, device=tokens.id_T.device)
            fed = [
                _Fed(starts[i], chunk, self._row_of[chunk.request]) for i, chunk in enumerate(chunks) if _is_fed(chunk)
            ]
            looking_back = [chunk for chunk in chunks if chunk.samples and chunk.request.params.looks_back]
            histories = {chunk.request: [*chunk.request.tokens, *chunk.draft] for chunk in looking_back}
            self._row_of = _last_rows(chunks)
        work = _Work(plan.moves, chunks, tokens, rows_R, fed, histories)
        return self.device.lane.submit(lambda: self._run(work))

    @torch.inference_mode()
    def _run(self, work: _Work) -> Sampled:
        with self.timer.part("forward"):
            self.device.copies.apply(work.moves)
            self._fill_in(work)
            rows = [(chunk.request, row) for chunk in work.chunks for row in self._sample_rows(chunk, work.histories)]
            masks = self.device.grammars.start(_with_grammar(rows))
            logits_RV = self.model.forward(work.tokens, work.rows_R, self.device.attend)
        with self.timer.part("sample"):
            sampled = _sample(logits_RV[: len(rows)], [row for _, row in rows], masks(), work.chunks)
            sampled.prompt_logprobs = _score_prompts(logits_RV[len(rows) :], work.chunks)
        self._last_tokens = sampled.tokens
        return sampled

    def _fill_in(self, work: _Work) -> None:
        """The tokens that were not known when the step was submitted: by now the step before has sampled them."""
        for place, chunk, row in work.fed:
            token = self._last_tokens[row]
            work.tokens.id_T[place] = token
            if chunk.request in work.histories:
                work.histories[chunk.request].append(token)

    def _sample_rows(self, chunk: Chunk, histories: Mapping[Request, list[int]]) -> Iterator[Row]:
        """One for the position behind the chunk, before it one behind each position that a guess follows."""
        request, params = chunk.request, chunk.request.params
        history = histories.get(request, [])
        banned = (() if params.ignore_eos else self.eos_token_ids) + params.stop_token_ids
        for position in range(chunk.end + 1 - chunk.num_sampled, chunk.end + 1):
            held_back = position - request.prompt_len < params.min_tokens
            yield Row(params, position, banned if held_back else (), history[:position], request.prompt_len)


def _is_fed(chunk: Chunk) -> bool:
    return chunk.start == len(chunk.request.tokens)


def _last_rows(chunks: Sequence[Chunk]) -> dict[Request, int]:
    """Which of the step's sampled tokens is a request's last."""
    last, count = {}, 0
    for chunk in chunks:
        count += chunk.num_sampled
        last[chunk.request] = count - 1
    return last


def _with_grammar(rows: Sequence[tuple[Request, Row]]) -> list[tuple[int, Request, Row]]:
    return [(index, request, row) for index, (request, row) in enumerate(rows) if row.params.grammar is not None]


def _sample(logits_SV: Tensor, rows: Sequence[Row], masks: Masks, chunks: Iterable[Chunk]) -> Sampled:
    if not rows:
        return Sampled([])
    wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    believed_SV = logits_SV[wanted]  # before bans change the logits
    tokens = sample(logits_SV, rows, masks)
    if not wanted:
        return Sampled(tokens)
    counts = [rows[index].params.logprobs or 0 for index in wanted]
    entries = iter(logprobs(believed_SV, [tokens[index] for index in wanted], counts))
    asking = [chunk for chunk in chunks if chunk.request.params.logprobs is not None]
    return Sampled(tokens, {chunk.request.id: list(islice(entries, chunk.num_sampled)) for chunk in asking})


def _scored(chunk: Chunk) -> range:
    """The positions of a chunk that predict a prompt token whose log probability is wanted."""
    if chunk.request.params.prompt_logprobs is None:
        return range(0)
    return range(chunk.start, min(chunk.end, chunk.request.prompt_len - 1))


def _rows(query_starts: Sequence[int], chunks: Sequence[Chunk]) -> list[int]:
    """Rows of the step that need logits: the last ones of each chunk that samples, then the scored prompt positions."""
    starts = list(zip(query_starts, chunks, strict=False))
    rows: list[int] = []
    for start, chunk in starts:
        rows += range(start + chunk.length - chunk.num_sampled, start + chunk.length)
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
