"""The engine as a worker for measurements: a workload a line on stdin, its seconds and step anatomy a line on stdout.

{"prompts": [[1, 2, 3]], "outputs": [16]}  →  {"seconds": 0.4, "tokens": 16, "steps": 16, "parts": {"plan": …}}
"""

import argparse
import json
import sys
import time
from typing import Any

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.policies import Preemption
from engine.request import SamplingParams


def run(engine: Engine, workload: dict[str, Any]) -> dict[str, Any]:
    """Greedy, EOS ignored, so that every engine does the same work."""
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in workload["outputs"]]
    before, start = engine.stats(), time.perf_counter()
    completions = engine.generate(workload["prompts"], each)
    seconds, after = time.perf_counter() - start, engine.stats()
    parts = {part: after.part_seconds[part] - before.part_seconds[part] for part in after.part_seconds}
    tokens = sum(len(completion.tokens) for completion in completions)
    return {"seconds": seconds, "tokens": tokens, "steps": after.steps - before.steps, "parts": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--threads", type=int, default=None, help="default: all cores")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32"))
    parser.add_argument("--quantization", default="none", choices=("none", "int8"))
    parser.add_argument("--chunk", type=int, default=512, help="max_num_batched_tokens")
    options = parser.parse_args()
    engine = Engine(
        EngineConfig(
            model=options.model,
            threads=options.threads,
            dtype=options.dtype,
            quantization=options.quantization,
            cache=CacheConfig(memory_fraction=0.2, prefix=False),
            policy=Preemption(max_num_batched_tokens=options.chunk, max_num_seqs=min(64, options.chunk)),
        )
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
