"""The offline API: `Engine(config).generate(prompts, params)` in any Python process, without Ray."""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field

from engine.build import build_core
from engine.config import EngineConfig
from engine.core import EngineCore, EngineStats
from engine.errors import SluiceError
from engine.intake import Limits
from engine.request import FinishReason, Logprob, Output, SamplingParams


@dataclass(slots=True)
class Completion:
    """What one prompt gave in the end."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0

    def add(self, output: Output) -> None:
        self.tokens += output.tokens
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = output.finish_reason
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)


class Engine:
    """Serves lists of prompts, all batched together, from this process.

    >>> engine = Engine(EngineConfig())
    >>> engine.generate([[504, 3575]], SamplingParams(temperature=0, max_tokens=4))[0].tokens  # doctest: +SKIP
    """

    def __init__(self, config: EngineConfig, core: EngineCore | None = None) -> None:
        """Raises ConfigError if the model cannot be had or does not fit. `core` replaces the one `config` describes."""
        self._core = core or build_core(config, clock=time.perf_counter)
        self._calls = 0

    @property
    def limits(self) -> Limits:
        return self._core.limits

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """One Completion per prompt, in order. `params` for all, or one each. RequestError if one can never run."""
        completions = [Completion() for _ in prompts]
        for index, output in self.stream(prompts, params):
            completions[index].add(output)
        return completions

    def stream(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[tuple[int, Output], None, None]:
        """(index of the prompt, Output) as the steps give them. Leaving early aborts what is not finished."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        index_of: dict[str, int] = {}
        self._calls += 1
        try:
            for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
                request_id = f"{self._calls}-{index}"
                self._core.add(request_id, prompt, own)
                index_of[request_id] = index
            while self._core.has_work:
                yield from self._step(index_of)
        finally:
            for request_id in index_of:
                self._core.abort(request_id)

    def stats(self) -> EngineStats:
        return self._core.stats()

    def _step(self, index_of: dict[str, int]) -> Iterator[tuple[int, Output]]:
        steps, in_flight = self._core.steps, self._core.in_flight
        output = self._core.step()
        if not output and self._core.steps == steps and not in_flight:
            raise SluiceError("The policy planned an empty step while requests wait; this is a bug in the policy.")
        for given in output:
            yield index_of[given.request_id], given
