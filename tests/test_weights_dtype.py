"""Linears' weights in half precision: as if they had been rounded before, exact in all else, refused where unknown."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, EngineConfig, SamplingParams
from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.policies import Preemption
from tests.matrix import tiny_model

PROMPTS = [[3 + i, 5, 7, 11] * 6 for i in range(4)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
NORMS = ("norm.weight", "embed_tokens.weight")


def engine(model: Path, **options: Any) -> Engine:
    fields: dict[str, Any] = {"model": str(model), "cache": CacheConfig(num_blocks=40), "batch_invariant": "require"}
    return Engine(EngineConfig(**{**fields, **options}))


def rounded(folder: Path) -> Path:
    """The same model, with the weights of its linears rounded to float16."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if not name.endswith(NORMS):
            tensors[name] = tensor.half().float()
    save_file(tensors, file, {"format": "pt"})
    return folder


def test_it_is_the_model_with_rounded_weights_whatever_is_batched_or_evicted(tmp_path: Path) -> None:
    half = engine(tiny_model(tmp_path / "plain"), weights="float16")
    other = engine(rounded(tiny_model(tmp_path / "rounded")))
    tight = engine(
        tmp_path / "plain",
        weights="float16",
        evict_every_steps=3,
        policy=Preemption(max_num_batched_tokens=16, max_num_seqs=4),
    )
    expected = [other.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    for given in (half.generate(PROMPTS, PARAMS), tight.generate(PROMPTS, PARAMS)):
        assert [(one.tokens, one.logprobs) for one in given] == [(one.tokens, one.logprobs) for one in expected]


def test_where_no_kernel_takes_them_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only the compiled CPU kernels.*Write weights: same") as caught:
        engine(tiny_model(tmp_path), weights="float16", dtype="bfloat16")
    assert caught.value.param == "weights"


def test_a_weight_that_is_too_large_is_told(tmp_path: Path) -> None:
    file = tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.tensor(1e5)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"too large.*Write weights: same"):
        engine(tmp_path, weights="float16")
