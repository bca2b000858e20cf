"""Our engine beside others on this machine: same model, prompts, lengths and threads, in turns, as ratios.

Others than transformers live in environments of their own; name the command of a worker that speaks the lines of
`engine.bench`: --peer 'openvino=/path/of/venv/bin/python loadtests/openvino_worker.py --model /path/of/export'.
"""

import argparse
import json
import random
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

from engine.catalogue import resolve
from engine.config import EngineConfig
from loadtests.workers import Worker, module, start

Workload = dict[str, Any]
Result = dict[str, Any]
OURS = {
    "sluice": (),
    "sluice int8": ("--quantization", "int8"),
    "sluice float32": ("--dtype", "float32"),
    "sluice drafts": ("--drafts",),
    "sluice int8 drafts": ("--quantization", "int8", "--drafts"),
}


def uniform(batch: int, prompt: int, new: int) -> Workload:
    rng = random.Random(batch)
    prompts = [[rng.randrange(3, 40_000) for _ in range(prompt)] for _ in range(batch)]
    return {"prompts": prompts, "outputs": [new] * batch}


def repetitive(prompt: int, new: int) -> Workload:
    """A sentence of 16 tokens over and over: what drafts are good for."""
    rng = random.Random(0)
    sentence = [rng.randrange(3, 40_000) for _ in range(16)]
    return {"prompts": [(sentence * prompt)[:prompt]], "outputs": [new]}


def mixed(batch: int, longest_prompt: int, longest_output: int) -> Workload:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(rng.randint(32, longest_prompt))] for _ in range(batch)]
    return {"prompts": prompts, "outputs": [rng.randint(16, longest_output) for _ in range(batch)]}


WORKLOADS = {
    "decode, batch 1": uniform(1, 128, 128),
    "decode, batch 1, repetitive": repetitive(128, 128),
    "decode, batch 8": uniform(8, 128, 128),
    "decode, batch 32": uniform(32, 128, 128),
    "prefill, 512 tokens": uniform(1, 512, 1),
    "prefill, 2048 tokens": uniform(1, 2048, 1),
    "mixed, 32 requests": mixed(32, 512, 256),
}


def rate(label: str, workload: Workload, result: Result) -> float:
    """Tokens per second: of prompts, or of output; a decode's are those after the last request's first token."""
    seconds: float = result["seconds"]
    tokens: int = sum(workload["outputs"])
    if "prefill" in label:
        return sum(map(len, workload["prompts"])) / seconds
    if "decode" in label:
        first: float = max(result["ttft"])
        return (tokens - len(workload["outputs"])) / (seconds - first)
    return tokens / seconds


def measure(workers: Sequence[Worker], workload: Workload, rounds: int) -> dict[str, list[Result]]:
    """A B A B …: the machine's moods hit all of them."""
    results: dict[str, list[Result]] = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            results[worker.name].append(worker.run(workload))
    return results


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def latencies(run: Result) -> str:
    if not run["tpot"]:
        return ""
    ttft, tpot = percentile(run["ttft"], 0.5), percentile(run["tpot"], 0.99)
    return f"   TTFT p50 {ttft:5.2f} s, TPOT p99 {tpot:5.3f} s"


def report(label: str, workload: Workload, results: dict[str, list[Result]]) -> dict[str, Any]:
    """Medians over the rounds; the ratio is to the best of the others in the same round."""
    rates = {name: [rate(label, workload, run) for run in runs] for name, runs in results.items()}
    others = [name for name in rates if name not in OURS]
    print(f"\n{label}")
    for name, each in rates.items():
        line = f"  {name:24}{statistics.median(each):9.1f} tok/s"
        if others and name in OURS:
            ratios = sorted(own / max(rates[other][turn] for other in others) for turn, own in enumerate(each))
            line += f"   {statistics.median(ratios):5.2f} of the best peer ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        if "mixed" in label:
            line += latencies(results[name][0])
        print(line, flush=True)
    return {"workload": label, "tokens_per_s": rates}


def workers(options: argparse.Namespace) -> list[Worker]:
    threads = ("--threads", str(options.threads))
    made = [
        start(name, module("engine.bench", *threads, *OURS[name])) for name in options.ours or ("sluice", "sluice int8")
    ]
    if not options.without_transformers:
        defaults = EngineConfig()
        folder = resolve(defaults.model, defaults.model_cache)
        made.append(start("transformers", module("loadtests.transformers_worker", "--model", str(folder), *threads)))
    for peer in options.peer:
        name, _, command = peer.partition("=")
        made.append(start(name, [*shlex.split(command), *threads]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns per engine and workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ours", choices=OURS, action="append", help="default: sluice and sluice int8")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="another engine's worker")
    parser.add_argument("--without-transformers", action="store_true")
    parser.add_argument("--only", help="run the workloads whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON list at the end")
    options = parser.parse_args()
    running = workers(options)
    for worker in running:
        worker.wait_until_ready()
        worker.run(uniform(2, 16, 2))
    chosen = {label: workload for label, workload in WORKLOADS.items() if (options.only or "") in label}
    results = [report(label, one, measure(running, one, options.rounds)) for label, one in chosen.items()]
    for worker in running:
        worker.stop()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
