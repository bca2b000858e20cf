"""What goes into the engine and what comes out: token ids, sampling parameters, and one `Output` per request and step.

No torch, no text, no clock here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from engine.errors import RequestError
from engine.speculate import NO_DRAFTS, Drafter

GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
MAX_DRAFT_TOKENS = 64
INT64 = 2**63


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Logprob(NamedTuple):
    """Log probability of one token, and of the most likely tokens at its position, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Raises RequestError naming the field that is out of range.

    `temperature` below 1e-5 means greedy; `top_k` 0 or -1 means off; `min_p` keeps tokens at least so likely as that
    part of the likeliest. `repetition_penalty` looks at prompt and output, `presence_penalty` and `frequency_penalty`
    at the output. `logit_bias` holds (token, what is added to its logit); a sequence of `bad_words` is never completed;
    `allowed_token_ids` None allows all; `grammar` is one that the output must follow, in llguidance's notation.

    `logprobs` k asks for the chosen token's log probability and the k best, None for none; `prompt_logprobs` the same
    for the prompt's own tokens. `draft_tokens` bounds the guesses of a step: None leaves that to the engine, 0 means
    none. They change no token.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: str | None = None
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 0, INT64 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("top_k", self.top_k, -1, INT64 - 1)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for _, bias in self.logit_bias:
            _within("logit_bias", bias, -100.0, 100.0)
        if not all(self.bad_words) or self.allowed_token_ids == ():
            name = "allowed_token_ids" if self.allowed_token_ids == () else "bad_words"
            raise RequestError(f"{name} must not be empty; leave it out.", param=name)
        _within("seed", self.seed, -INT64, INT64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _within(name, count, 0, MAX_LOGPROBS)
        if self.draft_tokens is not None:
            _within("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """What may be chosen depends on the tokens before."""
        return self.penalised or bool(self.bad_words) or self.grammar is not None

    @property
    def adjusts(self) -> bool:
        """The logits are changed before sampling."""
        return self.looks_back or bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p < 1e-6


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(f"{name} is {value}; it must be between {low} and {high}.", param=name)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """One sequence on its way through the scheduler.

    There is no prefill or decode state: `pending` says how far `computed` is behind, and a step closes some of that
    gap. Steps in flight will append `promised` tokens; `draft` guesses what follows `tokens`, and belongs to nobody
    until a step has confirmed it. `admitted_len` is the length of `tokens` when it was last admitted; every eviction
    begins a new `life`, in which results of the old one no longer count.

        tokens    |--------- prompt ---------|--- sampled so far ---|~ promised ~|~ draft ~|
        computed  |-------- KV written or in flight ------|~~~~~~~~~~~ pending ~~~~~~~~~~~~|
        published |-- full blocks, findable --|

    `blocks`, `capacity` (the positions they hold), `hashes`, `published` and `cached` belong to the KV cache. A larger
    `priority` is less urgent; only requests of the same `cache_salt` share KV; `arrival` numbers requests in the order
    they came, `arrived_s` is when, on the engine's clock. A token of `stops` ends the request, and so does a length of
    `full_len`; a `plain` one wants nothing but one token a step.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    cache_salt: str = ""
    drafter: Drafter = NO_DRAFTS
    arrival: int = 0
    arrived_s: float = 0.0
    computed: int = 0
    promised: int = 0
    draft: Sequence[int] = ()
    blocks: list[int] = field(default_factory=list)
    capacity: int = 0
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    cached: int = 0
    evictions: int = 0
    life: int = 0
    admitted_len: int = 0
    prompt_logprobs: list[Logprob | None] | None = None
    stops: frozenset[int] = frozenset()
    full_len: int = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.full_len = self.prompt_len + max(self.params.max_tokens, 1)
        self.draft_with(self.drafter)

    def draft_with(self, drafter: Drafter) -> None:
        params = self.params
        self.drafter = drafter
        scored = params.logprobs is not None or params.prompt_logprobs is not None
        self.plain = params.max_tokens > 0 and not scored and drafter is NO_DRAFTS

    @property
    def due(self) -> int:
        """Positions that must be computed before the next token can be sampled.

        None beyond `computed` while a step in flight decides how the request goes on: when that is certain to end it,
        or when a guess is to follow the token it samples.
        """
        length = len(self.tokens) + self.promised
        if self.promised and (length >= self.full_len or self.drafter.most):
            return self.computed
        return length

    @property
    def pending(self) -> int:
        """Positions to run, guesses included."""
        return self.due + len(self.draft) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len


class Output(NamedTuple):
    """What a step gave one request. The last one of a request carries `finish_reason`.

    `stop_token` is the stop token id that ended it, if one of `stop_token_ids` or EOS did; that token is the last
    of `tokens`. `prompt_logprobs` comes once, with the first Output; its first entry is None.
    `cached_tokens` counts the prompt's tokens whose KV came from the prefix cache; it is in the first and in the last.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None


@dataclass(slots=True)
class StepOutput:
    """What one step gave: to each of `ids` its token of `tokens`, and `others`, which hold more than one token.

    Most requests get a token and nothing else, so those are columns. Iterating gives an Output for each request.
    """

    ids: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    others: list[Output] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.ids or self.others)

    def __iter__(self) -> Iterator[Output]:
        for request_id, token in zip(self.ids, self.tokens, strict=True):
            yield Output(request_id, (token,))
        yield from self.others

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + sum(len(output.tokens) for output in self.others)
