"""GGUF import: the converted folder is the same model with the same tokenizer, or there is an error that says why."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.errors import ConfigError
from engine.gguf_import import convert
from tests.tiny_gguf import logits, tiny_model, write_gguf

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True},
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
}


def converted(path: Path, **options: Any) -> Path:
    folder = path.with_suffix("")
    folder.mkdir()
    convert(path, folder, **options)
    return folder


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


@pytest.mark.parametrize("name", MODELS)
def test_the_converted_model_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    original = tiny_model(name.split("-")[0], **MODELS[name])
    change = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0} if "linear" in name else {}
    folder = converted(write_gguf(tmp_path / "m.gguf", original, change=change))
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(original))


def test_llama3_rope_factors_become_the_formula_they_came_from(tmp_path: Path) -> None:
    formula = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0, **formula}
    original = tiny_model("llama", rope_parameters=rope, head_dim=64, max_position_embeddings=16384)
    plain = 500000.0 ** (-torch.arange(0, 64, 2) / 64)
    divisors = (plain / original.model.rotary_emb.inv_freq).numpy().round(5)
    assert divisors.min() == 1.0 and 1.0 < np.median(divisors) < divisors.max()
    folder = converted(write_gguf(tmp_path / "m.gguf", original, tensors={"rope_freqs.weight": divisors}))
    assert read_json(folder / "config.json")["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, **formula}
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(original), atol=1e-5)


def test_weights_in_several_files_are_the_same_model(llama: Any, tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", llama), shard_bytes=40_000)
    files = set(read_json(folder / "model.safetensors.index.json")["weight_map"].values())
    assert files == {f"model-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)}
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(llama))


def test_a_q4_1_block_is_scale_times_nibble_plus_minimum(llama: Any, tmp_path: Path) -> None:
    head = np.array([0.5, -1.0], np.float16).view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | (np.arange(15, -1, -1, dtype=np.uint8) << 4)
    blocks = np.tile(np.concatenate([head, nibbles]), (48, 1))
    path = tmp_path / "m.gguf"
    name, kind = "blk.0.ffn_gate.weight", gguf.GGMLQuantizationType.Q4_1
    values = 0.5 * np.concatenate([np.arange(16), np.arange(15, -1, -1)]) - 1.0
    row = np.tile(values.astype(np.float32), (48, 1))
    assert np.array_equal(gguf.quantize(row, kind), blocks)
    folder = converted(write_gguf(path, llama, tensors={name: row}, quantise=lambda n: kind if n == name else 0))
    weights = load_file(folder / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    assert weights.dtype == np.float32 and np.array_equal(weights, row)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_other_float_and_quantised_types_are_read(kind: str, llama: Any, tmp_path: Path) -> None:
    def quantise(name: str) -> Any:
        return gguf.GGMLQuantizationType[kind if "ffn_gate" in name else "F32"]

    folder = converted(write_gguf(tmp_path / "m.gguf", llama, quantise=quantise))
    weights = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"]
    error = np.abs(weights - llama.model.layers[1].mlp.gate_proj.weight.detach().numpy()).max()
    assert 0 < error < 0.01


def test_config_numbers_are_the_decimals_that_were_meant(llama: Any, tmp_path: Path) -> None:
    change = {"llama.rope.freq_base": 1e6, "tokenizer.ggml.eot_token_id": 0}
    folder = converted(write_gguf(tmp_path / "m.gguf", llama, change=change))
    config = read_json(folder / "config.json")
    assert (config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]) == (1e-5, 1e6, 320)
    assert config["eos_token_id"] == 2
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [0, 2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "mamba"}, "architecture 'mamba'; supported are llama, qwen2, qwen3"),
    "tensor": ({"tensors": {"blk.0.ffn_gate_exps.weight": np.ones(4, np.float32)}}, "blk.0.ffn_gate_exps.weight"),
    "rope factors": ({"tensors": {"rope_freqs.weight": np.array([1, 2, 9, 8], np.float32)}}, "not Llama 3's"),
    "rope scaling": ({"change": {"llama.rope.scaling.type": "longrope"}}, "'longrope'; supported are linear and yarn"),
    "partial rotation": ({"change": {"llama.rope.dimension_count": 4}}, "turns 4 of a head's 8 dimensions"),
    "head count": ({"change": {"llama.attention.head_count_kv": 3}}, "has 3 heads"),
    "absent metadata": ({"change": {"llama.block_count": None}}, "llama.block_count is absent"),
    "metadata of another type": ({"change": {"llama.block_count": "two"}}, "llama.block_count is a str"),
    "zero": ({"change": {"llama.attention.head_count": 0}}, "attention.head_count is 0"),
    "part of a set": ({"change": {"split.count": 3}}, "llama-gguf-split --merge"),
    "tokenizer": ({"change": {"tokenizer.ggml.model": "bert"}}, "'bert'; supported are gpt2 and llama"),
    "merge": ({"change": {"tokenizer.ggml.merges": ["a b", "b a"]}}, "merges 'b' and 'a', which are not all tokens"),
    "special token": ({"change": {"tokenizer.ggml.eos_token_id": 267}}, "eos the token id 267, but has 267 tokens"),
    "token types": ({"change": {"tokenizer.ggml.token_type": [1, 3]}}, "267 tokens but 2 tokenizer.ggml.token_type"),
    "tokens": ({"change": {"tokenizer.ggml.tokens": [1, 2, 3]}}, "tokenizer.ggml.tokens that are not text"),
    "words": ({"change": {"tokenizer.ggml.pre": "klingon"}}, "'klingon'; supported are gpt-2,"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_faithfully_is_refused_by_name(case: str, llama: Any, tmp_path: Path) -> None:
    options, message = REFUSED[case]
    path = write_gguf(tmp_path / "m.gguf", llama, **options)
    with pytest.raises(ConfigError) as caught:
        converted(path)
    assert message in caught.value.message and str(path) in caught.value.message
    assert caught.value.param == "model"


@pytest.fixture(scope="module")
def whole(llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "whole.gguf", llama)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 2**20))
@example(cut=0)
@example(cut=24)  # between header and metadata
def test_a_file_cut_anywhere_is_a_config_error(cut: int, whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    short = tmp_path / "short.gguf"
    short.write_bytes(content[: cut % (len(content) - 32)])  # the last bytes may be padding
    with pytest.raises(ConfigError, match=r"short\.gguf is not a whole GGUF file"):
        convert(short, tmp_path)


def test_another_kind_of_file_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "cat.gguf").write_bytes(b"\x89PNG" * 100)
    with pytest.raises(ConfigError, match="not a whole GGUF file"):
        convert(tmp_path / "cat.gguf", tmp_path)


def tokenizer_of(path: Path, weights: Any, **change: Any) -> Tokenizer:
    fields = {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    return Tokenizer.from_file(str(converted(write_gguf(path, weights, change=fields)) / "tokenizer.json"))


CUTS: dict[str, list[str]] = {
    "smollm": ["1", "2", "3", "4", "ĠĠ", "5", "Ġa"],
    "gpt-2": ["123", "4", "Ġ", "Ġ", "5", "Ġa"],
    "qwen2": ["1", "2", "3", "4", "Ġ", "Ġ", "5", "Ġa"],
    "llama-bpe": ["<|im_start|>", "123", "4", "Ġ", "Ġ", "5", "Ġa"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_into_words_the_way_the_file_says(pre: str, llama: Any, tmp_path: Path) -> None:
    assert tokenizer_of(tmp_path / "m.gguf", llama, pre=pre).encode("1234  5 a").tokens == CUTS[pre]


def test_qwen_reads_composed_and_decomposed_letters_alike(llama: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", llama, pre="qwen2")
    assert tokenizer.encode("e\u0301").tokens == tokenizer.encode("\u00e9").tokens == ["Ã", "©"]


def test_llama3_takes_a_word_that_is_a_token_as_it_is(llama: Any, tmp_path: Path) -> None:
    """Even if no merges lead to it."""
    assert tokenizer_of(tmp_path / "a.gguf", llama, pre="llama-bpe").encode("xyz").tokens[1:] == ["xyz"]
    assert tokenizer_of(tmp_path / "b.gguf", llama, pre="gpt-2").encode("xyz").tokens == ["x", "y", "z"]


@pytest.mark.parametrize("add", [True, False])
def test_the_file_decides_whether_a_prompt_starts_with_bos(add: bool, llama: Any, tmp_path: Path) -> None:
    tokens = tokenizer_of(tmp_path / "m.gguf", llama, add_bos_token=add).encode("abc").tokens
    assert tokens == (["<|im_start|>"] if add else []) + ["abc"]


def test_special_and_user_defined_tokens_are_matched_whole_but_only_special_ones_are_hidden(
    llama: Any, tmp_path: Path
) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", llama)
    ids = tokenizer.encode("ab<think>ab<|im_end|>").ids
    assert ids[1::2] == [3, 2]
    assert tokenizer.decode(ids) == "ab<think>ab"


def test_the_chat_template_travels(llama: Any, tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", llama))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False) == "abc"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def sentencepiece_fields(**change: Any) -> dict[str, Any]:
    pieces = {"▁a": -1.0, "ab": -0.5, "aa": -1.5, "▁ab": -2.0, "▁": -3.0, "a": -4.0, "b": -5.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + list(pieces.values())
    return {"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores, "merges": None, **change}


def test_sentencepiece_joins_best_scores_first_and_spells_unknown_letters_in_bytes(llama: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", llama, **sentencepiece_fields())
    encoded = tokenizer.encode("aab é ab")
    assert encoded.tokens == ["<s>", "▁a", "ab", "▁", "<0xC3>", "<0xA9>", "▁ab"]
    assert tokenizer.decode(encoded.ids) == "aab é ab"


def test_sentencepiece_without_a_space_in_front(llama: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path / "m.gguf", llama, **sentencepiece_fields(add_space_prefix=False))
    assert tokenizer.encode("ab a").tokens == ["<s>", "ab", "▁a"]


GOLDENS = {
    "The letters run ABC": (4, [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127]),
    "1, 2, 3, 4, 5,": (14, [216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28]),
    "My favourite colour is": (None, [4461, 30, 2]),
}


@pytest.fixture(scope="module")
def smollm2(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


@pytest.mark.parametrize("prompt", GOLDENS)
def test_the_default_model_says_what_its_authors_weights_say(prompt: str, smollm2: Any, model_folder: Path) -> None:
    length, golden = GOLDENS[prompt]
    ids = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(prompt).ids
    assert length in (None, len(ids))
    with torch.no_grad():
        best = smollm2(torch.tensor([ids + golden])).logits[0].argmax(-1)
    assert best[len(ids) - 1 : -1].tolist() == golden


def test_the_default_models_tokenizer(model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    assert len(tokenizer) == 49152
    assert tokenizer("")["input_ids"] == []
    assert len(tokenizer("😊 😊 😊 😊 😊")["input_ids"]) == 11
    assert tokenizer.decode(GOLDENS["The letters run ABC"][1]) == "DEFGHIJKLMNOPQRST"
    chat = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert len(ids) == 31 and ids[:3] == [1, 9690, 198]
