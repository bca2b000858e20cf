"""An engine that plays golden answers and holds its callers to their side of the contract."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence

from deployments.client import EngineInfo, Submission
from engine.errors import SluiceError
from engine.intake import Limits, check
from engine.request import FinishReason, Logprob, Output

EOS = 2
LIMITS = Limits(max_model_len=512, kv_tokens=512, vocab_size=49152, eos_token_ids=(EOS,))

# What the default model answers greedily.
ALPHA = "The letters run ABC"
ALPHA_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127]  # DEF GH I J K LM N OP QR ST
COUNT = "1, 2, 3, 4, 5,"
COUNT_TEXT = " 6, 7, 8, 9, 10, 11, 12,"
COUNT_IDS = [
    *(216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28),
    *(216, 33, 32, 28, 216, 33, 33, 28, 216, 33, 34, 28),
]
BLUE = "My favourite colour is"
BLUE_IDS = [4461, 30, EOS, 198, 1, 520, 9531, 198]
EMOJI = "😊 😊 😊 😊 😊"
EMOJI_IDS = [198, 198, 10813, 235, 119, 10813, 235, 119]

PROMPTS = {
    (504, 5073, 1658, 17638): ALPHA_IDS,
    (33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28): COUNT_IDS,
    (5965, 20334, 7302, 314): BLUE_IDS,
    (10813, 242, 228, 40303, 228, 40303, 228, 40303, 228, 40303, 228): EMOJI_IDS,
}


class ScriptedEngine:
    """Answers known prompts with their golden ids and all others with COUNT's, one token a step.

    It keeps the engine's promises (limits, stop tokens, log probabilities) and holds callers to theirs: only checked
    submissions with fresh ids may come, and `running` shows which were not closed.
    """

    def __init__(self, scripts: Mapping[tuple[int, ...], Sequence[int]] | None = None, limits: Limits = LIMITS) -> None:
        self.scripts = {**PROMPTS, **(scripts or {})}
        self.limits = limits
        self.policy = "preemption"
        self.cached_tokens = 0
        self.logprob = -0.5
        self.unavailable: SluiceError | None = None
        self.failures: dict[int, SluiceError | Exception | FinishReason] = {}  # by how many tokens come before
        self.hold_after: int | None = None  # tokens after which an answer waits for ever
        self.holding = asyncio.Event()
        self.submissions: list[Submission] = []
        self.running: set[str] = set()
        self.idle = asyncio.Event()  # set while nothing runs, after something did
        self.steps = 0

    async def describe(self) -> EngineInfo:
        if self.unavailable:
            raise self.unavailable
        return EngineInfo("fake", self.policy, self.limits)

    async def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        check(submission.prompt, submission.params, self.limits)
        assert submission.id not in {known.id for known in self.submissions}
        self.submissions.append(submission)
        if self.unavailable:
            raise self.unavailable
        self.running.add(submission.id)
        self.idle.clear()
        try:
            async for output in self._play(submission):
                yield output
        finally:
            self.running.remove(submission.id)
            if not self.running:
                self.idle.set()

    async def _play(self, submission: Submission) -> AsyncGenerator[Output, None]:
        script = self.scripts.get(tuple(submission.prompt), COUNT_IDS)
        first = Output(submission.id, prompt_logprobs=self._prompt_rows(submission), cached_tokens=self.cached_tokens)
        if submission.params.max_tokens == 0:
            yield first._replace(finish_reason=FinishReason.LENGTH)
            return
        for position, token in enumerate(script[: submission.params.max_tokens]):
            await self._step(position)
            yield self._output(submission, first, position, token)
            first = Output(submission.id, cached_tokens=self.cached_tokens)
            if token in self._stop_ids(submission):
                return

    async def _step(self, position: int) -> None:
        failure = self.failures.get(position)
        if isinstance(failure, Exception):
            raise failure
        if position == self.hold_after:
            self.holding.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        self.steps += 1

    def _output(self, submission: Submission, output: Output, position: int, token: int) -> Output:
        params = submission.params
        output = output._replace(tokens=(token,))
        if params.logprobs is not None:
            output = output._replace(logprobs=[self._row(token, params.logprobs)])
        failure = self.failures.get(position)
        if isinstance(failure, FinishReason):
            return output._replace(finish_reason=failure, error="Traceback (most recent call last): secret")
        if token in self._stop_ids(submission):
            return output._replace(finish_reason=FinishReason.STOP, stop_token=token)
        if position + 1 == params.max_tokens:
            return output._replace(finish_reason=FinishReason.LENGTH)
        return output

    def _stop_ids(self, submission: Submission) -> tuple[int, ...]:
        eos = () if submission.params.ignore_eos else self.limits.eos_token_ids
        return (*eos, *submission.params.stop_token_ids)

    def _prompt_rows(self, submission: Submission) -> list[Logprob | None] | None:
        count = submission.params.prompt_logprobs
        return None if count is None else [None, *(self._row(token, count) for token in submission.prompt[1:])]

    def _row(self, token: int, count: int) -> Logprob:
        return Logprob(token, self.logprob, tuple((token + i, self.logprob - i) for i in range(count)))
