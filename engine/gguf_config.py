"""GGUF metadata → the content of config.json and generation_config.json. Numbers only; no weights, no text."""

import math
from typing import Any

import numpy as np

from engine.gguf_reader import GgufFile

MODEL_CLASSES = {  # Mistral and SmolLM2 come under the name llama
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
ROPE_FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_config(source: GgufFile) -> dict[str, Any]:
    """What config.json says. Raises ConfigError for an architecture or a rotary embedding that is not supported."""
    if source.architecture not in MODEL_CLASSES:
        known = ", ".join(MODEL_CLASSES)
        raise source.error(f"has architecture {source.architecture!r}; supported are {known}. Use safetensors instead.")
    heads = number(source, "attention.head_count")
    return {
        "architectures": [MODEL_CLASSES[source.architecture]],
        "model_type": source.architecture,
        "hidden_size": number(source, "embedding_length"),
        "intermediate_size": number(source, "feed_forward_length"),
        "num_hidden_layers": number(source, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number(source, "attention.head_count_kv", heads),
        "head_dim": _head_dim(source, heads),
        "max_position_embeddings": number(source, "context_length"),
        "rms_norm_eps": _real(source, "attention.layer_norm_rms_epsilon"),
        "rope_theta": _rope_theta(source),
        "rope_scaling": _rope_scaling(source),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in source.names,
        "vocab_size": source.shape("token_embd.weight")[0],
        "tie_word_embeddings": "output.weight" not in source.names,
        "torch_dtype": "float32",
        **_special_ids(source),
    }


def generation_config(source: GgufFile) -> dict[str, Any]:
    """What generation_config.json says: the end of the text and the end of a turn both end a generation."""
    ends = (special_token(source, "eos"), special_token(source, "eot"))
    return {**_special_ids(source), "eos_token_id": sorted({end for end in ends if end is not None})}


def special_token(source: GgufFile, name: str) -> int | None:
    """The id of the special token `name` (bos, eos, eot, unknown, padding), if the file has one."""
    token = source.value(f"tokenizer.ggml.{name}_token_id", int, None)
    if token is not None and token >= (count := len(source.value("tokenizer.ggml.tokens", list))):
        raise source.error(f"gives {name} the token id {token}, but has {count} tokens only. Convert it again.")
    return token


def number(source: GgufFile, key: str, *default: int) -> int:
    """The architecture's own positive integer `key`."""
    value = source.value(f"{source.architecture}.{key}", int, *default)
    if value < 1:
        raise source.error(f"says that {key} is {value}; it must be positive. Convert the model again.")
    return value


def _real(source: GgufFile, key: str, *default: float) -> float:
    """A float32 as the decimal number that was meant: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(source.value(f"{source.architecture}.{key}", float, *default))))


def _special_ids(source: GgufFile) -> dict[str, int]:
    ids = {f"{short}_token_id": special_token(source, name) for short, name in SPECIAL_TOKENS.items()}
    return {key: token for key, token in ids.items() if token is not None}


def _head_dim(source: GgufFile, heads: int) -> int:
    head_dim = number(source, "attention.key_length", number(source, "embedding_length") // heads)
    rotary = number(source, "rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise source.error(f"turns {rotary} of a head's {head_dim} dimensions; only all of them is supported.")
    return head_dim


def _rope_theta(source: GgufFile) -> float:
    return _real(source, "rope.freq_base", 10000.0)


def _rope_scaling(source: GgufFile) -> dict[str, Any] | None:
    if ROPE_FACTORS in source.names:
        return _llama3_scaling(source)
    kind = source.value(f"{source.architecture}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise source.error(
            f"stretches its context by {kind!r}; supported are linear and yarn. Use safetensors instead."
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _real(source, "rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = number(source, "rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(source: GgufFile) -> dict[str, Any]:
    """The file holds the finished divisors of the frequencies; find the formula's parameters and prove them."""
    divisors = source.tensor(ROPE_FACTORS)
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3}
    if not np.allclose(divisors, _llama3_divisors(_rope_theta(source), len(divisors), scaling), rtol=1e-4):
        raise source.error("scales its rotary frequencies in a way that is not Llama 3's. Use safetensors instead.")
    return scaling


def _llama3_divisors(theta: float, half_dim: int, scaling: dict[str, Any]) -> list[float]:
    """Per rotary pair: 1 for short waves, `factor` for long ones, a blend of the two between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    divisors = []
    for pair in range(half_dim):
        turns = scaling["original_max_position_embeddings"] * theta ** (-pair / half_dim) / (2 * math.pi)
        short = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / (short + (1 - short) / scaling["factor"]))
    return divisors
