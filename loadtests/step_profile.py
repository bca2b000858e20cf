"""Where a decode step's time goes on this machine, and how far that is from the least it could take.

The floor is the larger of two times: to read all weights and the KV once, and to multiply; bandwidth and rate are
measured in the same run. One table per way to keep the weights.
"""

import argparse
import json
import random
from typing import Any

from engine.timing import PARTS
from loadtests.workers import Worker, module, start

KINDS = {"16 bits": (), "int8": ("--quantization", "int8"), "32 bits": ("--dtype", "float32")}
COLUMNS = ("plan", "prepare", "linears", "attention", "other", "sample", "publish")


def workload(batch: int, prompt: int, new: int) -> dict[str, Any]:
    rng = random.Random(batch)
    prompts = [[rng.randrange(3, 40_000) for _ in range(prompt)] for _ in range(batch)]
    return {"prompts": prompts, "outputs": [new] * batch}


def anatomy(result: dict[str, Any], prefill: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a decode step by part: a run less the same prompts with one token of output."""
    steps = result["steps"] - prefill["steps"]
    parts = {part: 1e3 * (result["parts"][part] - prefill["parts"][part]) / steps for part in PARTS}
    inside = {part: 1e3 * (result["inside"][part] - prefill["inside"][part]) / steps for part in result["inside"]}
    parts["other"] = parts.pop("forward") - sum(inside.values())
    return {**parts, **inside}


def profile(worker: Worker, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    prefill = worker.run(workload(batch, options.prompt, 1))
    result = worker.run(workload(batch, options.prompt, options.new))
    parts = anatomy(result, prefill)
    step, floor = sum(parts.values()), 1e3 * result["floor"]
    shown = "".join(f"{parts[part]:11.2f}" for part in COLUMNS)
    print(f"{batch:6}{shown}{step:9.1f}{floor:8.1f}{step / floor:8.2f}{1e3 * batch / step:10.0f}", flush=True)
    return {"batch": batch, "ms": parts, "step_ms": step, "floor_ms": floor, "machine": result["machine"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, action="append", help="how weights are kept; default: all three")
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8, 32")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=48, help="decode steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object at the end")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for kind in options.kind or KINDS:
        worker = start(kind, module("engine.profile_worker", "--threads", str(options.threads), *KINDS[kind]))
        worker.wait_until_ready()
        names = "".join(f"{name:>11}" for name in COLUMNS)
        print(f"\nweights in {kind}: milliseconds of a decode step")
        print(f"{'batch':>6}{names}{'step':>9}{'floor':>8}{'ratio':>8}{'tokens/s':>10}")
        results[kind] = [profile(worker, batch, options) for batch in options.batch or (1, 8, 32)]
        worker.stop()
    if options.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
