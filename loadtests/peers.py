"""Our engine beside transformers on this machine: same model, prompts, lengths and threads, in turns, as ratios."""

import argparse
import json
import random
import statistics
from typing import Any

from engine.catalogue import resolve
from engine.config import EngineConfig
from engine.timing import PARTS
from loadtests.workers import Worker, module, start

Workload = dict[str, Any]


def uniform(batch: int, prompt: int, new: int) -> Workload:
    rng = random.Random(batch)
    prompts = [[rng.randrange(3, 40_000) for _ in range(prompt)] for _ in range(batch)]
    return {"prompts": prompts, "outputs": [new] * batch}


def mixed(batch: int, longest_prompt: int, longest_output: int) -> Workload:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 40_000) for _ in range(rng.randint(32, longest_prompt))] for _ in range(batch)]
    return {"prompts": prompts, "outputs": [rng.randint(16, longest_output) for _ in range(batch)]}


WORKLOADS = {
    "decode, batch 1": uniform(1, 16, 64),
    "decode, batch 8": uniform(8, 16, 64),
    "decode, batch 32": uniform(32, 16, 32),
    "prefill, 512 tokens": uniform(1, 512, 1),
    "mixed, batch 32": mixed(32, 512, 256),
}


def measure(workers: list[Worker], workload: Workload, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """A B A B …: the machine's moods hit both."""
    results: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for _ in range(rounds):
        for worker in workers:
            results[worker.name].append(worker.run(workload))
    return results


def report(label: str, results: dict[str, list[dict[str, Any]]], work: int) -> dict[str, Any]:
    """`work` is what a rate counts: output tokens, or prompt tokens for a prefill."""
    rates = {name: statistics.median(work / run["seconds"] for run in runs) for name, runs in results.items()}
    ours, theirs = results["sluice"], results["transformers"]
    ratios = sorted(theirs[i]["seconds"] / ours[i]["seconds"] for i in range(len(ours)))
    shown = "   ".join(f"{name} {rate:8.1f} tok/s" for name, rate in rates.items())
    print(f"{label:22} {shown}   ratio {statistics.median(ratios):5.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")
    steps = sum(run["steps"] for run in ours)
    parts = {part: 1e3 * sum(run["parts"][part] for run in ours) / steps for part in PARTS}
    print(" " * 23 + "ms per step: " + "  ".join(f"{part} {ms:.2f}" for part, ms in parts.items()), flush=True)
    return {"workload": label, "tokens_per_s": rates, "ratios": ratios, "ms_per_step": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="turns per engine and workload")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32"), help="of our weights and KV")
    parser.add_argument("--quantization", default="none", choices=("none", "int8"), help="of our linears")
    parser.add_argument("--only", help="run the workloads whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON list at the end")
    options = parser.parse_args()
    defaults = EngineConfig()
    folder = resolve(defaults.model, defaults.model_cache)
    threads = ("--threads", str(options.threads))
    workers = [
        start(
            "sluice", module("engine.bench", *threads, "--dtype", options.dtype, "--quantization", options.quantization)
        ),
        start("transformers", module("loadtests.transformers_worker", "--model", str(folder), *threads)),
    ]
    for worker in workers:
        worker.wait_until_ready()
        worker.run(uniform(2, 16, 2))
    results = []
    for label, workload in WORKLOADS.items():
        if options.only and options.only not in label:
            continue
        counted = workload["prompts"][0] if "prefill" in label else range(sum(workload["outputs"]))
        results.append(report(label, measure(workers, workload, options.rounds), len(counted)))
    for worker in workers:
        worker.stop()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
