"""Tests the tests: seeds one fault at a time into a copy of the tree, and some test has to turn red.

`python -m tests.mutants [WORD]` runs all faults, or those whose file or reason contains the word. Exit status 1 if a
fault survives.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults import FAULTS, TESTS, Fault

ROOT = Path(__file__).parent.parent
COPIED = ("engine", "kernels", "loadtests", "tests", "pyproject.toml")
WORKERS = 2
LONGEST_S = 120.0


def run_tests(tree: Path, files: Sequence[str]) -> int:
    """pytest's exit status: 0 all passed, 1 some failed, 2 and more: it could not run them. A hang is a failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode


def copy_tree(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / name)


def is_caught(fault: Fault) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(tree)
        seed(tree, fault)
        status = run_tests(tree, TESTS[fault.file])
    assert status in (0, 1), f"the tests could not run with this fault: {fault.reason}"
    return status == 1


def seed(tree: Path, fault: Fault) -> None:
    path = tree / fault.file
    path.write_text(path.read_text().replace(fault.before, fault.after))


def check_faults() -> None:
    """A fault whose place has moved would be no fault."""
    for fault in FAULTS:
        found = (ROOT / fault.file).read_text().count(fault.before)
        assert found == 1, f"{fault.file} has this {found} times, not once: {fault.before}"


def check_sound_tree() -> None:
    """Every fault would be caught by tests that fail anyway."""
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        files = sorted({file for files in TESTS.values() for file in files})
        assert run_tests(Path(folder), files) == 0, "the tests fail without any fault; mend them first"


def main(arguments: Sequence[str]) -> int:
    word = arguments[0] if arguments else ""
    faults = [fault for fault in FAULTS if word in fault.file or word in fault.reason]
    check_faults()
    check_sound_tree()
    caught = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        for fault, hit in zip(faults, pool.map(is_caught, faults), strict=True):
            caught += hit
            print(f"{'caught  ' if hit else 'SURVIVED'}  {fault.file}: {fault.reason}", flush=True)
    print(f"{len(faults)} faults seeded, {caught} caught")
    return 0 if caught == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
