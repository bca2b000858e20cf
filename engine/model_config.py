"""The shape of a decoder, read from a model folder's config.json. No torch here."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# Architectures that `model.Decoder` runs itself; all others run through transformers' own modules.
OWN_ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
OWN_ROPE_TYPES = frozenset({"default", "linear", "llama3"})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder of the Llama family; `raw` is the whole config.json."""

    architecture: str
    vocab_size: int
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any]
    window: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    raw: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def own(self) -> bool:
        """Whether our own decoder runs this model."""
        scaling = self.rope_scaling.get("rope_type", "default")
        plain = self.raw.get("hidden_act", "silu") == "silu" and not self.raw.get("mlp_bias", False)
        mixed = len(set(self.raw.get("layer_types") or ["full_attention"])) > 1
        plain = plain and self.raw.get("partial_rotary_factor", 1.0) == 1.0
        return self.architecture in OWN_ARCHITECTURES and plain and not mixed and scaling in OWN_ROPE_TYPES


def read_config(folder: Path, translate: Callable[[Path], dict[str, Any]]) -> ModelConfig:
    """Raises ConfigError if the folder has no readable config.json.

    Other architectures have other names for the same sizes; `translate` reads them with transformers.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} cannot be read ({error}). Give a folder with config.json.") from None
    if not OWN_ARCHITECTURES.intersection(raw.get("architectures") or ()):
        raw = translate(folder)
    try:
        return _parse(raw, _eos_token_ids(folder, raw))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"model: {path} lacks {error}; is this the config.json of a decoder?") from None


def _parse(raw: dict[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    architecture = (raw.get("architectures") or ["unknown"])[0]
    heads = raw["num_attention_heads"]
    windowed = raw.get("use_sliding_window", architecture == "MistralForCausalLM")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        hidden=raw["hidden_size"],
        ffn=raw.get("intermediate_size") or 4 * raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        context=raw["max_position_embeddings"],
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=raw.get("rope_theta") or rope.get("rope_theta", 10000.0),
        rope_scaling=rope,
        window=(raw.get("sliding_window") or 0) if windowed else 0,
        tied=raw.get("tie_word_embeddings", False),
        qkv_bias=raw.get("attention_bias", architecture == "Qwen2ForCausalLM"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=eos_token_ids,
        raw=raw,
    )


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """The generation config may name several; the model config names at least the main one."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    ids: set[int] = set()
    for source in (generation, raw):
        value = source.get("eos_token_id")
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(ids))
