"""Ways to set a scene: prompts of any length, and steps in which requests run that have as much output as wanted."""

from collections import deque

from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, PrefixIndex
from engine.policies import PolicyConfig
from engine.request import Request, SamplingParams
from engine.scheduler import StepInTheMaking
from tests.fakes import EOS, expected_output
from tests.harness import Harness

NEXT = 5


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7) % 60 for i in range(length)]


def endless(seed: int, length: int, outputs: int) -> list[int]:
    """A prompt whose first `outputs` tokens are not EOS, for requests that may end by it and here do not."""
    for start in range(seed * 1000, (seed + 1) * 1000):
        candidate = [start % 60, start // 60 % 60, *prompt(seed, length - 2)]
        if EOS not in expected_output(candidate, outputs, ignore_eos=True):
            return candidate
    raise AssertionError("a thousand prompts, and EOS after each: ask for fewer outputs")


def until(engine: Harness, name: str, most: int = 500) -> list[tuple[str, int, int]]:
    """Step until `name` runs; that step."""
    for _ in range(most):
        ran = engine.step()
        if name in {request_id for request_id, _, _ in ran}:
            return ran
    raise AssertionError(f"{name} has not run in {most} steps")


class Scene:
    """A policy on a pool of `usable` blocks of 16 tokens. `plan` decides a step; whoever is up to date gets a token."""

    def __init__(self, policy: PolicyConfig, usable: int, index: PrefixIndex | None = None) -> None:
        self.policy = policy.build()
        self.kv = PagedKV(usable + 1, 16, index or HashedPrefix())
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._arrivals = 0

    def runs(
        self, name: str, prompt_len: int, num_output: int, *, max_tokens: int = 100, evictions: int = 0
    ) -> Request:
        """It has computed all but its last token, and is due to decode."""
        request = self._request(name, prompt_len + num_output, max_tokens, prompt_len)
        request.admitted_len, request.evictions = prompt_len, evictions
        assert self.kv.reserve(request, prompt_len + num_output - 1), "the scene does not fit"
        request.computed = prompt_len + num_output - 1
        self.running.append(request)
        return request

    def prefills(self, name: str, prompt_len: int, computed: int) -> Request:
        """It was cut, and has `prompt_len - computed` positions to go."""
        request = self._request(name, prompt_len, max_tokens=10)
        assert self.kv.reserve(request, computed), "the scene does not fit"
        request.computed, request.admitted_len = computed, prompt_len
        self.running.append(request)
        return request

    def waits(self, name: str, length: int, *, max_tokens: int = 10, num_output: int = 0) -> Request:
        request = self._request(name, length, max_tokens, length - num_output)
        self.waiting.append(request)
        return request

    def leaves(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.release(request)

    def remembers(self, request: Request, tokens: int) -> None:
        """The first `tokens` of this request are in the prefix index, in blocks that nobody holds."""
        earlier = Request("earlier", list(request.tokens), tokens)
        assert self.kv.reserve(earlier, tokens), "the scene does not fit"
        self.kv.publish(earlier, tokens)
        self.kv.release(earlier)

    def plan(self, now: float = 0.0) -> StepInTheMaking:
        step = StepInTheMaking(self.waiting, self.running, self.kv, now)
        self.policy.plan(step)
        self.kv.check(self.running)
        for chunk in step.decided(()):
            self.kv.publish(chunk.request, chunk.end)
            chunk.request.tokens += [NEXT] * chunk.samples
            chunk.request.promised -= chunk.samples
        return step

    def _request(self, name: str, length: int, max_tokens: int, prompt_len: int | None = None) -> Request:
        self._arrivals += 1
        tokens = [self._arrivals * 1000 + i for i in range(length)]
        params = SamplingParams(max_tokens=max_tokens)
        return Request(name, tokens, prompt_len or length, params, arrival=self._arrivals)

    def names(self) -> list[str]:
        """Of those who wait, the front of the queue first."""
        return [request.id for request in self.waiting]


def ran(step: StepInTheMaking) -> list[tuple[str, int]]:
    """(request, tokens) of a planned step, in order of admission."""
    lengths = {chunk.request: chunk.length for chunk in step.decided(())}
    return [(request.id, lengths[request]) for request in step.running if request in lengths]


def evicted(step: StepInTheMaking) -> list[str]:
    return [request.id for request in step.evicted]
