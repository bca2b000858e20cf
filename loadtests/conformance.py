"""Replay recorded schedules through policy `preemption` and name the first step in which it differs, and why.

A record holds requests and, for each step, the tokens scheduled per request and who was evicted. No model runs: every
request has token ids of its own, never EOS. A difference is explained if it is one that the policy makes on purpose,
and that is judged by the step itself; see loadtests/explanations.py.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, NoPrefix, PrefixIndex
from engine.contract import Policy, Sampled, Step
from engine.policies.preemption import Preemption
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from loadtests.explanations import Before, Outcome, explain

TOKENS_PER_REQUEST = 1 << 16  # so far apart are the token ids of two requests


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordedRequest(Record):
    """It is added before step `arrival_step`; a smaller `priority` is more urgent."""

    id: str
    arrival_step: int = Field(ge=0)
    prompt_len: int = Field(ge=1)
    max_tokens: int = Field(ge=1)
    priority: int = 0


class RecordedStep(Record):
    scheduled: dict[str, int]
    evicted: list[str]


class Schedule(Record):
    """One scenario. `num_blocks` includes block 0, which is not usable; the requests are in order of arrival."""

    name: str
    block_size: int = Field(ge=1)
    num_blocks: int = Field(ge=2)
    usable_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    order: Literal["fcfs", "priority"]
    prefix_cache: bool
    requests: list[RecordedRequest]
    steps: list[RecordedStep]

    def policy(self) -> Policy:
        """With what a record knows nothing of turned off: nobody passes, nobody ages, no block is kept free."""
        return Preemption(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            order=self.order,
            max_bypass=0,
            aging_seconds=0.0,
            watermark=0.0,
        ).build()


SCHEDULES = TypeAdapter(list[Schedule])


@dataclass(frozen=True, slots=True)
class Difference:
    """The first step that differs. `reason` None: nothing that we do on purpose explains it."""

    scenario: str
    step: int
    theirs: Outcome
    ours: Outcome
    reason: str | None


class Watched:
    """A policy; who ran before its last step, and who was evicted in it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.max_num_seqs = policy.max_num_seqs
        self.kind = policy.kind
        self.running: list[str] = []
        self.evicted: list[str] = []

    def plan(self, step: Step) -> None:
        self.running = [request.id for request in step.running]
        self._policy.plan(step)
        self.evicted = [request.id for request in step.evicted]


class WatchedKV(PagedKV):
    """`planned` is the furthest position that was ever granted to a request, also if its chunk was then undone."""

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex) -> None:
        super().__init__(num_blocks, block_size, index)
        self.planned: Counter[str] = Counter()

    def reserve(self, request: Request, limit: int) -> int:
        granted = super().reserve(request, limit)
        self.planned[request.id] = max(self.planned[request.id], request.computed + granted)
        return granted


class Replay:
    """Our scheduler, fed with a recorded scenario's requests."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._policy = Watched(schedule.policy())
        index = HashedPrefix() if schedule.prefix_cache else NoPrefix()
        self._kv = WatchedKV(schedule.num_blocks, schedule.block_size, index)
        self._scheduler = Scheduler(self._policy, self._kv)
        self._requests: dict[str, Request] = {}
        self._since_admission: Counter[str] = Counter()
        self._reached: Counter[str] = Counter()
        self._steps = 0

    @property
    def done(self) -> bool:
        return len(self._requests) == len(self._schedule.requests) and not self._scheduler.has_work

    def first_difference(self) -> Difference | None:
        for number, recorded in enumerate(self._schedule.steps):
            theirs = Outcome(recorded.scheduled, recorded.evicted)
            ours, before = self.step()
            if ours != theirs:
                return Difference(self._schedule.name, number, theirs, ours, explain(before, theirs, ours))
        if self.done:
            return None
        return Difference(self._schedule.name, self._steps, Outcome({}, []), self.step()[0], None)

    def step(self) -> tuple[Outcome, Before]:
        """Plan and pretend to run one step. What was done, and how things stood before."""
        self._add_arrivals()
        standing = self._standing()
        chunks = self._scheduler.plan()
        before = replace(standing, running=self._policy.running)
        for name in self._policy.evicted:
            del self._since_admission[name]
        for chunk in chunks:
            self._since_admission[chunk.request.id] += chunk.length
            self._reached[chunk.request.id] = max(self._reached[chunk.request.id], chunk.end)
        self._scheduler.resolve(chunks, Sampled([chunk.request.tokens[-1] + 1 for chunk in chunks if chunk.samples]))
        self._scheduler.check()
        self._steps += 1
        scheduled = {chunk.request.id: chunk.length for chunk in chunks}
        return Outcome(scheduled, self._policy.evicted), before

    def _standing(self) -> Before:
        """All but who runs: that is known when the policy is asked."""
        return Before(
            block_size=self._schedule.block_size,
            budget=self._schedule.max_num_batched_tokens,
            running=[],
            lengths={name: len(request.tokens) for name, request in self._requests.items()},
            since_admission=dict(self._since_admission),
            planned=dict(self._kv.planned),
            reached=dict(self._reached),
        )

    def _add_arrivals(self) -> None:
        for number, recorded in enumerate(self._schedule.requests):
            if recorded.arrival_step == self._steps:
                start = number * TOKENS_PER_REQUEST
                tokens = list(range(start, start + recorded.prompt_len))
                params = SamplingParams(max_tokens=recorded.max_tokens)
                request = Request(recorded.id, tokens, recorded.prompt_len, params, recorded.priority)
                self._requests[recorded.id] = request
                self._scheduler.add(request)


def compare(schedules: list[Schedule]) -> dict[str, Any]:
    """Counts, and every difference with its reason, ready for JSON."""
    found = [difference for schedule in schedules if (difference := Replay(schedule).first_difference())]
    explained = sum(difference.reason is not None for difference in found)
    return {
        "scenarios": len(schedules),
        "equal": len(schedules) - len(found),
        "explained": explained,
        "different": len(found) - explained,
        "differences": [asdict(difference) for difference in found],
    }


def table(schedules: list[Schedule], result: dict[str, Any]) -> str:
    found = {difference["scenario"]: difference for difference in result["differences"]}
    width = max(len("scenario"), *(len(schedule.name) for schedule in schedules))
    lines = [f"{'scenario':{width}} {'steps':>5} {'evictions':>9}  result"]
    for schedule in schedules:
        evictions = sum(len(step.evicted) for step in schedule.steps)
        verdict = describe(found[schedule.name]) if schedule.name in found else "equal"
        lines.append(f"{schedule.name:{width}} {len(schedule.steps):5} {evictions:9}  {verdict}")
    counts = ", ".join(f"{result[kind]} {kind}" for kind in ("equal", "explained", "different"))
    return "\n".join([*lines, f"{result['scenarios']} scenarios: {counts}"])


def describe(difference: dict[str, Any]) -> str:
    if difference["reason"]:
        return f"explained, step {difference['step']}: {difference['reason']}"
    sides = (f"{side} ran {difference[side]['scheduled']}, evicted {difference[side]['evicted']}" for side in SIDES)
    return f"DIFFERENT, step {difference['step']}: {'; '.join(sides)}"


SIDES = ("theirs", "ours")


def main(arguments: list[str] | None = None) -> int:
    """1 if a difference is not explained."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="a JSON list of recorded scenarios")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    options = parser.parse_args(arguments)
    try:
        schedules = SCHEDULES.validate_json(options.file.read_bytes())
    except (OSError, ValidationError) as error:
        parser.error(f"file {options.file} holds no recorded schedules: {error}")
    result = compare(schedules)
    print(json.dumps(result) if options.json else table(schedules, result))
    return 1 if result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
