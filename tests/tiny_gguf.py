"""Tiny models with random weights, and GGUF files of them written the way llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("a b", "ab c", "Ġ a", "Ġ Ġ", "1 2", "12 3")


def tiny_model(model_type: str, **changes: object) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    models: Any = AutoModelForCausalLM
    model = models.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # norms and biases too: a weight lost or swapped must show
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 23)[None]).logits  # type: ignore[no-any-return]


def metadata(model: Any) -> dict[str, Any]:
    """Without the architecture's prefix: keys of one model, then of its tokenizer."""
    config = model.config
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }


def byte_level_tokenizer() -> dict[str, Any]:
    joined = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIALS, "<think>", *_byte_alphabet(), *joined, "xyz"]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def _byte_alphabet() -> list[str]:
    """GPT-2's letters for the 256 bytes: printable ones stand for themselves, the rest are moved up from 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in printable]
    letters = {**{byte: chr(byte) for byte in printable}, **{byte: chr(256 + i) for i, byte in enumerate(moved)}}
    return [letters[byte] for byte in range(256)]


def write_gguf(path: Path, model: Any, *, change: Mapping[str, Any] | None = None, **options: Any) -> Path:
    """`change` overrides metadata, None removes it; keys without a dot-separated family are the model's own.

    Options: `tensors` overrides or adds tensors by GGUF name, `architecture` the name of the architecture, `quantise`
    gives the type that each tensor is stored in.
    """
    architecture = options.get("architecture", model.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    fields = {f"{architecture}.{key}": value for key, value in metadata(model).items()}
    for key, value in {**fields, **byte_level_tokenizer(), **(change or {})}.items():
        _add_field(writer, key, value)
    for name, array in {**gguf_tensors(model, architecture), **options.get("tensors", {})}.items():
        _add_tensor(writer, name, array, options.get("quantise", _as_float32)(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_float32(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType.F32


def _add_field(writer: Any, key: str, value: Any) -> None:
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        add[type(value)](key, value)


def _add_tensor(writer: Any, name: str, array: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> None:
    if kind == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, array)
    else:
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray[Any, Any]]:
    tensors = {}
    for name, parameter in model.named_parameters():
        stem, kind = name.rsplit(".", 1)
        array = parameter.detach().numpy()
        if architecture == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = _neighbours(array, model.config, stem.endswith("q_proj"))
        tensors[f"{_gguf_stem(stem)}.{kind}"] = array
    return tensors


def _gguf_stem(stem: str) -> str:
    if stem in OUTER:
        return OUTER[stem]
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}"


def _neighbours(array: np.ndarray[Any, Any], config: Any, query: bool) -> np.ndarray[Any, Any]:
    """Row i of each half of a head becomes rows 2i and 2i + 1: what llama.cpp's rotation wants."""
    heads = config.num_attention_heads if query else config.num_key_value_heads
    dim = len(array) // heads
    order = [h * dim + half * dim // 2 + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return np.ascontiguousarray(array[order])
