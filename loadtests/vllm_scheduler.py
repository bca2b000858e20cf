"""vLLM's own Scheduler without a model, as a worker for loadtests.scheduler_cost: a JSON line in, a JSON line out.

Run by an interpreter, or with a path, that can import vLLM. Nothing of ours is imported, so that it may lack ours.
{"new": n, "prompt": 32}: n requests are added and prefilled; {"steps": k}: k decode steps; the answer has microseconds.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 16
LONGEST = 16384
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32000,
    "max_position_embeddings": LONGEST,
    "torch_dtype": "float32",
}


class Decodes:
    """`running` requests in a scheduler of their own, and the seconds that its two halves of a step take."""

    def __init__(self, running: int, prompt: int) -> None:
        self._scheduler = new_scheduler(running, prompt)
        for number in range(running):
            self._scheduler.add_request(new_request(number, [number % 100] * (prompt - 1) + [number]))
        while self._scheduler.waiting:
            self.step()

    def step(self) -> tuple[float, float]:
        start = time.perf_counter()
        plan = self._scheduler.schedule()
        planned = time.perf_counter()
        output = sampled(plan)
        resolving = time.perf_counter()
        self._scheduler.update_from_output(plan, output)
        return planned - start, time.perf_counter() - resolving


def sampled(plan: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(ids, {name: row for row, name in enumerate(ids)}, [[5] for _ in ids])


def new_request(number: int, tokens: list[int]) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    params = SamplingParams(max_tokens=LONGEST - len(tokens), ignore_eos=True)
    hasher = get_request_block_hasher(BLOCK, hash_function)
    return Request(f"r{number}", tokens, params, None, block_hasher=hasher)


def new_scheduler(running: int, prompt: int) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)
        config = VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(
                max_num_seqs=running,
                max_num_batched_tokens=max(running * prompt, LONGEST),
                max_model_len=LONGEST,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
        )
    blocks = running * 128 + LONGEST // BLOCK
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, kv, StructuredOutputManager(config), block_size=BLOCK)


def answers() -> Iterator[dict[str, Any]]:
    decodes = None
    for line in sys.stdin:
        order = json.loads(line)
        if "new" in order:
            decodes = Decodes(order["new"], order["prompt"])
            yield {}
        else:
            assert decodes is not None, "no scheduler yet"
            times = [decodes.step() for _ in range(order["steps"])]
            plan, resolve = (1e6 * sum(half) / len(times) for half in zip(*times, strict=True))
            yield {"plan_us": plan, "resolve_us": resolve}


def main() -> None:
    if len(sys.argv) > 1:
        sys.path.insert(0, sys.argv[1])
    answered = sys.stdout
    sys.stdout = sys.stderr  # what vLLM prints is no answer
    import vllm

    print(json.dumps({"version": vllm.__version__}), file=answered, flush=True)
    for answer in answers():
        print(json.dumps(answer), file=answered, flush=True)


if __name__ == "__main__":
    main()
