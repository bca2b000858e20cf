"""What goes into the engine and what comes out: token ids, sampling parameters, and one `Output` per request and step.

No torch, no text, no clock here.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from engine.errors import RequestError

GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
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

    `temperature` below 1e-5 means greedy; `top_k` 0 or -1 means off; `logprobs` k asks for the chosen token's log
    probability and the k best, None for none; `prompt_logprobs` the same for the prompt's own tokens.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 0, INT64 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)
        _within("temperature", self.temperature, 0.0, 2.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("top_k", self.top_k, -1, INT64 - 1)
        _within("seed", self.seed, -INT64, INT64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _within(name, count, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.top_p < 1e-6


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise RequestError(f"{name} is {value}; it must be between {low} and {high}.", param=name)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the scheduler.

    There is no prefill or decode state: `pending` says how far `computed` is behind `tokens`, and a step closes
    some of that gap. `admitted_len` is the length of `tokens` when it was last admitted. `blocks`, `hashes`,
    `published` and `cached` belong to the KV cache. A larger `priority` is less urgent; `arrival` numbers requests in
    the order they came, `arrived_s` is when, on the engine's clock.

        tokens    |--------- prompt ---------|--- sampled so far ---|
        computed  |-------- KV written or in flight ------|~ pending ~|
        published |-- full blocks, findable --|
    """

    id: str
    tokens: list[int]
    prompt_len: int
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    arrival: int = 0
    arrived_s: float = 0.0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    published: int = 0
    cached: int = 0
    evictions: int = 0
    admitted_len: int = 0
    prompt_logprobs: list[Logprob | None] | None = None

    @property
    def pending(self) -> int:
        """Positions to run before the next token can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True)
class Output:
    """What one step gave one request. The last one of a request carries `finish_reason`.

    `stop_token` is the stop token id that ended it, if one of `stop_token_ids` or EOS did; that token is the last
    of `tokens`. `prompt_logprobs` comes once, with the first Output; its first entry is None.
    `cached_tokens` counts the prompt's tokens whose KV came from the prefix cache.
    """

    request_id: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    error: str | None = None
