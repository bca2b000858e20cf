"""Policy `retract`: prefill before decode, optimistic admission, take back the shortest when memory runs out.

    waiting ──five budgets──▶ prefilling ──last chunk──▶ decoding ──EOS, stop, length──▶ finished
       ▲                                                     │
       └──────────────────── retract ────────────────────────┘     output kept, KV dropped, arrival kept

The source of the algorithm is SGLang's scheduler. A request is admitted on the guess that each running one will use
only `new_token_ratio` of the output it may still make. Every quiet decode step lowers the guess; a retraction raises
it, and for a while keeps it (in its source it may fall at once, and the next admission is taken back again).
"""

from collections.abc import Callable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.contract import Step
from engine.policies.base import UNBOUNDED, PolicyBase
from engine.request import Request

MOST_CACHE_AWARE = 128  # a longer queue is served in order of arrival: looking every prefix up would cost too much
SCALES = (0.25, 4.0)  # how far adaptive arbitration may move the token budgets


class TokenRatio(BaseModel):
    """The guess starts at `init` · conservativeness, falls to `min_factor` of that within `decay_steps` steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    init: float = Field(0.7, gt=0.0, le=1.0)
    min_factor: float = Field(0.14, gt=0.0, le=1.0)
    decay_steps: int = Field(600, ge=1)


class Retract(PolicyBase):
    """Prefill budgets: `chunked_prefill_size` tokens a step, `max_prefill_tokens`, `prefill_max_requests`.

    A chunk is never smaller than a block. `max_consecutive_prefills` bounds how long decodes wait (None: for ever).
    `max_retractions` shields a request that was taken back so often. `arbitration` adaptive lets the two token budgets
    follow who waits.
    """

    kind: Literal["retract"] = "retract"
    chunked_prefill_size: int = Field(512, ge=1)
    max_prefill_tokens: int = Field(16384, ge=1)
    prefill_max_requests: int | None = Field(None, ge=1)
    schedule_conservativeness: float = Field(1.0, gt=0.0)
    new_token_ratio: TokenRatio = TokenRatio()
    clip_max_new_tokens: int = Field(4096, ge=1)
    order: Literal["fcfs", "lpm", "lof", "shortest-prefill"] = "fcfs"
    max_consecutive_prefills: int | None = Field(None, ge=1)
    retract_headroom_steps: int = Field(20, ge=0)
    max_retractions: int = Field(4, ge=1)
    arbitration: Literal["fixed", "adaptive"] = "fixed"

    def build(self) -> "RetractPolicy":
        return RetractPolicy(self)


class RetractPolicy:
    """Remembers the guess, how many prefills came in a row, the scale of the token budgets, and if somebody waited."""

    kind = "retract"

    def __init__(self, config: Retract) -> None:
        self.max_num_seqs = config.max_num_seqs
        self.ratio = _Guess(config)
        self._config = config
        self._prefills_in_a_row = 0
        self._scale = 1.0
        self._somebody_waited = False

    def plan(self, step: Step) -> None:
        if not step.running and not self._somebody_waited:
            self.ratio.reset()  # the engine was idle
        self._plan(step)
        self._somebody_waited = bool(step.waiting)

    def _plan(self, step: Step) -> None:
        decoding = [r for r in step.running if len(r.tokens) + r.promised != r.admitted_len]
        if self._may_prefill(step, decoding) and self._prefill(step, decoding):
            self._prefills_in_a_row += 1
            return
        self._prefills_in_a_row = 0
        self._decode(step, decoding)
        if not step.tokens and not step.evicted:
            self._progress(step)

    def _progress(self, step: Step) -> None:
        """The first in the queue runs: alone it fits, intake saw to that. Or the last of several blocked ones goes."""
        if not step.running and step.waiting:
            step.run(self._queue(step)[0], self._config.chunked_prefill_size)
        elif len(step.running) > 1 and not any(request.promised for request in step.running):
            step.evict(max(step.running, key=lambda request: request.arrival))

    def _may_prefill(self, step: Step, decoding: Sequence[Request]) -> bool:
        """Somebody could go on or join, and decodes have not waited too long."""
        joins = step.waiting and len(step.running) < self.max_num_seqs
        if not joins and len(decoding) == len(step.running):
            return False
        most = self._config.max_consecutive_prefills
        return not (decoding and most is not None and self._prefills_in_a_row >= most)

    def _prefill(self, step: Step, decoding: Sequence[Request]) -> bool:
        """Requests cut in the step before go on first; then the queue, until a budget is spent."""
        adder = PrefillAdder(self._config, step, self.ratio.value, self._scale)
        for request in tuple(step.running):
            if is_prefilling(request):
                adder.go_on(request)
        for request in self._queue(step):
            if not adder.admit(request):
                break
        if step.tokens:
            step.note(f"closed_by_{adder.closed_by}")
            self._arbitrate(adder.closed_by, bool(decoding))
        return step.tokens > 0

    def _decode(self, step: Step, decoding: Sequence[Request]) -> None:
        alive = self._retract_until_it_fits(step, decoding)
        passed = step.run_all(alive, UNBOUNDED, UNBOUNDED)
        assert passed == len(alive), "retraction has made room for every one of these"
        if step.evicted:
            self.ratio.raise_for(alive)
        elif alive:
            self.ratio.decay()

    def _retract_until_it_fits(self, step: Step, alive: Sequence[Request]) -> Sequence[Request]:
        """One victim at a time: the fewest tokens generated, then the longest prompt, then the latest.

        None lacks more than one block, so nothing has to be counted while there is one for each.
        """
        while len(alive) > step.kv.room and step.kv.lacking(alive) > step.kv.room:
            candidates = alive if len(alive) > 1 else [r for r in step.running if r is not alive[0]]
            if not candidates:
                return self._alone(step, alive[0])
            victim = self._victim(candidates)
            step.evict(victim)
            alive = [request for request in alive if request is not victim]
        return alive

    def _alone(self, step: Step, request: Request) -> Sequence[Request]:
        """It ends once its last token, if one is on its way, has been delivered."""
        if not request.promised:
            step.fail(request, "The KV pool is full and this request runs alone: its output ends here.")
        return []

    def _victim(self, candidates: Sequence[Request]) -> Request:
        shielded = self._config.max_retractions
        open_to_it = [request for request in candidates if request.evictions < shielded] or candidates
        return min(open_to_it, key=lambda request: (request.num_output, -request.prompt_len, -request.arrival))

    def _queue(self, step: Step) -> Sequence[Request]:
        order = self._config.order if len(step.waiting) <= MOST_CACHE_AWARE else "fcfs"
        return sorted(step.waiting, key=lambda request: (ORDERS[order](request, step), request.arrival))

    def _arbitrate(self, closed_by: str, decodes_wait: bool) -> None:
        """Adaptive: larger budgets while only prompts wait, smaller ones while decodes are kept waiting by them."""
        if self._config.arbitration == "fixed":
            return
        if decodes_wait and self._prefills_in_a_row:
            self._scale = max(SCALES[0], self._scale * 0.75)
        elif not decodes_wait and closed_by in ("chunk", "input"):
            self._scale = min(SCALES[1], self._scale * 1.25)


class PrefillAdder:
    """The five budgets of one prefill batch; the first that is spent closes it. Rebuilt at each step.

    kv: room for the prompts and for the output that all running requests are guessed to make; input and chunk: tokens
    of this step; count: requests of this batch; slots: requests that run.
    """

    def __init__(self, config: Retract, step: Step, ratio: float, scale: float) -> None:
        self.closed_by = "queue"
        self._config = config
        self._step = step
        self._chunk = max(int(config.chunked_prefill_size * scale), step.kv.block_size)
        self._input = max(int(config.max_prefill_tokens * scale), step.kv.block_size)
        self._count = config.prefill_max_requests or config.max_num_seqs
        self._kv = step.kv.room * step.kv.block_size - self._reserved(step.running, ratio)

    def _reserved(self, running: Sequence[Request], ratio: float) -> float:
        """Tokens that those who decode are guessed to make yet; all they may make if they ignore EOS."""
        clip = self._config.clip_max_new_tokens
        futures = [
            min(r.full_len - len(r.tokens), clip) * (1.0 if r.params.ignore_eos else ratio)
            for r in running
            if len(r.tokens) + r.promised != r.admitted_len
        ]
        return sum(futures)

    def go_on(self, request: Request) -> None:
        """A request that was cut before: it holds memory, so nobody new takes the room that it lacks."""
        if self._chunk > 0 and not self._run(request, self._cut(request.pending, request.computed) or self._chunk):
            self._kv = 0

    def admit(self, request: Request) -> bool:
        """False: a budget is spent, and this request was not admitted."""
        spent = self._spent(request)
        if spent is not None:
            self.closed_by = spent
            return False
        cached = self._step.kv.cached(request)
        length = self._cut(len(request.tokens) - cached, cached)
        if length == 0 or not self._run(request, length):
            self.closed_by = "chunk" if length == 0 else "kv"
            return False
        self._count -= 1
        return True

    def _spent(self, request: Request) -> str | None:
        """The budget that keeps this request out. The test of kv is strict, prefix and all."""
        size = self._step.kv.block_size
        wanted = self._step.kv.missing(request, len(request.tokens)) * size + self._future(request) + size
        left = {
            "slots": self._config.max_num_seqs - len(self._step.running),
            "count": self._count,
            "chunk": self._chunk,
            "input": self._input,
            "kv": self._kv - wanted,
        }
        return next((budget for budget, amount in left.items() if amount <= 0), None)

    def _run(self, request: Request, length: int) -> bool:
        tokens, room, size = self._step.tokens, self._step.kv.room, self._step.kv.block_size
        if not self._step.run(request, length):
            return False
        taken = (room - self._step.kv.room) * size  # a cached prefix that nobody held is no longer free
        self._kv -= taken + size + (self._future(request) if request.promised else 0)
        charged = -(-(self._step.tokens - tokens) // size) * size
        self._input -= charged
        self._chunk -= charged
        if not request.promised:
            self.closed_by = "chunk"
        return True

    def _cut(self, wanted: int, start: int) -> int:
        """All that is wanted, or what the chunk budget allows, down to a whole block: 0 if that is nothing."""
        if wanted <= self._chunk:
            return wanted
        size = self._step.kv.block_size
        whole = (start + self._chunk) // size * size - start
        return max(whole, 0)

    def _future(self, request: Request) -> int:
        return min(max(request.params.max_tokens - request.num_output, 0), self._config.clip_max_new_tokens)


class _Guess:
    """The new_token_ratio: which part of the output still allowed a running request will make."""

    def __init__(self, config: Retract) -> None:
        self._init = min(config.new_token_ratio.init * config.schedule_conservativeness, 1.0)
        self._min = config.new_token_ratio.min_factor * self._init
        self._decay = (self._init - self._min) / config.new_token_ratio.decay_steps
        self._headroom = config.retract_headroom_steps
        self._hold = 0
        self.value = self._init

    def reset(self) -> None:
        self.value, self._hold = self._init, 0

    def decay(self) -> None:
        if self._hold:
            self._hold -= 1
        else:
            self.value = max(self._min, self.value - self._decay)

    def raise_for(self, survivors: Sequence[Request]) -> None:
        """What the survivors have used so far, plus some steps each; never below the guess that was too low."""
        used = sum(request.num_output + self._headroom for request in survivors)
        allowed = sum(request.params.max_tokens for request in survivors) + 1
        self.value = max(self.value, min(used / allowed, 1.0))
        self._hold = self._headroom


ORDERS: dict[str, Callable[[Request, Step], int]] = {
    "fcfs": lambda request, step: 0,
    "lpm": lambda request, step: -step.kv.cached(request),
    "lof": lambda request, step: -request.params.max_tokens,
    "shortest-prefill": lambda request, step: len(request.tokens) - step.kv.cached(request),
}


def is_prefilling(request: Request) -> bool:
    """No step has sampled for it since it was admitted."""
    return len(request.tokens) + request.promised == request.admitted_len
