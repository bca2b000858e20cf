"""The scheduler under every policy as a state machine: any order of arrivals, steps, aborts, flushes and new policies.

Conservation is checked after each rule; whoever finishes has exactly the tokens of an undisturbed run.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.request import SamplingParams
from tests.fakes import Guesses, expected_output
from tests.harness import Harness
from tests.scenarios import prompt

LONGEST = 96


def policies() -> st.SearchStrategy[PolicyConfig]:
    seqs, tokens = st.integers(1, 6), st.sampled_from([8, 16, 40])
    return st.one_of(
        st.builds(
            Preemption,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            order=st.sampled_from(["fcfs", "priority"]),
            long_prefill_token_threshold=st.sampled_from([0, 5]),
            watermark=st.sampled_from([0.0, 0.2]),
            max_bypass=st.integers(0, 2),
            aging_seconds=st.sampled_from([0.0, 4.0]),
        ),
        st.builds(
            Retract,
            max_num_seqs=seqs,
            chunked_prefill_size=tokens,
            prefill_max_requests=st.sampled_from([None, 1]),
            clip_max_new_tokens=st.sampled_from([1, 4096]),
            order=st.sampled_from(["fcfs", "lpm", "lof", "shortest-prefill"]),
            max_consecutive_prefills=st.sampled_from([None, 1]),
            max_retractions=st.sampled_from([1, 4]),
            arbitration=st.sampled_from(["fixed", "adaptive"]),
        ),
        st.builds(Static, max_num_seqs=seqs),
    )


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.engine = Harness()
        self.wanted: dict[str, list[int]] = {}
        self.count = 0

    @initialize(
        policy=policies(),
        num_blocks=st.integers(7, 30),
        prefix=st.booleans(),
        host_blocks=st.sampled_from([0, 2, 12]),
        depth=st.integers(0, 1),
        evict_every_steps=st.sampled_from([0, 0, 3]),
        guesses=st.sampled_from([None, Guesses(3, 2), Guesses(4, 99)]),
    )
    def start(self, guesses: Guesses | None, **options: object) -> None:
        self.engine = Harness(drafts=guesses, max_model_len=LONGEST, **options)  # type: ignore[arg-type]

    @rule(
        family=st.integers(0, 2),
        length=st.sampled_from([1, 15, 16, 17, 33, 48]),
        max_tokens=st.integers(0, 40),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def add(self, family: int, length: int, max_tokens: int, priority: int, salt: str) -> None:
        self.count += 1
        name, start = f"r{self.count}", prompt(family, length)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.engine.core.add(name, start, params, priority=priority, cache_salt=salt)
        self.engine.tokens[name] = []
        self.wanted[name] = expected_output(start, max_tokens)

    @precondition(lambda self: self.engine.core.has_work)
    @rule(steps=st.integers(1, 5))
    def run_steps(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.core.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.engine.core.abort(name):
            self.wanted[name] = self.wanted[name][: len(self.engine.tokens[name])]

    @rule(policy=policies())
    def change_policy(self, policy: PolicyConfig) -> None:
        self.engine.core.set_policy(policy)

    @rule()
    def flush(self) -> None:
        self.engine.core.clear_prefix_cache()

    @invariant()
    def nothing_is_lost(self) -> None:
        self.engine.scheduler.check()

    @invariant()
    def what_was_delivered_is_right(self) -> None:
        for name, tokens in self.engine.tokens.items():
            assert tokens == self.wanted[name][: len(tokens)]

    def teardown(self) -> None:
        self.engine.run()
        assert self.engine.tokens == self.wanted
        self.engine.scheduler.check()


SchedulerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase
