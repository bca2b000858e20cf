"""Grammars by llguidance's automata: a matcher for each request that has one.

A matcher follows the output it is shown, whatever was evicted, guessed or rolled back: it goes back to where the two
agree and on from there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from engine.errors import ConfigError, RequestError
from engine.grammar import Masks
from engine.logits import Row
from engine.request import Request

COMPILED = 256  # grammars that are kept


class LlguidanceGrammars:
    """`eos` end a text that the grammar allows to end. Rows of one request come in order of position."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos: Sequence[int]) -> None:
        self._eos = list(eos)
        self._vocab_size = vocab_size
        self._tokenizer = lru_cache(1)(lambda: _load(tokenizer, vocab_size, self._eos))
        self._compiled = lru_cache(COMPILED)(self._compile)
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()
        self._worker = ThreadPoolExecutor(1, "grammar")

    def compile(self, grammar: str) -> None:
        self._compiled(grammar)

    def start(self, rows: Sequence[tuple[int, Request, Row]]) -> Callable[[], Masks]:
        if not rows:
            return dict
        masks: Future[Masks] = self._worker.submit(self._masks, rows)
        return masks.result

    def _masks(self, rows: Sequence[tuple[int, Request, Row]]) -> Masks:
        masks = {}
        for index, request, row in rows:
            mask = self._matcher(request).mask(row.history[row.prompt_len :])
            if mask is not None:
                masks[index] = _unpacked(mask, self._vocab_size)
        return masks

    def _matcher(self, request: Request) -> "Matcher":
        matcher = self._matchers.get(request)
        if matcher is None:
            assert request.params.grammar is not None
            matcher = self._matchers[request] = Matcher(self._compiled(request.params.grammar).deep_copy())
        return matcher

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"The grammar cannot be used: {matcher.get_error()}", param="grammar")
        return matcher


class Matcher:
    """The automaton of one request, and the output that it has seen."""

    def __init__(self, automaton: LLMatcher) -> None:
        self._automaton = automaton
        self._seen: list[int] = []

    def mask(self, output: Sequence[int]) -> bytes | None:
        """One bit per token, lowest first. None behind a guess that the grammar forbids: it will be refused anyway."""
        agreed = _agreement(self._seen, output)
        if agreed < len(self._seen):
            assert self._automaton.rollback(len(self._seen) - agreed)
            del self._seen[agreed:]
        rest = list(output[agreed:])
        consumed = self._automaton.try_consume_tokens(rest)
        self._seen += rest[:consumed]
        return self._automaton.compute_bitmask() if consumed == len(rest) else None


def _agreement(first: Sequence[int], second: Sequence[int]) -> int:
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


def _unpacked(mask: bytes, vocab_size: int) -> Tensor:
    bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten()[:vocab_size].bool()


def _load(tokenizer: Path, vocab_size: int, eos: list[int]) -> LLTokenizer:
    try:
        return LLTokenizer(str(tokenizer), n_vocab=vocab_size, eos_token=eos)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"model: {tokenizer} cannot be used for grammars: {error}", param="model") from error
