"""OpenVINO GenAI's continuous batching as a worker for measurements: same lines as `engine.bench`.

Runs in an environment of its own, on a model that optimum-intel exported; imports nothing of ours.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def greedy(tokens: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def run(pipeline: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """Times in seconds since the start, `tpot` after the first token."""
    outputs = workload["outputs"]
    start = time.perf_counter()
    handles = [
        pipeline.add_request(index, ov.Tensor(np.array([prompt], dtype=np.int64)), greedy(outputs[index]))
        for index, prompt in enumerate(workload["prompts"])
    ]
    first, last, seen, steps = [0.0] * len(outputs), [0.0] * len(outputs), [0] * len(outputs), 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        steps += 1
        now = time.perf_counter() - start
        for index, handle in enumerate(handles):
            if handle.can_read():
                seen[index] += sum(len(one.generated_ids) for one in handle.read().values())
                first[index] = first[index] or now
                last[index] = now
    tpot = [(end - one) / (n - 1) for one, end, n in zip(first, last, outputs, strict=True) if n > 1]
    return {"seconds": time.perf_counter() - start, "tokens": sum(seen), "ttft": first, "tpot": tpot, "steps": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="an exported folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step")
    options = parser.parse_args()
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = options.chunk
    scheduler.max_num_seqs = 64
    scheduler.cache_size = 1
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(
        options.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": options.threads}
    )
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(pipeline, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
