"""GGUF → model folder. The weights are the file's values exactly, dequantised to float32, under Hugging Face's names.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tqdm import tqdm

from engine.gguf_config import ROPE_FACTORS, generation_config, model_config, number
from engine.gguf_reader import GgufFile
from engine.gguf_tokenizer import write_tokenizer

SHARD_BYTES = 1 << 30
Weights = npt.NDArray[np.float32]

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(path: Path, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the model in the GGUF file `path` into the empty `folder`, in weight files of at most `shard_bytes`.

    Raises ConfigError if the file is damaged or holds anything that would not be converted faithfully, OSError if
    the folder cannot be written.
    """
    source = GgufFile(path)
    config = model_config(source)
    names = {name: _weight_name(source, name) for name in source.names if name != ROPE_FACTORS}
    write_tokenizer(source, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(source))
    _write_weights(source, names, folder, shard_bytes)


def _weight_name(source: GgufFile, name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight" | "bias" as kind] if part in LAYER_NAMES:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
    raise source.error(f"holds {name}, a tensor not known of {source.architecture} models. Use safetensors instead.")


def _write_weights(source: GgufFile, names: Mapping[str, str], folder: Path, shard_bytes: int) -> None:
    shards = list(_shards(source, list(names), shard_bytes))
    where: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        with tqdm(shard, desc=f"Converting {file}", unit="tensor") as bar:
            tensors = {names[name]: _weights(source, name) for name in bar}
        where |= dict.fromkeys(tensors, file)
        _save(tensors, folder / file)
    if len(shards) > 1:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": where})


def _shards(source: GgufFile, names: Sequence[str], shard_bytes: int) -> Iterator[list[str]]:
    """Groups of tensors of one shard each, so that a large model is never in memory as a whole."""
    shard: list[str] = []
    size = 0
    for name in names:
        tensor_size = 4 * int(np.prod(source.shape(name)))
        if shard and size + tensor_size > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += tensor_size
    yield shard


def _weights(source: GgufFile, name: str) -> Weights:
    weights = source.tensor(name)
    if source.architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return weights
    heads = number(source, "attention.head_count")
    if ".attn_k." in name:
        heads = number(source, "attention.head_count_kv", heads)
    if len(weights) % (2 * heads):
        raise source.error(f"says that {name} has {heads} heads, but gives it {len(weights)} rows. Convert it again.")
    return _split_halves(weights, heads)


def _split_halves(weights: Weights, heads: int) -> Weights:
    """Rows of each head from a0 b0 a1 b1 … to a0 a1 … b0 b1 …, where ai and bi turn together.

    In llama files the rows that turn together are neighbours; Hugging Face has them half a head apart.
    """
    pairs = weights.reshape(heads, len(weights) // (2 * heads), 2, *weights.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def _save(tensors: dict[str, Weights], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    file.chmod(0o644)  # safetensors makes files that only their owner may read


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2))
