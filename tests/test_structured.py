"""Constraints as clients send them, a rule per test: what becomes a grammar, and what is refused by name."""

import json
from typing import Any

import pytest

from deployments.structured import read_grammar
from engine.errors import RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def grammar(**body: Any) -> dict[str, Any]:
    text = read_grammar(body)
    assert text is not None
    made: dict[str, Any] = json.loads(text)["grammars"][0]
    return made


@pytest.mark.parametrize(
    "body", [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None}]
)
def test_nothing_is_asked_for(body: dict[str, Any]) -> None:
    assert read_grammar(body) is None


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "json_object": False}},
        {"guided_json": SCHEMA},
    ],
)
def test_a_schema_may_come_by_several_fields(body: dict[str, Any]) -> None:
    made = grammar(**body)["json_schema"]
    assert made["properties"] == SCHEMA["properties"]
    assert made["x-guidance"]["whitespace_flexible"] is False


def test_any_object_will_do_for_json_object() -> None:
    assert grammar(response_format={"type": "json_object"})["json_schema"]["type"] == "object"
    assert grammar(structured_outputs={"json_object": True})["json_schema"]["type"] == "object"


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "[0-9]{3}"},
        {"guided_choice": ["yes", "no", 'a "quoted" ü']},
        {"guided_grammar": 'start: "a" | "b"'},
        {"structured_outputs": {"regex": "a+"}},
        {"structured_outputs": {"choice": ["a"]}},
    ],
)
def test_regex_choice_and_grammar(body: dict[str, Any]) -> None:
    assert "start" in (read_grammar(body) or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", "json"),
        ("response_format", {}),
        ("response_format", {"type": "nope"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "schema": {}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}),
        ("structured_outputs", "json"),
        ("structured_outputs", {"json": 5}),
        ("structured_outputs", {"json": "{"}),
        ("structured_outputs", {"json": "[]"}),
        ("structured_outputs", {"yaml": "a"}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": ["a", 5]}),
        ("guided_regex", "(a"),
        ("guided_regex", 5),
        ("guided_grammar", "start: nowhere"),
        ("guided_json", {"properties": 5}),
        ("guided_regex", "a" * 70_000),
    ],
)
def test_what_is_no_constraint_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        read_grammar({field: value})
    assert caught.value.param == field and caught.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a", "json": SCHEMA}},
    ],
)
def test_two_constraints_are_one_too_many(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="only one constraint"):
        read_grammar(body)
