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
    cache = CacheConfig(num_blocks=40, dtype="float32")
    fields: dict[str, Any] = {"model": str(model), "cache": cache, "batch_invariant": "require"}
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
    half = engine(tiny_model(tmp_path / "plain"))
    other = engine(rounded(tiny_model(tmp_path / "rounded")), dtype="float32")
    tight = engine(
        tmp_path / "plain",
        evict_every_steps=3,
        policy=Preemption(max_num_batched_tokens=16, max_num_seqs=4),
    )
    expected = [other.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    for given in (half.generate(PROMPTS, PARAMS), tight.generate(PROMPTS, PARAMS)):
        assert [(one.tokens, one.logprobs) for one in given] == [(one.tokens, one.logprobs) for one in expected]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_stored_in_fewer_bits_it_is_independent_of_the_batch_all_the_same(tmp_path: Path, quantization: str) -> None:
    """The defaults: weights and KV in float16; then weights in int8."""
    plain = engine(tiny_model(tmp_path), quantization=quantization, cache=CacheConfig(num_blocks=40))
    tight = engine(
        tmp_path,
        quantization=quantization,
        cache=CacheConfig(num_blocks=40),
        evict_every_steps=3,
        policy=Preemption(max_num_batched_tokens=16, max_num_seqs=4),
    )
    expected = [plain.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
    given = tight.generate(PROMPTS, PARAMS)
    assert [(one.tokens, one.logprobs) for one in given] == [(one.tokens, one.logprobs) for one in expected]


def test_where_no_kernel_quantizes_the_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"only the compiled CPU kernels.*Write quantization: none") as caught:
        engine(tiny_model(tmp_path), quantization="int8", dtype="bfloat16")
    assert caught.value.param == "quantization"


def test_a_model_whose_linears_are_not_ours_is_not_said_to_be_quantized(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"transformers' modules.*Write quantization: none") as caught:
        engine(tiny_model(tmp_path), quantization="int8", implementation="transformers")
    assert caught.value.param == "quantization"


def test_kv_that_no_kernel_takes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"take float16, float32\. Write dtype: auto") as caught:
        engine(tiny_model(tmp_path), cache=CacheConfig(num_blocks=40, dtype="bfloat16"))
    assert caught.value.param == "cache.dtype"


def test_eight_bit_kv_serves_where_plain_torch_computes(tmp_path: Path) -> None:
    cache = CacheConfig(num_blocks=40, dtype="float8_e4m3fn")
    given = engine(tiny_model(tmp_path), dtype="bfloat16", cache=cache, batch_invariant="off").generate(PROMPTS, PARAMS)
    assert [len(one.tokens) for one in given] == [20] * len(PROMPTS)


def test_a_weight_that_is_too_large_is_told(tmp_path: Path) -> None:
    file = tiny_model(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.tensor(1e5)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"too large.*Write dtype: float32"):
        engine(tmp_path)
