"""Folders that are built once and then only read: one process builds, the others wait, nobody sees half of one."""

import json
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from engine.errors import ConfigError

MARKER = ".complete"
FORMAT = 1  # raise it when the builders change, so that folders of an older make are built again

Report = Callable[[str], None]


def build_once(folder: Path, build: Callable[[Path], None], report: Report) -> Path:
    """`folder`, built by `build(empty_folder)` unless it is whole already.

    The folder appears under its name only when it is finished; a build that fails leaves nothing behind. Raises
    ConfigError for `model_cache` if the disk refuses.
    """
    if not is_whole(folder):
        with _lock(folder, report):
            if not is_whole(folder):  # another process may have built it while this one waited
                _build(folder, build)
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file is there with the size it was written with. Looks at names and sizes only."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        return bool(marker == {"format": FORMAT, "sizes": {name: _size(folder / name) for name in marker["sizes"]}})
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _size(file: Path) -> int:
    return file.stat().st_size


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    scratch = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(scratch, ignore_errors=True)  # a killed process may have left one
    try:
        scratch.mkdir()
        build(scratch)
        _seal(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _seal(folder: Path) -> None:
    sizes = {file.name: _size(file) for file in folder.iterdir()}
    (folder / MARKER).write_text(json.dumps({"format": FORMAT, "sizes": sizes}))


def _lock(folder: Path, report: Report) -> AbstractContextManager[object]:
    """The folder's lock, held until the context ends. The system frees it when its holder dies."""
    from filelock import FileLock, Timeout  # costs more than all else that a second start does

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return lock.acquire(blocking=False)
    except Timeout:
        report(f"Another process is preparing {folder.name}; waiting for it.")
        return lock.acquire()
    except OSError as error:
        raise _unwritable(folder.parent, error) from error


def _unwritable(cache: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"model_cache is {cache}, which cannot be used: {error}. "
        "Make room or set model_cache to a folder that can be written to.",
        param="model_cache",
    )
