"""The engine as a worker for measurements: a workload a line on stdin, its times and step anatomy a line on stdout.

{"prompts": [[1, 2, 3]], "outputs": [16]}  →  {"seconds": 0.4, "ttft": [0.1], "tpot": [0.02], "steps": 16, "parts": …}
{"score": [[1, 2, 3]]}  →  {"logprob": -7.3, "scored": 2}
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from engine.config import CacheConfig, EngineConfig
from engine.engine import Engine
from engine.policies import Preemption
from engine.request import SamplingParams
from engine.speculate import NGramDrafts, NoDrafts


def run(engine: Engine, workload: dict[str, Any]) -> dict[str, Any]:
    """Greedy, EOS ignored, so that every engine does the same work. Times in seconds, `tpot` after the first token."""
    each = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in workload["outputs"]]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    ids: list[list[int]] = [[] for _ in each]
    before, start = engine.stats(), time.perf_counter()
    for index, output in engine.stream(workload["prompts"], each):
        ids[index] += output.tokens
        last[index] = time.perf_counter() - start
        first.setdefault(index, last[index])
    after = engine.stats()
    times = [(first[index], last[index], n) for index, n in enumerate(workload["outputs"])]
    return {
        "seconds": time.perf_counter() - start,
        "tokens": sum(workload["outputs"]),
        "ids": ids,
        "ttft": [one for one, _, _ in times],
        "tpot": [(end - one) / (n - 1) for one, end, n in times if n > 1],
        "steps": after.steps - before.steps,
        "parts": {part: after.part_seconds[part] - before.part_seconds[part] for part in after.part_seconds},
    }


def score(engine: Engine, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The log probability of all tokens but each text's first, and how many they are."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scored = [entry for one in engine.generate(texts, params) for entry in one.prompt_logprobs or () if entry]
    return {"logprob": sum(entry.logprob for entry in scored), "scored": len(scored)}


def answer(engine: Engine, order: dict[str, Any]) -> dict[str, Any]:
    return score(engine, order["score"]) if "score" in order else run(engine, order)


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=EngineConfig().model)
    made.add_argument("--threads", type=int, default=None, help="default: all cores")
    made.add_argument("--dtype", default="auto", choices=("auto", "float32"))
    made.add_argument("--quantization", default="none", choices=("none", "int8"))
    made.add_argument("--drafts", action="store_true", help="guess tokens from the text itself")
    made.add_argument("--chunk", type=int, default=512, help="max_num_batched_tokens")
    return made


def config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        model=options.model,
        threads=options.threads,
        dtype=options.dtype,
        quantization=options.quantization,
        drafts=NGramDrafts() if options.drafts else NoDrafts(),
        cache=CacheConfig(memory_fraction=0.15, prefix=False),
        policy=Preemption(max_num_batched_tokens=options.chunk, max_num_seqs=min(64, options.chunk)),
    )


def main() -> None:
    assert __doc__ is not None
    engine = Engine(config(parser(__doc__).parse_args()))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
