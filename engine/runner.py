"""The executor that owns the model: block copies, one forward pass over a step's chunks, then sampling.

Shapes: T tokens of this step, R rows that need logits, S rows that sample, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

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
from engine.sampler import Sampler, Scores, logprobs
from engine.timing import StepTimer
from engine.transfer import on, read


@dataclass(frozen=True, slots=True)
class Device:
    """What a step touches: KV blocks, their copies to and from the host tier, where it runs, sampling, grammars."""

    attend: PagedAttention
    copies: BlockCopies
    lane: Lane
    sample: Sampler
    grammars: Grammars


@dataclass(slots=True)
class _Work:
    """A step as it was submitted: nothing in it changes while earlier steps run.

    Tokens at `place_F` are those that the step before has yet to sample for its rows `row_F`; `fed` are the chunks that
    begin with them. `following_R` are the prompt tokens that the scored rows should predict. `histories` hold, for
    requests that look back, all tokens that are known, guesses included.
    """

    moves: Sequence[Move]
    chunks: Sequence[Chunk]
    tokens: Tokens
    rows_R: Tensor
    place_F: Tensor
    row_F: Tensor
    following_R: Tensor
    fed: Sequence[tuple[int, Chunk]]
    histories: dict[Request, list[int]]


@dataclass(slots=True)
class ModelRunner:
    """See `contract.Executor`. `eos_token_ids` are what `min_tokens` holds back.

    On a GPU nothing here waits for it: a step is started with tokens that only the GPU knows, and its results are on
    their way to the host while the next one is planned.
    """

    model: Model
    device: Device
    inputs: InputBuilder
    eos_token_ids: tuple[int, ...]
    timer: StepTimer
    _row_of: dict[Request, int] = field(default_factory=dict)
    _last_R: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def prepare(self, params: SamplingParams) -> None:
        if params.grammar is not None:
            self.device.grammars.compile(params.grammar)

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        with self.timer.part("prepare"):
            work = self._prepare(plan)
        started = self.device.lane.submit(lambda: self._run(work))
        return lambda: started()()

    def _prepare(self, plan: StepPlan) -> _Work:
        chunks = list(plan)
        starts = [0, *accumulate(chunk.length for chunk in chunks)]
        fed = [(self._row_of[chunk.request], chunk) for chunk in chunks if _is_fed(chunk)]
        places = [start for start, chunk in zip(starts, chunks, strict=False) if _is_fed(chunk)]
        lists = _rows(starts, chunks), places, [row for row, _ in fed], _following(chunks)
        tokens, others = self.inputs.build(chunks, *lists)
        looking_back = [chunk for chunk in chunks if chunk.samples and chunk.request.params.looks_back]
        histories = {chunk.request: [*chunk.request.tokens, *chunk.draft] for chunk in looking_back}
        self._row_of = _last_rows(chunks)
        rows_R, place_F, row_F, following_R = others
        return _Work(plan.moves, chunks, tokens, rows_R, place_F, row_F, following_R, fed, histories)

    @torch.inference_mode()
    def _run(self, work: _Work) -> Callable[[], Sampled]:
        with self.timer.part("forward"):
            self.device.copies.apply(work.moves)
            self._fill_in(work)
            rows = [(chunk.request, row) for chunk in work.chunks for row in self._sample_rows(chunk, work.histories)]
            masks = self.device.grammars.start(_with_grammar(rows))
            logits_RV = self.model.forward(work.tokens, work.rows_R, self.device.attend)
        with self.timer.part("sample"):
            return self._sample(logits_RV, [row for _, row in rows], masks(), work)

    def _fill_in(self, work: _Work) -> None:
        """The tokens that were not known when the step was submitted: by now the step before has sampled them.

        Only requests that look back must know them here, too.
        """
        if not work.fed:
            return
        work.tokens.id_T[work.place_F] = self._last_R[work.row_F].to(work.tokens.id_T.dtype)
        looking_back = [(row, chunk.request) for row, chunk in work.fed if chunk.request in work.histories]
        if looking_back:
            last = self._last_R.tolist()
            for row, request in looking_back:
                work.histories[request].append(last[row])

    def _sample(self, logits_RV: Tensor, rows: Sequence[Row], masks: Masks, work: _Work) -> Callable[[], Sampled]:
        """Starts it all; the returned call waits for the results."""
        logits_SV, scored_RV = logits_RV[: len(rows)], logits_RV[len(rows) :]
        prompts = None
        if len(scored_RV):
            prompts = logprobs(scored_RV, work.following_R, _counts(work.chunks))
        if not rows:
            self._last_R = self._last_R[:0]
            return lambda: Sampled([], {}, _by_request(prompts, work.chunks, _scored))
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        if wanted:
            wanted_W = on(logits_SV.device, wanted, torch.int64)
            believed_WV = logits_SV[wanted_W]  # before bans change the logits
        self._last_R = token_S = self.device.sample(logits_SV, rows, masks)
        tokens, scores = read(token_S), None
        if wanted:
            scores = logprobs(believed_WV, token_S[wanted_W], [rows[index].params.logprobs or 0 for index in wanted])
        return lambda: Sampled(
            tokens().tolist(),
            _by_request(scores, work.chunks, _sampled),
            _by_request(prompts, work.chunks, _scored),
        )

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


def _following(chunks: Sequence[Chunk]) -> list[int]:
    """The prompt tokens that the scored positions should predict."""
    return [chunk.request.tokens[position + 1] for chunk in chunks for position in _scored(chunk)]


def _counts(chunks: Sequence[Chunk]) -> list[int]:
    """How many of the likeliest tokens each scored position is to name."""
    return [chunk.request.params.prompt_logprobs or 0 for chunk in chunks for _ in _scored(chunk)]


def _sampled(chunk: Chunk) -> range:
    """As many as there are samples whose log probability is wanted."""
    return range(0 if chunk.request.params.logprobs is None else chunk.num_sampled)


def _by_request(
    scores: Scores | None, chunks: Sequence[Chunk], share: Callable[[Chunk], range]
) -> dict[str, list[Logprob]]:
    """The entries of each chunk that has a share in them, by request id."""
    if scores is None:
        return {}
    entries = iter(scores.entries())
    return {chunk.request.id: list(islice(entries, len(share(chunk)))) for chunk in chunks if share(chunk)}
