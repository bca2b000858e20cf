"""A YAML file together with the line of each of its values, so that an error can point at it. Knows no schema."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class YamlFile:
    """The parsed `data` of `path`, and the node tree that knows the lines."""

    path: Path
    data: Any
    root: yaml.Node | None

    def line(self, place: Place) -> int:
        """The 1-based line of the value at `place`, or of the nearest value around it."""
        node, line = self.root, 1
        for step in place:
            entry = _entry(node, step)
            if entry is None:
                break
            line, node = entry[0].start_mark.line + 1, entry[1]
        return line


def read_yaml(path: Path) -> YamlFile:
    """Raises ConfigError if the file cannot be read, is not YAML, or says one key twice."""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Give the path of a Serve config file.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8: {error}.") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}{_at(error)}: this is not YAML: {error.problem}. Mend this line.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not YAML: {error}.") from error
    for key in _repeated_keys(root):
        raise ConfigError(f"{path}, line {key.start_mark.line + 1}: {key.value} is set twice. Keep one of the two.")
    return YamlFile(path, data, root)


def spell(place: Place) -> str:
    """`applications[0].args.model`"""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".")


def _at(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return f", line {mark.line + 1}" if mark else ""


def _repeated_keys(node: yaml.Node | None) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item)
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                yield key
            seen.add(key.value)
            yield from _repeated_keys(value)


def _entry(node: yaml.Node | None, step: str | int) -> tuple[yaml.Node, yaml.Node] | None:
    """Where the step's line begins, and what stands there."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step]
    return None
