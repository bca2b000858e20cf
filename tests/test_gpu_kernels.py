"""The Triton kernels without a GPU: in Triton's interpreter, and compiled ahead of time for the GPUs they are made for.

The interpreter has a process of its own: Triton decides at its first import whether it interprets, once for all.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.compile import FLOATS, TARGETS, Configuration, compile_for, configurations, cover

ROOT = Path(__file__).parent.parent
IGNORED = frozenset({"HEADS", "HALF", "HALF_PADDED"})  # they change sizes, not code


def element(configuration: Configuration) -> str:
    """The first argument's type."""
    return next(iter(configuration.types.values()))


def thin(target: str) -> list[Configuration]:
    """All of sm_90's kinds; elsewhere, and in the other number types, the same code with 128 numbers to a head."""
    chosen = [one for one in configurations(target) if element(one) in ("*bf16", "*i32")]
    if target != "sm_90":
        return cover((one for one in chosen if one.constants.get("DIM", 128) == 128), IGNORED)
    wide = [one for one in configurations(target) if one.constants.get("DIM", 128) == 128]
    rest = [one for one in wide if element(one) in ("*fp32", "*fp16") and not one.constants.get("CAPPED", False)]
    return cover(chosen, IGNORED) + cover(rest, IGNORED | {"SPREAD", "WINDOWED"})


@pytest.mark.parametrize("target", TARGETS)
def test_they_compile_for_the_gpus_they_are_made_for(target: str) -> None:
    for configuration in thin(target):
        made = compile_for(configuration, target)
        multiplies = configuration.kernel.__name__ in ("attention_kernel", "linear_kernel")
        if multiplies and "*fp32" not in configuration.types.values() and target != "gfx942":
            assert "mma.sync" in made.assembly or "wgmma" in made.assembly, f"{configuration.name}: no tensor cores"


def test_a_cover_has_every_kernel_element_and_flag() -> None:
    chosen = thin("sm_90")
    assert {one.kernel for one in chosen} == {one.kernel for one in configurations("sm_90")}
    attention = [one for one in chosen if one.kernel.__name__ == "attention_kernel"]
    assert "sample_kernel" in {one.kernel.__name__ for one in chosen}
    assert {one.types["q_THD"] for one in attention} == {f"*{element}" for element in FLOATS}
    for flag in ("SPREAD", "WINDOWED", "CAPPED"):
        assert {one.constants[flag] for one in attention} == {False, True}
    assert {one.constants["DIM"] for one in attention} == {64, 80, 96, 128}


@pytest.mark.parametrize("module", ["interpret_matmul", "interpret_gpu_kernels"])
def test_they_compute_what_their_references_compute_in_the_interpreter(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{module}.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout and "skipped" not in run.stdout
