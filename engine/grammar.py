"""Structured output: which tokens a grammar allows next, as masks that are computed beside the forward pass."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.errors import RequestError
from engine.logits import Row
from engine.request import Request

Masks = dict[int, Tensor]  # by row of logits: True for each token that is allowed


class Grammars(Protocol):
    def compile(self, grammar: str) -> None:
        """May take a second; what was compiled before costs nothing. Raises RequestError if it is no grammar."""
        ...

    def start(self, rows: Sequence[tuple[int, Request, Row]]) -> Callable[[], Masks]:
        """Begin to compute the masks of these rows; the returned call waits for them."""
        ...


class NoGrammars:
    """The model has no tokenizer whose texts a grammar could be about."""

    def compile(self, grammar: str) -> None:
        raise RequestError("Structured output needs the model's tokenizer.json, which it has not.", param="grammar")

    def start(self, rows: Sequence[tuple[int, Request, Row]]) -> Callable[[], Masks]:
        assert not rows
        return dict
