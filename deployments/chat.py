"""Chat messages to token ids with the model's own Jinja template, run in a sandbox.

The template and the client's texts are kept apart as `deployments.control` says, so a user turn cannot forge a turn.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deployments.control import ControlTokens
from deployments.tokenizer import Tokenizer, read_json
from engine.errors import RequestError

NO_TEMPLATE = "{{ raise_exception('this model has no chat template; send a prompt to /v1/completions') }}"
# What a template's code raises on messages of a shape that its author did not think of.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class ChatTemplate:
    """A compiled chat template and the tokenizer whose control tokens it writes."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._template = _environment().from_string(source)
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer.backend)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Reads chat_template.jinja, else the `chat_template` of chat_template.json or tokenizer_config.json."""
        return cls(_source(folder, tokenizer), tokenizer)

    def encode(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids up to where the answer begins. Raises RequestError with the template's own words if it refuses."""
        hidden = self._control.hide(list(messages))
        return self._tokenizer.with_bos(self._control.encode(self._render(hidden)))

    def _render(self, messages: list[dict[str, Any]]) -> str:
        names = self._tokenizer.special_texts
        try:
            return self._template.render(**names, messages=messages, add_generation_prompt=True, tools=None)
        except TEMPLATE_ERRORS as error:
            reason = self._control.show(str(error))
            raise RequestError(
                f"The model's chat template refuses these messages: {reason}. Change roles or contents to suit it.",
                param="messages",
            ) from None


def _source(folder: Path, tokenizer: Tokenizer) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    found = read_json(folder / "chat_template.json").get("chat_template", tokenizer.config.get("chat_template"))
    if isinstance(found, list):  # several named ones
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found or NO_TEMPLATE


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for `transformers` expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only shows its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
