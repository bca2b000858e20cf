"""A folder is built once: whole or not at all, by one process while the others wait."""

import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from engine.errors import ConfigError
from engine.once import build_once


def quiet(line: str) -> None:
    pass


def visible(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock"))


def test_a_build_that_fails_leaves_nothing_and_the_next_one_succeeds(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        build_once(tmp_path / "model", fails, quiet)
    assert visible(tmp_path) == []
    (tmp_path / ".model.part").mkdir()  # as a killed process leaves it
    (tmp_path / ".model.part" / "half").write_text("half")
    folder = build_once(tmp_path / "model", lambda folder: (folder / "file").touch(), quiet)
    assert visible(folder) == [".complete", "file"]


def test_who_comes_while_another_builds_waits_and_builds_nothing(tmp_path: Path) -> None:
    building, go_on = threading.Event(), threading.Event()
    said: SimpleQueue[str] = SimpleQueue()
    builds = []

    def build(folder: Path) -> None:
        builds.append(folder)
        building.set()
        assert go_on.wait(30)
        assert visible(tmp_path) == [".model.part"]

    first, second = (threading.Thread(target=build_once, args=(tmp_path / "model", build, said.put)) for _ in range(2))
    first.start()
    assert building.wait(30)
    second.start()
    assert "waiting" in said.get(timeout=30)
    go_on.set()
    first.join(30)
    second.join(30)
    assert len(builds) == 1 and visible(tmp_path) == ["model"]
