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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("engine", "kernels", "loadtests", "tests", "pyproject.toml")
WORKERS = 2
LONGEST_S = 120.0

BLOCKS = "engine/cache/blocks.py"
PAGED = "engine/cache/paged.py"
PREFIX = "engine/cache/prefix.py"
SCHEDULER = "engine/scheduler.py"
PREEMPTION = "engine/policies/preemption.py"
RETRACT = "engine/policies/retract.py"
STATIC = "engine/policies/static.py"

PREEMPTION_TESTS = ("tests/test_policy_preemption.py", "tests/test_conformance.py")
TESTS = {
    BLOCKS: ("tests/test_cache.py",),
    PAGED: ("tests/test_cache.py",),
    PREFIX: ("tests/test_cache.py",),
    SCHEDULER: (*PREEMPTION_TESTS, "tests/test_policy_retract.py", "tests/test_scheduler.py"),
    PREEMPTION: PREEMPTION_TESTS,
    RETRACT: ("tests/test_policy_retract.py",),
    STATIC: ("tests/test_policy_static.py",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """`before` stands once in `file`, and `after` in its place is wrong because of `reason`."""

    reason: str
    file: str
    before: str
    after: str


FAULTS = (
    Fault("block 0 is handed out", BLOCKS, "range(num_blocks - 1, 0, -1)", "range(num_blocks - 1, -1, -1)"),
    Fault("a sequence loses its first block first", BLOCKS, "in reversed(blocks):", "in blocks:"),
    Fault("the youngest cached block is reused", BLOCKS, "next(iter(self._cached))", "next(reversed(self._cached))"),
    Fault(
        "cached blocks are reused while others are free",
        BLOCKS,
        "self._free.pop() if self._free else self._reuse_oldest()",
        "self._reuse_oldest() if self._cached else self._free.pop()",
    ),
    Fault("a reused block stays findable", BLOCKS, "self._findable[block] = 0", "self._findable[block] = 1"),
    Fault("a second holder is not counted", BLOCKS, "self._references[block] += 1", "self._references[block] = 1"),
    Fault("the index keeps what is gone", BLOCKS, "        self._forget(block)\n", ""),
    Fault("all of a prompt is taken from the cache", PAGED, "(len(request.tokens) - 1) //", "len(request.tokens) //"),
    Fault("a hit counts as free, too", PAGED, "- len(prefix) + revived", "- len(prefix)"),
    Fault(
        "a shared block counts as gained",
        PAGED,
        "(block) == count for block, count in holders",
        "(block) >= count for block, count in holders",
    ),
    Fault("a hit after an eviction is reported", PAGED, "if not request.evictions:", "if request.tokens:"),
    Fault("a prompt to be scored reads the cache", PAGED, "prompt_logprobs is not None:", "prompt_logprobs == -1:"),
    Fault(
        "half a block is published",
        PAGED,
        "full = computed // self.block_size",
        "full = min(self.blocks_for(computed), len(request.tokens) // self.block_size)",
    ),
    Fault(
        "the check overlooks references",
        PAGED,
        "(block) == count for block, count in held",
        "(block) > 0 for block, count in held",
    ),
    Fault("a hash ignores what stands before", PREFIX, "parent = hashes[-1] if hashes else ROOT", "parent = ROOT"),
    Fault("a hit leaps over a gap", PREFIX, "                break\n", "                continue\n"),
    Fault("equal content is findable twice", PREFIX, "if digest in self._block_of:", "if block in self._hash_of:"),
    Fault("an evicted request joins at the end", SCHEDULER, "self.waiting.appendleft(", "self.waiting.append("),
    Fault("tokens of a victim are lost to the budget", SCHEDULER, "self.tokens -= chunk.length", "pass"),
    Fault(
        "blocks are published when planned",
        SCHEDULER,
        "        self.tokens += granted\n",
        "        self.tokens += granted\n        self.kv.publish(request, end)\n",
    ),
    Fault(
        "a resumed request counts as decoding",
        SCHEDULER,
        "request.admitted_len = len(request.tokens)",
        "request.admitted_len = request.prompt_len",
    ),
    Fault("a chunk in the middle samples", SCHEDULER, "samples=end == len(request.tokens)", "samples=True"),
    Fault("finished requests keep their blocks", SCHEDULER, "            self.kv.release(request)\n", ""),
    Fault("a failure is not reported", SCHEDULER, "            self._failures.append(", "            print("),
    Fault(
        "the testing device evicts in the middle of a prompt",
        SCHEDULER,
        "len(request.tokens) > request.admitted_len",
        "len(request.tokens) >= request.admitted_len",
    ),
    Fault("requests join in a step that evicted", PREEMPTION, "if not step.evicted:", "if step.running is not None:"),
    Fault("all are evicted in vain", PREEMPTION, "if wanted > step.kv.room +", "if wanted > 10**9 +"),
    Fault(
        "a self-eviction ends the pass",
        PREEMPTION,
        "                self._make_room(step, request, limit)\n",
        "                self._make_room(step, request, limit)\n                if not request.blocks: return\n",
    ),
    Fault("the oldest is evicted", PREEMPTION, "step.running.index(request) : -1]", "step.running.index(request)]"),
    Fault("among equals the earliest is evicted", PREEMPTION, "step.now), other.arrival", "step.now), -other.arrival"),
    Fault(
        "an evicted request loses its place among equals",
        PREEMPTION,
        "key=lambda request: self._value(request, step.now))",
        "key=lambda request: (self._value(request, step.now), request.arrival))",
    ),
    Fault("waiting makes less urgent", PREEMPTION, "return request.priority - (", "return request.priority + ("),
    Fault("one too many passes the head", PREEMPTION, ">= self._config.max_bypass", "> self._config.max_bypass"),
    Fault("an evicted head is passed", PREEMPTION, "if head.evictions:", "if head.evictions > 99:"),
    Fault("larger ones pass the head", PREEMPTION, "if len(request.tokens) < len(head.tokens) and", "if"),
    Fault("the watermark blocks an idle engine", PREEMPTION, " if step.running else 0", ""),
    Fault("the first chunk is enough to be admitted", PREEMPTION, "len(request.tokens)) + spare", "1) + spare"),
    Fault("a lone prompt is capped", PREEMPTION, "len(step.waiting) > 1:", "len(step.waiting) > 0:"),
    Fault("an equal test of kv space admits", RETRACT, "self._kv - wanted,", "self._kv - wanted + 1,"),
    Fault(
        "the guess holds for those who ignore EOS", RETRACT, "1.0 if request.params.ignore_eos", "ratio if request.id"
    ),
    Fault("a cut prompt reserves its output", RETRACT, "(0 if request.pending else ", "(0 if request.id == '' else "),
    Fault("a revived prefix stays free", RETRACT, "taken = (room - self._step.kv.room) * size", "taken = length"),
    Fault("a blocked chunk is passed", RETRACT, "            self._kv = 0\n", "            self._kv -= 0\n"),
    Fault("a chunk ends inside a block", RETRACT, "// size * size - start", "- start"),
    Fault("newcomers come before a cut prompt", RETRACT, "adder.go_on(request)", "request.id"),
    Fault("the longest output is taken back", RETRACT, "(request.num_output, -req", "(-request.num_output, -req"),
    Fault(
        "the shortest prompt is taken back", RETRACT, "-request.prompt_len, -request", "request.prompt_len, -request"
    ),
    Fault("the earliest is taken back", RETRACT, "prompt_len, -request.arrival", "prompt_len, request.arrival"),
    Fault("the shield comes too late", RETRACT, "request.evictions < shielded", "request.evictions <= shielded"),
    Fault(
        "the guess falls after a retraction",
        RETRACT,
        "max(self.value, min(used / allowed",
        "max(0.0, min(used / allowed",
    ),
    Fault("the guess does not hold", RETRACT, "        self._hold = self._headroom\n", ""),
    Fault("a waiting queue is taken for idleness", RETRACT, "bool(step.waiting)", "False"),
    Fault("a long queue looks prefixes up", RETRACT, "<= MOST_CACHE_AWARE", "<= 10 * MOST_CACHE_AWARE"),
    Fault("decodes wait for ever", RETRACT, "            self._prefills_in_a_row += 1\n", ""),
    Fault("adaptive chunks shrink without end", RETRACT, "max(SCALES[0], self._scale * 0.75)", "self._scale * 0.75"),
    Fault(
        "output is not reserved up front",
        STATIC,
        "request.prompt_len + request.params.max_tokens",
        "request.prompt_len",
    ),
    Fault("busy rows count as idle", STATIC, "sum(not request.blocks", "sum(bool(request.blocks)"),
    Fault(
        "who does not fit stops the engine", STATIC, "                step.evict(request)\n", "                break\n"
    ),
)


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
