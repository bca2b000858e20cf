"""Structured output: what a request asks for as one grammar, checked before any engine sees it.

`response_format` is OpenAI's; `structured_outputs` and the `guided_` fields are vLLM's. At most one constraint counts.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import LLMatcher

from engine.errors import RequestError

MAX_LENGTH = 65_536
# Without it a model may write blanks for ever; strings are the only part of JSON that it can make as long as it likes.
COMPACT: Any = {"whitespace_flexible": False}
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def read_grammar(body: Mapping[str, Any]) -> str | None:
    """In llguidance's notation; None if the output is free. Raises RequestError naming the field that is wrong."""
    asked = list(_asked(body))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(dict.fromkeys(name for name, _, _ in asked))
        raise RequestError(f"{names}: only one constraint is possible; leave the others out.", param=asked[1][0])
    name, kind, value = asked[0]
    if len(json.dumps(value)) > MAX_LENGTH:
        raise RequestError(f"{name} is longer than {MAX_LENGTH} characters. Make it shorter.", param=name)
    grammar = _grammar(name, kind, value)
    if problem := LLMatcher.validate_grammar(grammar):
        raise RequestError(f"{name} cannot be used: {problem}", param=name)
    return grammar


def _asked(body: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(field, kind, value) of each constraint; null asks for nothing."""
    if (given := body.get("response_format")) is not None:
        yield from _response_format(given)
    if (given := body.get("structured_outputs")) is not None:
        if not isinstance(given, dict):
            raise RequestError("structured_outputs must be an object.", param="structured_outputs")
        for kind, value in given.items():
            if value not in (None, False):
                yield "structured_outputs", kind, value
    for field, kind in GUIDED.items():
        if body.get(field) is not None:
            yield field, kind, body[field]


def _response_format(given: object) -> Iterator[tuple[str, str, Any]]:
    match given:
        case {"type": "text"}:
            return
        case {"type": "json_object"}:
            yield "response_format", "json_object", True
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            yield "response_format", "json", schema
        case {"type": "json_schema"}:
            raise RequestError("response_format.json_schema.schema must be a JSON schema.", param="response_format")
        case _:
            raise RequestError(
                "response_format.type must be text, json_object or json_schema.", param="response_format"
            )


def _grammar(name: str, kind: str, value: Any) -> str:
    match kind, value:
        case "json_object", True:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=COMPACT)
        case "json", dict():
            return LLMatcher.grammar_from_json_schema(value, overrides=COMPACT)
        case "json", str():
            return LLMatcher.grammar_from_json_schema(_parsed(name, value), overrides=COMPACT)
        case "regex", str():
            return LLMatcher.grammar_from_regex(value)
        case "choice", [str(), *_] if all(isinstance(one, str) and one for one in value):
            return LLMatcher.grammar_from_lark(
                "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in value)
            )
        case "grammar", str():
            return LLMatcher.grammar_from_lark(value)
    wanted = "json (a schema), json_object (true), regex, choice (a list of strings) or grammar (in Lark)"
    raise RequestError(f"{name} asks for {kind!r} in a way that is not known; give {wanted}.", param=name)


def _parsed(name: str, text: str) -> Any:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is no JSON: {error}", param=name) from None
    if not isinstance(schema, dict):
        raise RequestError(f"{name} must be a JSON schema, an object.", param=name)
    return schema
