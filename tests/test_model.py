"""Our decoder and transformers' own give the same greedy tokens, on tiny random models of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, SamplingParams
from engine.config import CacheConfig
from engine.errors import ConfigError
from engine.foreign import load_foreign
from engine.policies import Preemption
from tests import oracle

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
OWN = {
    "llama": transformers.LlamaConfig(**SIZES),
    "llama, tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama, biases": transformers.LlamaConfig(**SIZES, attention_bias=True),
    "llama 3 rope": transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama, linear rope": transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "llama, wide heads": transformers.LlamaConfig(**SIZES, head_dim=48),
    "llama, odd heads": transformers.LlamaConfig(**SIZES, head_dim=20),
    "mistral, window": transformers.MistralConfig(**SIZES, sliding_window=24),
    "mistral": transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
}
FOREIGN = {
    "gpt2": transformers.GPT2Config(
        vocab_size=320, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    ),
    "gemma2, window and soft caps": transformers.Gemma2Config(**SIZES, head_dim=16, sliding_window=24),
    "olmo2": transformers.Olmo2Config(**SIZES),
    "qwen3 moe": transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}
# One prompt of every length around block and chunk borders; more of them than the pool can hold at once.
PROMPTS = [[(i * 37 + j * 11) % 300 + 3 for j in range(n)] for i, n in enumerate((1, 2, 15, 16, 17, 31, 33, 64, 90))]


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0.0, 0.2)  # zero biases would hide a bias that is left out
    model.save_pretrained(folder)
    return folder


def tiny_engine(folder: Path, **options: Any) -> Engine:
    cache = CacheConfig(num_blocks=17)
    policy = Preemption(max_num_batched_tokens=48, max_num_seqs=6)
    return Engine(
        EngineConfig(
            model=str(folder), max_model_len=256, cache=cache, policy=policy, **{"dtype": "float32", **options}
        )
    )


def check_against_transformers(folder: Path, **options: Any) -> Engine:
    engine = tiny_engine(folder, **options)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    completions = engine.generate(PROMPTS, params)
    judge = oracle.load(folder)
    verdicts = [oracle.judge(judge, p, c.tokens) for p, c in zip(PROMPTS, completions, strict=True)]
    assert sum(verdict.compared for verdict in verdicts) > 300, "too many near-ties to say anything"
    assert engine.stats().evictions > 0, "the pool was meant to be too small"
    return engine


@pytest.mark.parametrize("name", OWN)
def test_our_decoder_equals_transformers(name: str, tmp_path: Path) -> None:
    check_against_transformers(saved(OWN[name], tmp_path))


@pytest.mark.parametrize("name", FOREIGN)
def test_other_decoders_run_through_transformers_with_our_paged_attention(name: str, tmp_path: Path) -> None:
    check_against_transformers(saved(FOREIGN[name], tmp_path))


def test_our_own_families_can_be_run_through_transformers_too(tmp_path: Path) -> None:
    check_against_transformers(saved(OWN["llama"], tmp_path), implementation="transformers")


def test_a_decoder_that_paged_attention_would_get_wrong_is_refused(tmp_path: Path) -> None:
    bloom = transformers.BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.2)
    with pytest.raises(ConfigError, match="other logits"):
        load_foreign(saved(bloom, tmp_path), "auto", torch.float32, torch.device("cpu"))


def test_a_tensor_that_our_decoder_would_leave_out_is_refused(tmp_path: Path) -> None:
    saved(OWN["llama"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"model.layers.0.mlp.gate_proj.bias": torch.zeros(96)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"gate_proj\.bias.*implementation: transformers"):
        tiny_engine(tmp_path)


def test_dummy_weights_serve_any_config_and_repeat(tmp_path: Path) -> None:
    OWN["qwen3"].architectures = ["Qwen3ForCausalLM"]
    OWN["qwen3"].save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second = (tiny_engine(tmp_path, load_format="dummy").generate(PROMPTS[:3], params) for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in second]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 257}, r"max_model_len is 257.*256"),
        ({"cache": CacheConfig(num_blocks=8)}, r"8 blocks.*max_model_len 256.*num_blocks: 17"),
        ({"cache": CacheConfig(num_blocks=10**9)}, r"num_blocks is 1000000000.*free"),
        ({"device": "cuda"}, r"device is cuda.*device: cpu"),
    ],
)
def test_what_cannot_work_is_refused_at_start_with_the_way_out(options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(EngineConfig(model=str(saved(OWN["llama"], tmp_path)), **options))
