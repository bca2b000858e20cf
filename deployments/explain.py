"""From a pydantic model and wrong data to sentences a user can act on: where, what it is, what to write instead."""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from deployments.yaml_lines import Place, YamlFile, spell

NONE = object()


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake. `fix` is the line to write in its place, if one line can mend it."""

    place: Place
    text: str
    allowed: str = ""
    fix: str = ""

    def render(self, file: YamlFile) -> str:
        lines = [f"{file.path}, line {file.line(self.place)}: {spell(self.place)} {self.text}"]
        if self.allowed:
            lines.append(f"    allowed: {self.allowed}")
        if self.fix:
            lines.append(f"    write:   {self.fix}")
        return "\n".join(lines)


def explain(model: type[BaseModel], data: Any, at: Place = ()) -> list[Problem]:
    """All that is wrong with `data`, which stands `at` this place of the file. Empty if nothing is."""
    problems = list(_misshapen(model, data, at))
    if problems:
        return problems  # the models' own validators take the shape for granted
    problems = list(_unknown_keys(model, data, at))
    try:
        model.model_validate(data)
    except ValidationError as error:
        known = {problem.place for problem in problems}
        for detail in error.errors():
            problem = _problem(model, data, at, detail)
            if problem.place not in known:
                problems.append(problem)
                known.add(problem.place)
    return problems


def closest(name: str, names: Iterable[str]) -> str:
    """The one of `names` that was probably meant, or ""."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), "")


def _misshapen(annotation: Any, data: Any, at: Place) -> Iterator[Problem]:
    """Where a model, or a list of models, is the only thing allowed, and something else stands."""
    kinds = list(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else [annotation]
    if data is None and NoneType in kinds:
        return
    kinds = [kind for kind in kinds if kind is not NoneType]
    if all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds):
        yield from _misshapen_fields(annotation, data, at)
    elif len(kinds) == 1 and get_origin(kinds[0]) in (list, tuple):
        yield from _misshapen_items(get_args(kinds[0])[0], data, at)


def _misshapen_fields(annotation: Any, data: Any, at: Place) -> Iterator[Problem]:
    if not isinstance(data, dict):
        yield Problem(at, f"is {_brief(data)}.", _PLAIN["dict"])
    elif (model := _model_for(annotation, data)) is not None:
        for key in (key for key in data if key in model.model_fields):
            yield from _misshapen(model.model_fields[key].annotation, data[key], (*at, key))


def _misshapen_items(item: Any, data: Any, at: Place) -> Iterator[Problem]:
    if not isinstance(data, list):
        yield Problem(at, f"is {_brief(data)}.", _PLAIN["list"])
        return
    for index, value in enumerate(data):
        yield from _misshapen(item, value, (*at, index))


def _unknown_keys(annotation: Any, data: Any, at: Place) -> Iterator[Problem]:
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from _unknown_keys(annotation, item, (*at, index))
    model = _model_for(annotation, data)
    if model is None:
        return
    fields = model.model_fields
    for key, value in data.items():
        if key not in fields:
            fix = _line(close, value) if (close := closest(str(key), fields)) else ""
            yield Problem((*at, key), "is unknown.", ", ".join(sorted(fields)), fix)
        else:
            yield from _unknown_keys(fields[key].annotation, value, (*at, key))


def _model_for(annotation: Any, data: Any) -> type[BaseModel] | None:
    """The model that `data` is meant to be; of several, the one whose `kind` it names."""
    if not isinstance(data, dict):
        return None
    models = list(_models_in(annotation))
    if len(models) > 1:
        models = [model for model in models if data.get("kind") in get_args(model.model_fields["kind"].annotation)]
    return models[0] if models else None


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _problem(model: type[BaseModel], data: Any, at: Place, detail: ErrorDetails) -> Problem:
    place, field = _locate(model, data, detail)
    name = str(place[-1]) if place else ""
    if detail["type"].startswith("union_tag"):
        return _wrong_kind((*at, *place), detail, field)
    if detail["type"] == "missing":
        return Problem((*at, *place), "is missing.", fix=f"{name}: ...")
    if detail["type"] == "value_error":
        reason = f"is {_brief(detail['input'])}: {detail['ctx']['error']}"
        return Problem((*at, *place), reason, fix=_line(name, _default(field)))
    allowed, suggestion = _allowed(detail, field)
    return Problem((*at, *place), f"is {_brief(detail['input'])}.", allowed, _line(name, suggestion))


def _wrong_kind(place: Place, detail: ErrorDetails, field: FieldInfo | None) -> Problem:
    """Several models fit, told apart by their `kind`, which is missing or unknown."""
    models = _models_in(field.annotation if field else None)
    kinds = [kind for model in models for kind in get_args(model.model_fields["kind"].annotation)]
    given = detail["input"].get("kind") if isinstance(detail["input"], dict) else None
    text = "is missing." if given is None else f"is {_brief(given)}."
    return Problem((*place, "kind"), text, ", ".join(kinds), _line("kind", closest(str(given), kinds) or kinds[0]))


def _locate(model: type[BaseModel], data: Any, detail: ErrorDetails) -> tuple[Place, FieldInfo | None]:
    """Pydantic's location without the tags and type names that are not in the file, and the field there."""
    place: list[str | int] = []
    annotation: Any = model
    field: FieldInfo | None = None
    missing = detail["type"] == "missing"
    for step in detail["loc"]:
        there = isinstance(data, dict) and (step in data or (missing and step == detail["loc"][-1]))
        if there and (within := _model_for(annotation, data)) is not None and step in within.model_fields:
            field = within.model_fields[str(step)]
            annotation = field.annotation
        if there or (isinstance(data, list) and isinstance(step, int)):
            place.append(step)
            data = data.get(step) if isinstance(data, dict) else data[int(step)]
    return tuple(place), field


_PLAIN = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping (key: value lines)",
    "model": "a mapping (key: value lines)",
}
_BOUNDS = {
    "greater_than_equal": ("at least {ge}", "ge"),
    "greater_than": ("more than {gt}", ""),
    "less_than_equal": ("at most {le}", "le"),
    "less_than": ("less than {lt}", ""),
}


def _allowed(detail: ErrorDetails, field: FieldInfo | None) -> tuple[str, Any]:
    """What is allowed in words, and one value that is."""
    kind: str = detail["type"]
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return words.format(**context), context.get(bound, _default(field))
    if kind in ("literal_error", "enum"):
        choices = re.findall(r"'([^']*)'", context["expected"])
        return ", ".join(choices), closest(str(detail["input"]), choices) or choices[0]
    words = _PLAIN.get(kind.split("_")[0], detail["msg"])
    return (detail["msg"] if kind == "string_pattern_mismatch" else words), _default(field)


def _default(field: FieldInfo | None) -> Any:
    """The field's default as it would stand in the file, or NONE."""
    if field is None or field.default is PydanticUndefined or isinstance(field.default, BaseModel):
        return NONE
    return field.default


def _line(name: str, value: Any) -> str:
    """The line that gives `name` this value: no line for NONE, and for what fills lines itself only its first."""
    if value is NONE or not name:
        return ""
    if isinstance(value, dict | list):
        return f"{name}:"
    return f"{name}: {value if isinstance(value, str) else json.dumps(value, default=str)}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
