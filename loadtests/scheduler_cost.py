"""What a step costs when no model runs: planning it, and taking in its tokens, per policy and number of requests.

`decode`: so many running requests each get a token, block borders in their true proportion. `prefill`: prompts of 8,192
tokens are admitted, one a step, hashed for the prefix cache; `prefill, cached`: the same ones again. With --vllm the
Scheduler of an installed vLLM decodes beside ours, in a process of its own, in turns. All times in microseconds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix
from engine.contract import Sampled
from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from loadtests import vllm_scheduler
from loadtests.workers import Worker, start

BLOCK = 16
PROMPT = 32
LONG_PROMPT = 8192
LONG_PROMPTS = 16
STEPS = 2 * BLOCK  # a round: two blocks of each request
TOKEN = 5
Key = TypeVar("Key")
POLICIES = ("preemption", "retract", "static")


@dataclass(frozen=True, slots=True)
class Times:
    plan_us: float
    resolve_us: float

    @property
    def total(self) -> float:
        return self.plan_us + self.resolve_us


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds, and the spread. For a prefill `running` counts the requests that were admitted."""

    engine: str
    policy: str
    case: str
    running: int
    us_per_step: float
    us_per_request: float
    plan_us: float
    resolve_us: float
    min: float
    max: float
    rounds: int


class Decodes(Protocol):
    @property
    def engine(self) -> str: ...

    @property
    def policy(self) -> str: ...

    def round(self, steps: int) -> Times:
        """Mean of so many steps, in each of which every request gets a token."""
        ...


class OurDecodes:
    """`running` requests with their prompts computed, and room for all that the rounds will give them."""

    engine = "sluice"

    def __init__(self, policy: str, running: int, rounds: int) -> None:
        self.policy = policy
        self._running = running
        output = (rounds + 2) * STEPS
        blocks = running * (-(-(PROMPT + output) // BLOCK) + 1)
        kv = PagedKV(blocks + 1, BLOCK, HashedPrefix())
        self._scheduler = Scheduler(roomy(policy, running, running * PROMPT).build(), kv)
        for number in range(running):
            tokens = [number % 100] * (PROMPT - 1) + [number]
            self._scheduler.add(Request(f"r{number}", tokens, PROMPT, SamplingParams(max_tokens=output)))
        while self._scheduler.num_waiting:
            step(self._scheduler)

    def round(self, steps: int) -> Times:
        times = [step(self._scheduler, expected=self._running) for _ in range(steps)]
        return Times(statistics.fmean(t.plan_us for t in times), statistics.fmean(t.resolve_us for t in times))


@dataclass(frozen=True, slots=True)
class TheirDecodes:
    """In another process; `policy` is their version."""

    worker: Worker
    policy: str
    engine: str = "vllm"

    def round(self, steps: int) -> Times:
        return Times(**self.worker.run({"steps": steps}))


class Rival:
    """vLLM in `path`: a folder to import it from, or a Python that has it."""

    def __init__(self, path: Path) -> None:
        script = str(vllm_scheduler.__file__)
        command = [str(path), script] if path.is_file() else [sys.executable, script, str(path)]
        self._worker = start("vllm", command)
        self._version = str(self._worker.wait_until_ready()["version"])

    def decodes(self, running: int) -> TheirDecodes:
        self._worker.run({"new": running, "prompt": PROMPT})
        return TheirDecodes(self._worker, self._version)

    def stop(self) -> None:
        self._worker.stop()


def step(scheduler: Scheduler, expected: int | None = None) -> Times:
    start = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    assert expected is None or len(plan.decodes) == expected, "not every request was served"
    sampled = Sampled([TOKEN] * len(plan))
    resolving = time.perf_counter()
    scheduler.resolve(plan, sampled)
    return Times(1e6 * (planned - start), 1e6 * (time.perf_counter() - resolving))


def roomy(policy: str, seqs: int, tokens: int) -> PolicyConfig:
    """No budget of the policy is ever short."""
    tokens = max(tokens, seqs, BLOCK)
    choices: dict[str, PolicyConfig] = {
        "preemption": Preemption(max_num_seqs=seqs, max_num_batched_tokens=tokens),
        "retract": Retract(
            max_num_seqs=seqs, chunked_prefill_size=tokens, max_prefill_tokens=2 * tokens, clip_max_new_tokens=1
        ),
        "static": Static(max_num_seqs=seqs),
    }
    return choices[policy]


@dataclass(frozen=True, slots=True)
class Named:
    engine: str
    policy: str


def measure_decodes(engines: Sequence[Decodes], running: int, rounds: int) -> list[Row]:
    """In turns, so that the machine's moods hit all of them; the first turn is to warm up."""
    times: dict[Decodes, list[Times]] = {engine: [] for engine in engines}
    for number in range(rounds + 1):
        for engine in engines:
            times[engine].append(engine.round(STEPS if number else BLOCK))
    return [row(engine, "decode", running, times[engine][1:]) for engine in engines]


def measure_prefills(policy: str, rounds: int) -> list[Row]:
    """Admissions one by one; each round has prompts of its own, and then has them again."""
    cold, warm = [], []
    for number in range(rounds):
        blocks = 2 * LONG_PROMPTS * (LONG_PROMPT // BLOCK + 1)
        kv = PagedKV(blocks + 1, BLOCK, HashedPrefix())
        scheduler = Scheduler(roomy(policy, 1, LONG_PROMPT).build(), kv)
        cold.append(admit_all(scheduler, number))
        warm.append(admit_all(scheduler, number))
    ours = Named("sluice", policy)
    return [row(ours, "prefill", LONG_PROMPTS, cold), row(ours, "prefill, cached", LONG_PROMPTS, warm)]


def admit_all(scheduler: Scheduler, seed: int) -> Times:
    """Sums over the steps that admit and finish each of the long prompts, which give one token."""
    for number in range(LONG_PROMPTS):
        tokens = [(seed * 31 + number * 7 + place * place) % 30_000 for place in range(LONG_PROMPT)]
        scheduler.add(Request(f"p{number}", tokens, LONG_PROMPT, SamplingParams(max_tokens=1)))
    times = []
    while scheduler.has_work:
        times.append(step(scheduler))
    return Times(sum(t.plan_us for t in times), sum(t.resolve_us for t in times))


def row(engine: Decodes | Named, case: str, requests: int, times: Sequence[Times]) -> Row:
    """A prefill's times are of all its steps, one a request; a decode's are of one step for all."""
    steps = 1 if case == "decode" else requests
    totals = sorted(t.total / steps for t in times)
    median = statistics.median(totals)
    return Row(
        engine.engine,
        engine.policy,
        case,
        requests,
        us_per_step=round(median, 2),
        us_per_request=round(median * steps / requests, 3),
        plan_us=round(statistics.median(t.plan_us for t in times) / steps, 2),
        resolve_us=round(statistics.median(t.resolve_us for t in times) / steps, 2),
        min=round(totals[0], 2),
        max=round(totals[-1], 2),
        rounds=len(times),
    )


def measure(policies: Sequence[str], counts: Sequence[int], rounds: int, rivals: Sequence[Rival]) -> Iterator[Row]:
    for running in counts:
        say(f"{running} decodes …")
        ours = [OurDecodes(policy, running, rounds) for policy in policies]
        yield from measure_decodes([*ours, *(rival.decodes(running) for rival in rivals)], running, rounds)
    for policy in policies:
        say(f"{policy}: admission of prompts of {LONG_PROMPT} tokens …")
        yield from measure_prefills(policy, rounds)


def table(rows: Sequence[Row]) -> str:
    titles = f"{'µs/step':>12}{'µs/request':>12}{'plan':>10}{'resolve':>10}"
    lines = [f"{'engine':10}{'policy':12}{'case':16}{'requests':>8}{titles}"]
    for one in rows:
        name = f"{one.engine:10}{one.policy:12}{one.case:16}{one.running:8,}"
        parts = f"{one.plan_us:10,.1f}{one.resolve_us:10,.1f}"
        lines.append(f"{name}{one.us_per_step:12,.1f}{one.us_per_request:12,.3f}{parts}")
    return "\n".join([*lines, *linearity(rows), *ratios(rows)])


def linearity(rows: Sequence[Row]) -> Iterable[str]:
    for (engine, policy), own in by(rows, lambda one: (one.engine, one.policy)).items():
        decodes = sorted((one for one in own if one.case == "decode"), key=lambda one: one.running)
        if len(decodes) > 1:
            first, last = decodes[0], decodes[-1]
            growth = f"{last.us_per_request / first.us_per_request:.2f} times"
            yield f"{engine} {policy}: a request among {last.running:,} costs {growth} one among {first.running:,}"


def ratios(rows: Sequence[Row]) -> Iterable[str]:
    for running, alike in by([one for one in rows if one.case == "decode"], lambda one: one.running).items():
        theirs = [one for one in alike if one.engine == "vllm"]
        for one in alike:
            if theirs and one.engine != "vllm":
                faster = theirs[0].us_per_step / one.us_per_step
                yield f"{running:,} decodes: vLLM's step takes {faster:.1f} times as long as ours under {one.policy}"


def by(rows: Sequence[Row], key: Callable[[Row], Key]) -> dict[Key, list[Row]]:
    groups: dict[Key, list[Row]] = {}
    for one in rows:
        groups.setdefault(key(one), []).append(one)
    return groups


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    parser.add_argument("--running", default="64,256,1024,4096", help="numbers of running decodes, with commas between")
    parser.add_argument("--policies", default=",".join(POLICIES), help="with commas between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", type=Path, help="a folder with vLLM in it, or a Python that can import it")
    options = parser.parse_args(arguments)
    policies = options.policies.split(",")
    if unknown := set(policies) - set(POLICIES):
        parser.error(f"--policies: {', '.join(sorted(unknown))} is not known; choose among {', '.join(POLICIES)}")
    counts = [int(count) for count in options.running.split(",")]
    rivals = [Rival(options.vllm)] if options.vllm else []
    rows = list(measure(policies, counts, options.rounds, rivals))
    for rival in rivals:
        rival.stop()
    print(json.dumps([asdict(one) for one in rows]) if options.json else table(rows))


if __name__ == "__main__":
    main()
