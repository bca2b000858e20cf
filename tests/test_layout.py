"""The layers and the sizes of the code base, enforced: who may import whom, and how long a function may grow."""

import ast
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "kernels", "deployments", "loadtests", "cluster")
PURE = (
    "engine.scheduler",
    "engine.policies",
    "engine.cache",
    "engine.request",
    "engine.contract",
    "engine.intake",
    "engine.resolve",
    "engine.speculate",
)
MODEL_SIDE = {"attention", "build", "device", "foreign", "graphs", "inputs", "model", "runner", "sampler"}
MODEL_SIDE |= {"gpu_check", "gpu_models", "profile_worker"}  # they try the model side
# loadtests speak HTTP or drive processes; from the engine they take only what knows no tensor.
OPEN_TO_LOADTESTS = {
    "engine.cache",
    "engine.catalogue",
    "engine.config",
    "engine.contract",
    "engine.errors",
    "engine.intake",
    "engine.policies",
    "engine.request",
    "engine.scheduler",
    "engine.speculate",
    "engine.timing",
}


def sources(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def offenders(paths: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{p.relative_to(ROOT)} imports {name}" for p in paths for name in imports(p) if name.split(".")[0] in forbidden
    ]


def functions() -> Iterator[tuple[str, int, int]]:
    """(where, lines, parameters) of each function."""
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{path.relative_to(ROOT)}:{node.name}", node.end_lineno - node.lineno + 1, len(node.args.args)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in memory after `statement`, in a process of its own."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(run.stdout.split())


def test_the_engine_knows_neither_ray_nor_text_nor_its_users() -> None:
    assert not offenders(sources("engine"), {"ray", "deployments", "loadtests", "fastapi", "starlette"})


def test_only_the_model_side_of_the_engine_imports_kernels() -> None:
    others = [path for path in sources("engine") if path.stem not in MODEL_SIDE]
    assert not offenders(others, {"kernels"})


def test_kernels_import_nothing_of_ours_but_kernels() -> None:
    assert not offenders(sources("kernels"), {"engine", "deployments", "loadtests", "ray"})


def test_deployments_leave_loadtests_and_kernels_alone() -> None:
    assert not offenders(sources("deployments"), {"loadtests", "kernels", "tests"})


def test_loadtests_speak_http_or_import_the_pure_parts_of_the_engine() -> None:
    assert not offenders(sources("loadtests"), {"kernels", "deployments", "ray", "tests"})
    used = {name for path in sources("loadtests") for name in imports(path) if name.split(".")[0] == "engine"}
    assert {".".join(name.split(".")[:2]) for name in used} <= OPEN_TO_LOADTESTS


def test_cluster_is_data() -> None:
    assert not sources("cluster")


def test_no_environment_variables_below_deployments() -> None:
    for path in sources("engine", "kernels"):
        assert "environ" not in path.read_text() and "getenv" not in path.read_text(), path


@pytest.mark.parametrize("module", PURE)
def test_scheduling_loads_no_tensor_library_and_no_clock(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert not loaded & {"torch", "ray", "numpy", "transformers", "numba"}
    for path in sources(*(name.replace(".", "/") for name in PURE if (ROOT / name.replace(".", "/")).is_dir())):
        assert not {"time", "datetime"} & set(imports(path))


def test_the_ingress_starts_without_torch() -> None:
    assert not loaded_by("import deployments.http") & {"torch", "transformers", "numba"}


def test_the_replica_starts_without_torch() -> None:
    assert not loaded_by("import deployments.replica, deployments.app") & {"torch", "transformers", "numba"}


def test_transformers_works_beside_a_package_named_kernels() -> None:
    """A package of that name exists that transformers looks for; ours must not be mistaken for it."""
    assert (ROOT / "kernels/__init__.py").read_text() == ""
    loaded_by("import kernels\nfrom transformers import AutoModelForCausalLM, LlamaForCausalLM")


def test_functions_stay_short_and_take_few_parameters() -> None:
    found = list(functions())
    assert statistics.median(lines for _, lines, _ in found) < 10
    assert not [(where, lines) for where, lines, _ in found if lines > 50]
    outside_kernels = [entry for entry in found if not entry[0].startswith("kernels/")]
    assert not [(where, count) for where, _, count in outside_kernels if count > 7]  # six and self


def test_files_stay_readable_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in sources(*PACKAGES)}
    assert not {path: length for path, length in lengths.items() if length > 300}


def test_every_module_opens_with_its_rule() -> None:
    for path in sources(*PACKAGES, "tests"):
        if path.stem != "__init__":
            assert ast.get_docstring(ast.parse(path.read_text())), path
