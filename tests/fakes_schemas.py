"""Random JSON schemas of the kinds that people write: nested objects, arrays, enums, bounded strings and numbers."""

import random
from typing import Any

NAMES = ("id", "name", "age", "tags", "price", "kind", "note", "items", "owner", "active")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object at the top. All strings and arrays are bounded, so that any output comes to an end."""
    if depth == 0:
        return _object(rng, depth)
    kinds = [_string, _integer, _number, _enum, _flag, _nothing]
    if depth < 3:
        kinds += [_object, _array, _either]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 4 - depth))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": names[: rng.randint(0, len(names))],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 3}


def _either(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    bounds = {"minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}
    return {"type": "string", **rng.choice([bounds, {"pattern": "^[a-z]{2,6}$"}, {"format": "date"}])}


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "number", "minimum": 0, "maximum": 10, "multipleOf": 0.5}


def _enum(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True], rng.randint(1, 4))}


def _flag(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "boolean"}


def _nothing(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "null"}
