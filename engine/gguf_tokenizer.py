"""GGUF metadata → tokenizer.json and tokenizer_config.json: two families of BPE, byte-level and sentencepiece.

The file names its way of cutting text into words (`tokenizer.ggml.pre`); one we do not know is an error, for a
guess would change tokens silently.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.gguf_config import SPECIAL_TOKENS, number, special_token
from engine.gguf_reader import GgufFile

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types of the GGUF format
SPACE = "▁"

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TRIPLE_DIGITS = rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{REST}"
SINGLE_DIGITS = rf"{CONTRACTION}|{WORD}|\p{{N}}|{REST}"

LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
QWEN = ("qwen2", "deepseek-r1-qwen")
GPT2 = ("gpt-2", "default")
SMOLLM = ("smollm",)


def write_tokenizer(source: GgufFile, folder: Path) -> None:
    """Write the tokenizer's two files. Raises ConfigError for a tokenizer of a kind that is not supported."""
    build = {"gpt2": _byte_level, "llama": _sentencepiece}.get(kind := source.value("tokenizer.ggml.model", str))
    if build is None:
        raise source.error(f"has a tokenizer of kind {kind!r}; supported are gpt2 and llama. Use safetensors instead.")
    tokenizer = build(source)
    _add_tokens(tokenizer, source)
    if (bos := special_token(source, "bos")) is not None and source.value(
        "tokenizer.ggml.add_bos_token", bool, _bos(source)
    ):
        _prepend(tokenizer, bos)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_settings(source), indent=2, ensure_ascii=False))


def _byte_level(source: GgufFile) -> Tokenizer:
    pre = source.value("tokenizer.ggml.pre", str, "default")
    tokenizer = Tokenizer(models.BPE(_vocabulary(source), _merges(source), ignore_merges=pre in LLAMA3))
    if pre in QWEN:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _words(source, pre)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _merges(source: GgufFile) -> list[tuple[str, str]]:
    vocabulary = _vocabulary(source)
    pairs = [merge.partition(" ")[::2] for merge in _strings(source, "merges")]
    for left, right in pairs:
        if not {left, right, left + right} <= vocabulary.keys():
            raise source.error(f"merges {left!r} and {right!r}, which are not all tokens. Convert it again.")
    return pairs


def _words(source: GgufFile, pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre not in LLAMA3 + QWEN:
        known = ", ".join(GPT2 + SMOLLM + LLAMA3 + QWEN)
        raise source.error(f"cuts words in the way {pre!r}; supported are {known}. Use safetensors instead.")
    split = pre_tokenizers.Split(Regex(TRIPLE_DIGITS if pre in LLAMA3 else SINGLE_DIGITS), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(source: GgufFile) -> Tokenizer:
    unknown = _tokens(source)[special_token(source, "unknown") or 0]
    merges = _merges_by_score(source)
    model = models.BPE(_vocabulary(source), merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces, back = normalizers.Replace(" ", SPACE), decoders.Replace(SPACE, " ")
    if source.value("tokenizer.ggml.add_space_prefix", bool, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps = [back, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        tokenizer.normalizer = spaces
        steps = [back, decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(source: GgufFile) -> list[tuple[str, str]]:
    """Sentencepiece joins whichever neighbours make the best token; as a list of merges, best first."""
    vocabulary = _vocabulary(source)
    scores = _per_token(source, "scores")
    pairs = [
        (-scores[index], (token[:cut], token[cut:]))
        for token, index in vocabulary.items()
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [pair for _, pair in sorted(pairs, key=lambda item: item[0])]


def _tokens(source: GgufFile) -> list[str]:
    return _strings(source, "tokens")


def _strings(source: GgufFile, key: str) -> list[str]:
    values = source.value(f"tokenizer.ggml.{key}", list)
    if not all(isinstance(value, str) for value in values):
        raise source.error(f"lists tokenizer.ggml.{key} that are not text. Convert it again.")
    return values


def _per_token(source: GgufFile, key: str) -> list[float]:
    values, tokens = source.value(f"tokenizer.ggml.{key}", list), _tokens(source)
    if len(values) != len(tokens):
        raise source.error(f"has {len(tokens)} tokens but {len(values)} tokenizer.ggml.{key}. Convert it again.")
    return values


def _vocabulary(source: GgufFile) -> dict[str, int]:
    return {token: index for index, token in enumerate(_tokens(source))}


def _add_tokens(tokenizer: Tokenizer, source: GgufFile) -> None:
    """Tokens that are matched whole in the text, before it is cut into words."""
    typed = list(zip(_tokens(source), _per_token(source, "token_type"), strict=True))
    control = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind in (UNKNOWN, CONTROL)]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(plain)


def _bos(source: GgufFile) -> bool:
    """Whether prompts start with BOS when the file does not say."""
    sentencepiece = source.value("tokenizer.ggml.model", str) == "llama"
    return sentencepiece or source.value("tokenizer.ggml.pre", str, "default") in LLAMA3


def _prepend(tokenizer: Tokenizer, bos: int) -> None:
    token = tokenizer.id_to_token(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", "$B"], special_tokens=[(token, bos)]
    )


def _settings(source: GgufFile) -> dict[str, Any]:
    tokens = _tokens(source)
    names = {**SPECIAL_TOKENS, "unk": "unknown"}
    ids = {f"{short}_token": special_token(source, name) for short, name in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": number(source, "context_length"),
        "chat_template": source.value("tokenizer.chat_template", str, None),
        **{key: tokens[token] for key, token in ids.items() if token is not None},
    }
