"""The engine's thread: submissions, aborts and failures, with a fake executor that can be told to break."""

import threading
from collections.abc import Callable, Iterator

import pytest

from engine.contract import Sampled, StepPlan
from engine.errors import RequestError
from engine.loop import EngineLoop
from engine.request import FinishReason, Output, SamplingParams, StepOutput
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import prompt


class Fragile:
    """Fails the first step that runs the request it was told of."""

    def __init__(self, inner: Harness) -> None:
        self._memory = inner.memory
        self.poison: str | None = None
        self.compiling, self.compiled = threading.Event(), threading.Event()

    def prepare(self, params: SamplingParams) -> None:
        if params.grammar is not None:
            self.compiling.set()
            assert self.compiled.wait(30)
            if params.grammar == "wrong":
                raise RequestError("no such grammar", param="grammar")

    def submit(self, plan: StepPlan) -> Callable[[], Sampled]:
        if any(chunk.request.id == self.poison for chunk in plan):
            raise RuntimeError("a cosmic ray")
        return self._memory.submit(plan)


class Served:
    """A running loop, and all its outputs by request."""

    def __init__(self) -> None:
        self.harness = Harness()
        self.fragile = Fragile(self.harness)
        self.harness.core._executor = self.fragile
        self.outputs: dict[str, list[Output]] = {}
        self._news = threading.Condition()
        self.loop = EngineLoop(self.harness.core, self._publish)
        self.loop.start()

    def submit(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.loop.submit(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))

    def submit_with_grammar(self, request_id: str, grammar: str) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, grammar=grammar)
        self.loop.submit(request_id, [1] * 10, params)

    def wait_for(self, ready: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(ready, timeout=30), "nothing came"

    def finished(self, request_id: str) -> bool:
        outputs = self.outputs.get(request_id, [])
        return bool(outputs) and outputs[-1].finish_reason is not None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.tokens]

    def _publish(self, step: StepOutput) -> None:
        with self._news:
            for output in step:
                self.outputs.setdefault(output.request_id, []).append(output)
            self._news.notify_all()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.loop.stop()
    assert not served.loop.alive


@pytest.mark.parametrize("depth", [0, 1])
def test_after_a_failed_step_no_prefix_is_taken_from_copies_that_were_never_made(depth: int) -> None:
    """The step that fails owed a copy up from the host tier; its blocks were findable, and hold nothing."""
    engine = Harness(num_blocks=5, prefix=True, host_blocks=8, max_model_len=64, depth=depth)
    fragile = engine.core._executor = Fragile(engine)
    for name, seed in (("first", 1), ("other", 2)):
        engine.add(name, prompt(seed, 40), max_tokens=20)
        engine.run()
    fragile.poison = "brought up"
    engine.add("brought up", prompt(1, 40), max_tokens=2)
    with pytest.raises(RuntimeError, match="cosmic"):
        engine.run()
    engine.core.abort_all()
    engine.add(
        "again",
        prompt(1, 40),
        max_tokens=4,
    )
    engine.run()
    assert engine.tokens["again"] == expected_output(prompt(1, 40), 4)


def test_a_request_whose_grammar_is_being_compiled_keeps_nobody_waiting(served: Served) -> None:
    served.submit_with_grammar("slow", "right")
    assert served.fragile.compiling.wait(30)
    served.submit("other", [1] * 10, 4)
    served.wait_for(lambda: served.finished("other"))
    assert "slow" not in served.outputs
    served.fragile.compiled.set()
    served.wait_for(lambda: served.finished("slow"))
    assert len(served.tokens("slow")) == 4


def test_a_grammar_that_is_none_ends_its_request_alone(served: Served) -> None:
    served.fragile.compiled.set()
    served.submit_with_grammar("bad", "wrong")
    served.wait_for(lambda: served.finished("bad"))
    assert served.outputs["bad"][-1].error == "no such grammar"
    served.submit("next", [1], 1)
    served.wait_for(lambda: served.finished("next"))


def test_a_request_aborted_while_its_grammar_is_compiled_never_runs(served: Served) -> None:
    served.submit_with_grammar("gone", "right")
    assert served.fragile.compiling.wait(30)
    served.loop.abort(["gone"])
    served.submit("marker", [1], 1)
    served.wait_for(lambda: served.finished("marker"))
    served.fragile.compiled.set()
    served.submit_with_grammar("after", "right")
    served.wait_for(lambda: served.finished("after"))
    assert "gone" not in served.outputs


def test_requests_from_several_threads_all_get_their_own_tokens(served: Served) -> None:
    threads = [threading.Thread(target=served.submit, args=(f"r{i}", [i] * 10, 12)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    served.wait_for(lambda: all(served.finished(f"r{i}") for i in range(8)))
    for i in range(8):
        assert served.tokens(f"r{i}") == expected_output([i] * 10, 12, ignore_eos=True)


def test_an_abort_frees_blocks_and_no_output_follows(served: Served) -> None:
    served.submit("long", [1] * 10, 400)
    served.wait_for(lambda: "long" in served.outputs)
    served.loop.abort(["long", "unknown"])
    served.submit("after", [2] * 10, 1)
    served.wait_for(lambda: served.finished("after"))
    count = len(served.outputs["long"])
    served.submit("later", [3] * 10, 4)
    served.wait_for(lambda: served.finished("later"))
    assert len(served.outputs["long"]) == count and not served.finished("long")
    assert served.harness.kv.used_blocks == 0


def test_bad_input_is_refused_in_the_callers_thread(served: Served) -> None:
    with pytest.raises(RequestError, match="empty"):
        served.submit("bad", [], 4)
    served.submit("good", [1], 4)
    served.wait_for(lambda: served.finished("good"))


def test_a_failed_step_ends_its_requests_with_an_error_and_the_engine_lives(served: Served) -> None:
    served.fragile.poison = "poisoned"
    served.submit("poisoned", [1] * 10, 4)
    served.wait_for(lambda: served.finished("poisoned"))
    last = served.outputs["poisoned"][-1]
    assert last.finish_reason is FinishReason.ERROR and last.error is not None
    assert "cosmic" not in last.error
    served.submit("next", [2] * 10, 4)
    served.wait_for(lambda: served.finished("next"))
    assert served.tokens("next") == expected_output([2] * 10, 4, ignore_eos=True)
    assert served.harness.kv.used_blocks == 0


def test_an_idle_engine_is_not_stalled(served: Served) -> None:
    served.submit("one", [1], 1)
    served.wait_for(lambda: served.finished("one"))
    served.submit("two", [1], 1)
    served.wait_for(lambda: served.finished("two"))
    assert served.loop.stats().policy == "preemption"


def test_stopping_ends_the_thread_even_while_requests_run() -> None:
    served = Served()
    served.submit("endless", [1] * 10, 400)
    served.wait_for(lambda: "endless" in served.outputs)
    served.loop.stop()
    assert not served.loop.alive
