"""What an ingress serves: a name, and the text side of the model behind it. Limits are the engine's to tell."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from deployments.chat import ChatTemplate
from deployments.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`created` is in seconds since 1970, as /v1/models shows it."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def load(cls, name: str, folder: Path) -> "ServedModel":
        tokenizer = Tokenizer.load(folder)
        return cls(name, tokenizer, ChatTemplate.load(folder, tokenizer))
