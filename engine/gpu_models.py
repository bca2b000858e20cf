"""Models for the GPU check: shapes with random weights that transformers can be given, too, and a judge of tokens."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.build import build_core
from engine.config import CacheConfig, EngineConfig
from engine.device import Device, choose_device
from engine.engine import Engine
from engine.model_config import ModelConfig
from engine.policies.preemption import Preemption
from engine.request import SamplingParams
from engine.weights import DummySource
from kernels.gpu_backend import TritonBackend

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, and how much of it to try: `batches` of decodes, prompts of `prompt` tokens, `new` of output each.

    `near`: a token need not be the best one if the best is ahead by less than this share of the largest logit, which
    is what the number type's rounding can turn round.
    """

    name: str
    sizes: dict[str, Any]
    dtype: str
    near: float
    batches: tuple[int, ...] = (1, 4)
    prompt: int = 20
    new: int = 4


TINY = {
    "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 200, "max_position_embeddings": 128,
}  # fmt: skip
SMALL = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "vocab_size": 32_000, "max_position_embeddings": 4096,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
MODELS = {
    "cpu": (Shape("tiny", TINY, "float32", 1e-4, (1, 3), 9, 3),),
    "cuda": (
        Shape("small", SMALL, "float32", 1e-4, (1, 32), 100, 32),
        Shape("Llama-3-8B-shaped", LLAMA_8B, "bfloat16", 2e-2, (1, 32, 128, 256), 128, 64),
    ),
}


def write_config(shape: Shape, folder: Path) -> Path:
    target = folder / shape.name
    target.mkdir(exist_ok=True)
    fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    ends = {"eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": False, "initializer_range": 0.02}
    (target / "config.json").write_text(json.dumps({**fixed, **ends, **shape.sizes}))
    return target


def engine(shape: Shape, folder: Path, device: torch.device, *, invariant: bool = False, **options: Any) -> Engine:
    """On a GPU as it would be served; without one with the Triton kernels in the interpreter."""
    most, longest = max(shape.batches), min(2048, shape.sizes["max_position_embeddings"])
    each = -(-(shape.prompt + 2 * shape.new) // BLOCK) + 1
    on_gpu = device.type == "cuda"
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        device=device.type,
        dtype=shape.dtype,
        max_model_len=longest,
        cache=CacheConfig(num_blocks=most * each + longest // BLOCK + 2, prefix=False),
        policy=Preemption(max_num_seqs=most, max_num_batched_tokens=2048 if on_gpu else 32),
        batch_invariant="require" if invariant and on_gpu else "off",
        **options,
    )

    def interpreted(config: EngineConfig, model_config: ModelConfig) -> Device:
        return Device(device, torch.float32, torch.float32, TritonBackend(invariant=invariant))

    return Engine(config, build_core(config, time.perf_counter, choose_device if on_gpu else interpreted))


def prompts(shape: Shape, count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, shape.sizes["vocab_size"]) for _ in range(shape.prompt)] for _ in range(count)]


def differing(shape: Shape, folder: Path, device: torch.device) -> tuple[int, int, int]:
    """Greedy tokens that transformers would not have chosen, requests that end in a near-tie, and tokens compared."""
    asked = prompts(shape, min(8, max(shape.batches)))
    params = SamplingParams(temperature=0.0, max_tokens=shape.new, ignore_eos=True)
    given = [completion.tokens for completion in engine(shape, folder, device).generate(asked, params)]
    judge = _transformers(shape, folder, device)
    wrong = ties = compared = 0
    for prompt, output in zip(asked, given, strict=True):
        for near, right in _verdicts(judge, shape, prompt, output):
            if near:
                ties += 1
                break
            compared, wrong = compared + 1, wrong + (not right)
    return wrong, ties, compared


@torch.inference_mode()
def _verdicts(judge: Any, shape: Shape, prompt: list[int], output: list[int]) -> Iterator[tuple[bool, bool]]:
    """For each token: whether it is one of several that are nearly as likely, and whether it is the best."""
    id_T = torch.tensor([[*prompt, *output]], device=judge.device)
    logits_TV: Tensor = judge(id_T, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    best = logits_TV.topk(2, dim=-1)
    near_T = best.values[:, 0] - best.values[:, 1] < shape.near * logits_TV.abs().amax(dim=-1)
    yield from zip(near_T.tolist(), (best.indices[:, 0].cpu() == torch.tensor(output)).tolist(), strict=True)


def _transformers(shape: Shape, folder: Path, device: torch.device) -> Any:
    """The same random weights in transformers' own model."""
    dtype = getattr(torch, shape.dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).eval()
    source = DummySource(dtype=dtype, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source.get(name, tuple(parameter.shape)))
    return model
