"""The GPU check without a GPU: the same script, tiny shapes, Triton's interpreter, and only what such a machine has."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a GPU machine need not have: everything but torch, triton, transformers (and what that brings), numpy, pydantic.
# psutil is asked about the memory of machines without a GPU.
BARE = """
import importlib.abc, runpy, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("llguidance", "gguf", "ray", "httpx", "fastapi", "numba", "opentelemetry"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.argv = ["gpu_check", "--json", sys.argv[1]]
runpy.run_module("engine.gpu_check", run_name="__main__")
"""


def test_it_runs_on_a_bare_machine_and_finds_all_good(tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", BARE, str(file)], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    report = json.loads(file.read_text())
    assert report["good"] and "All good" in run.stdout
    assert {one["dtype"] for one in report["kernels"]} == {"float32", "float16", "bfloat16"}
    assert all(one["error"] <= one["allowed"] for one in report["kernels"]) and len(report["kernels"]) > 30
    assert sum(one["compared"] for one in report["tokens"]) >= 6
    variants = {(one["variant"], one["batch"]) for one in report["rates"]}
    assert len(variants) == 8 and all(one["decode_tokens_per_s"] > 0 for one in report["rates"])
