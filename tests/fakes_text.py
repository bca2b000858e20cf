"""Text the default model can write, and a SentencePiece-like tokenizer of some hundred tokens that adds BOS."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

SPECIAL = ["<unk>", "<s>", "</s>"]
BOS, EOS = 1, 2
WORDS = [("▁", "a"), ("▁", "b"), ("b", "c"), ("▁a", "bc")]

unhurried = settings(deadline=None)  # other work on the machine is not the code's fault

# Text whose every byte has a token in the default model's vocabulary; it drops the bytes that have none.
WRITABLE = st.text(st.characters(max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d", codec="utf-8"))


def save_tiny(folder: Path, **config: Any) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; `config` adds to the latter."""
    backend = tokenizers.Tokenizer(models.BPE(_vocab(), WORDS, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    written = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(written))
    return folder


def _vocab() -> dict[str, int]:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghij[]/INST", *map("".join, WORDS)]
    return {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
