"""Text to token ids, and token ids to exact bytes, from a model folder's tokenizer.json.

A raw prompt gets a BOS token only if the model's tokenizer adds one and the prompt does not begin with it.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from engine.errors import ConfigError


class Tokenizer:
    """The text side of a model's vocabulary. `backend` is the `tokenizers` object, `config` tokenizer_config.json.

    `longest_token` is in characters, so a text of n characters has at least n / longest_token tokens. `special_texts`
    holds what chat templates call `bos_token`, `eos_token` and so on.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: Mapping[str, Any], eos_ids: tuple[int, ...] = ()) -> None:
        self.backend = backend
        self.config = config
        self.eos_ids = eos_ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)))
        self.special_texts = _special_texts(config)
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self._bos = _bos(backend, self.special_texts.get("bos_token", ""), config)
        self._to_bytes = _byte_reader(backend)
        self._known_bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Reads tokenizer.json, tokenizer_config.json and the EOS ids of generation_config.json and config.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model folder {folder} has no tokenizer.json; save a fast tokenizer there.")
        return cls(
            tokenizers.Tokenizer.from_file(str(path)), read_json(folder / "tokenizer_config.json"), eos_ids(folder)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt; the text of a control token becomes that token."""
        return self.with_bos(encode_batch(self.backend, text))

    def with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[:1] == self._bos or not ids else self._bos + ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        shown = (token for token in ids if not (skip_special_tokens and token in self.special_ids))
        return b"".join(map(self.token_bytes, shown)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes this token adds to a text; none for an id that only pads the vocabulary."""
        known = self._known_bytes.get(token)
        if known is None:
            known = self._known_bytes[token] = self._read_bytes(token)
        return known

    def token_name(self, token: int) -> str:
        """The token as a string of its own; part of a character is written `bytes:\\xf0\\x9f`."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _read_bytes(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].content.encode()
        piece = self.backend.id_to_token(token)
        return self._to_bytes(piece) if piece is not None else b""


def encode_batch(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # The batch call lets go of the interpreter lock; the plain one stops every thread until a long text is done.
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def eos_ids(folder: Path) -> tuple[int, ...]:
    """Every id that ends an answer: those of generation_config.json, then those of config.json."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        found |= dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(found)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, or an empty one if there is no such file."""
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return content


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def _content(value: object) -> str | None:
    """A special token is written as its text or as an object that holds the text."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _bos(backend: tokenizers.Tokenizer, text: str, config: Mapping[str, Any]) -> list[int]:
    """The ids that every prompt begins with, none or one: as `add_bos_token` says, else as the post-processor does."""
    token = backend.token_to_id(text)
    if token is None:
        return []
    adds = backend.encode("", add_special_tokens=True).ids[:1] == [token]
    return [token] if config.get("add_bos_token", adds) else []


def _byte_reader(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How this vocabulary writes bytes, told by the steps of its decoder."""
    steps = set(re.findall(r'"type":\s*"(\w+)"', _decoder_json(backend)))
    if "ByteLevel" in steps:
        return _byte_level
    if steps & {"ByteFallback", "Metaspace"}:
        return _sentencepiece
    raise ConfigError(
        f"tokenizer.json has the decoder {sorted(steps)}; only byte-level BPE and SentencePiece vocabularies can be "
        "streamed byte by byte. Convert the tokenizer or serve another model."
    )


def _decoder_json(backend: tokenizers.Tokenizer) -> str:
    return json.dumps(json.loads(backend.to_str())["decoder"])


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes a visible Latin-1 byte as its own character, the n-th of the others as U+0100 + n."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    """`<0x0A>` is one byte; a lower one eighth block is a space."""
    if match := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(match[1])
    return piece.replace("\u2581", " ").encode()
