"""Text that came from a client can spell a control token but never become one.

Two kinds of stand-ins keep the two apart while they share one rendered chat: `hide` swaps control-token texts in a
client's strings for inert stand-ins before the template runs; after it, `encode` swaps what the template itself
wrote for stand-ins that only this tokenizer copy knows, puts the client's texts back, and encodes the whole at once.
So merges across the border between template and content are those of the naive rendering, and ordinary texts give
exactly its ids. Control tokens are the added tokens marked special: a `<think>` that is added but not
special keeps its meaning in everybody's text.
"""

import re
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import tokenizers

from deployments.tokenizer import encode_batch

_NONCHARACTERS = {ord(digit): 0xFDD0 + value for value, digit in enumerate("0123456789abcdef")}


class ControlTokens:
    """The control tokens of one tokenizer, and a copy of it in which only stand-ins can become one."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        special = {token: added for token, added in backend.get_added_tokens_decoder().items() if added.special}
        texts = {token: added.content for token, added in special.items()}
        genuine, inert = _stand_ins(special), _stand_ins(special)
        self._hidden = {texts[token]: inert[token] for token in special}
        self._shown = {inert[token]: texts[token] for token in special}
        self._genuine = {texts[token]: genuine[token] for token in special}
        self._any_text = _any_of(texts.values())
        self._any_inert = _any_of(inert.values())
        self._backend = tokenizers.Tokenizer.from_str(backend.to_str())
        self._backend.encode_special_tokens = True  # that is: as the ordinary text it is
        self._backend.add_tokens([_like(added, genuine[token]) for token, added in special.items()])
        self._ids = {self._backend.token_to_id(text): token for token, text in genuine.items()}

    def hide(self, value: Any) -> Any:
        """A client's value (JSON-like) with the control-token texts in all of its strings made inert."""
        if isinstance(value, str):
            return self._any_text.sub(lambda match: self._hidden[match[0]], value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        return [self.hide(item) for item in value] if isinstance(value, list) else value

    def show(self, text: str) -> str:
        """Undoes `hide` in what was made of hidden strings."""
        return self._any_inert.sub(lambda match: self._shown[match[0]], text)

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered chat: control tokens where the template wrote them, plain text where a client did."""
        marked = self._any_text.sub(lambda match: self._genuine[match[0]], rendered)
        return [self._ids.get(token, token) for token in encode_batch(self._backend, self.show(marked))]


def _stand_ins(tokens: Iterable[int]) -> dict[int, str]:
    """Strings that nobody outside this process can guess, of code points that Unicode keeps out of all text."""
    secret = uuid4().hex
    return {token: f"\ufde0{secret}{token:x}\ufde1".translate(_NONCHARACTERS) for token in tokens}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _like(added: tokenizers.AddedToken, text: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        text, single_word=added.single_word, lstrip=added.lstrip, rstrip=added.rstrip, normalized=False, special=False
    )
