"""A text to measure models on: what this project says of itself, in its README and the docstrings of its modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "kernels", "deployments", "loadtests", "tests")


def text() -> str:
    """The same for the same state of the project: files in order of their names."""
    readme = ROOT / "README.md"
    parts = [readme.read_text()] if readme.exists() else []
    return "\n\n".join([*parts, *(words for folder in FOLDERS for words in _docstrings(ROOT / folder))])


def _docstrings(folder: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(folder.rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
        said = [ast.get_docstring(node) for node in nodes]
        yield "\n".join(words for words in said if words)
