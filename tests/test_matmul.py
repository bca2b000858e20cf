"""The fixed-tile linear for GPUs, in Triton's interpreter, and compiled ahead of time for the GPUs it is made for.

Both in processes of their own: Triton decides at its first import whether it interprets, once for the whole process.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMPILE = """
import itertools, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import matmul

options = {"num_warps": matmul.WARPS, "num_stages": matmul.STAGES}
sizes = {name: getattr(matmul, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
for element, has_bias, capability in itertools.product(("fp16", "bf16", "fp32"), (False, True), (80, 90)):
    constants = {"HAS_BIAS": has_bias, **sizes}
    pointers = dict.fromkeys(("x_MK", "weight_NK", "bias_N", "out_MN"), f"*{element}")
    numbers = dict.fromkeys(("rows", "outputs", "inputs"), "i32")
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=matmul.linear_kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"] and made.metadata.shared <= 163 * 1024
    assert element == "fp32" or "mma.sync" in made.asm["ptx"], "no tensor cores"
    print(element, has_bias, capability, made.metadata.shared)
"""


def test_it_compiles_for_the_gpus_it_is_made_for() -> None:
    run = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 12


def test_it_computes_what_it_should_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpret_matmul.py"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stdout
    assert "27 passed" in run.stdout
