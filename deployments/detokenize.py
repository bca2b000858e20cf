"""Token ids to final text, one token at a time, at a cost that does not grow with the answer.

What has been handed out is never taken back: unfinished characters and possible stop strings are held until certain.
"""

import codecs
from collections.abc import Sequence

from deployments.tokenizer import Tokenizer


class Detokenizer:
    """Assembles the bytes of tokens into characters. The pieces joined are the text of all tokens at once.

    It begins with the first token of the answer: bytes left over from the prompt are not its business.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The characters that this token makes certain; an invalid byte is U+FFFD once nothing can complete it."""
        return "" if token in self._skipped else self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """What an answer that ends inside a character still owes: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes text on up to the first stop string and holds back whatever could be the beginning of one.

    The first token that completes a stop string ends the text; of several completed by it, the one that begins
    earliest cuts. `tokens` counts the tokens fed, so at a match it includes the completing one. A stop string
    completed before `min_tokens` is ordinary text.
    """

    def __init__(self, strings: Sequence[str], min_tokens: int = 0) -> None:
        self.tokens = 0
        self.matched = False
        self._min_tokens = min_tokens
        self._progress = [_Progress(string) for string in strings]
        self._held = ""

    def feed(self, text: str) -> str:
        """Takes the text of one more token, returns what may be shown. Not to be called after a match."""
        assert not self.matched
        self.tokens += 1
        if not self._progress:
            return text
        known = len(self._held)
        self._held += text
        begins = self._scan(text, known)
        if begins and self.tokens >= self._min_tokens:
            self.matched = True
            return self._held[: min(begins)]
        return self._release(max(progress.length for progress in self._progress))

    def flush(self) -> str:
        """What was held back, once no token can follow."""
        return "" if self.matched else self._release(0)

    def _scan(self, text: str, known: int) -> list[int]:
        """Where in `_held` the stop strings begin that `text`, at offset `known` of it, completes."""
        return [
            known + position + 1 - len(progress.string)
            for position, char in enumerate(text)
            for progress in self._progress
            if progress.step(char)
        ]

    def _release(self, keep: int) -> str:
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


class _Progress:
    """How many characters of one string the text so far ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        self._shorter = _borders(string)

    def step(self, char: str) -> bool:
        """True if this character completes the string; then only what could begin it anew counts on."""
        while self.length and self.string[self.length] != char:
            self.length = self._shorter[self.length]
        self.length += self.string[self.length] == char
        if self.length < len(self.string):
            return False
        self.length = self._shorter[self.length]
        return True


def _borders(string: str) -> list[int]:
    """At n: the length of the longest proper prefix of string[:n] that also ends it."""
    borders = [0, 0]
    for char in string[1:]:
        length = borders[-1]
        while length and string[length] != char:
            length = borders[length]
        borders.append(length + (string[length] == char))
    return borders
