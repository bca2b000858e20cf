"""Where a model's weights come from: safetensors files, or random numbers. A model asks by name and shape."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from engine.errors import ConfigError

INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")
QUICK_BYTES = 1 << 30  # one file of this size is loaded before anyone has read a progress bar


class WeightSource(Protocol):
    def has(self, name: str) -> bool:
        """Whether an optional tensor is there. Those a model cannot do without are simply asked for."""
        ...

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in the source's dtype and on its device, for the caller alone. Raises ConfigError."""
        ...

    def unused(self) -> list[str]:
        """Names never asked for: weights that the model does not know."""
        ...


class SafetensorsSource:
    """The weights in a model folder, in one file or many.

    The files are mapped and each tensor is copied out when asked for, so memory holds the weights once, plus the
    tensor at hand; the mapped pages are the system's to drop.
    """

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises ConfigError if a file is missing, cut short or not what the index says."""
        self._folder, self._dtype, self._device = folder, dtype, device
        placed = _index(folder)
        shards = {file: _open(file) for file in _files(folder, placed)}
        self._shards = {name: (file, shard) for file, shard in shards.items() for name in sorted(shard.keys())}
        for name, file in placed.items():
            if self._shards.get(name, (None,))[0] != folder / file:
                raise _broken(f"{folder / INDEX} says that {name} is in {file}, but it is not")
        self._unused = set(self._shards)
        self._bar = _progress(list(shards), len(self._shards))

    def has(self, name: str) -> bool:
        return name in self._shards

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._shards:
            raise _broken(f"the weights in {self._folder} lack the tensor {name}, which config.json asks for")
        file, shard = self._shards[name]
        _check(name, file, shard.get_slice(name), shape)
        self._count(name, file)
        tensor: Tensor = shard.get_tensor(name).to(device=self._device, dtype=self._dtype, copy=True)
        return tensor

    def unused(self) -> list[str]:
        return sorted(self._unused)

    def _count(self, name: str, file: Path) -> None:
        self._unused.discard(name)
        self._bar.set_postfix_str(file.name, refresh=False)
        self._bar.update()
        if not self._unused:
            self._bar.close()


class DummySource:
    """Random weights for any model without reading a file: the same for the same seed, name, shape and device.

    Norms are one and all else is normal with deviation 0.02, so that activations stay in range. It offers no optional
    tensors.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype, self._device, self._seed = dtype, device, seed

    def has(self, name: str) -> bool:
        return False

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.ones(shape, dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return tensor
        seed = zlib.crc32(name.encode(), self._seed)  # by name, so that the order of asking does not matter
        return tensor.normal_(0.0, 0.02, generator=torch.Generator(self._device).manual_seed(seed))

    def unused(self) -> list[str]:
        return []


def _index(folder: Path) -> Mapping[str, str]:
    """Tensor name → file name, as the index of a model of many files has it; empty if there is none."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        placed: dict[str, str] = json.loads(path.read_text())["weight_map"]
        return dict(placed)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise _broken(f"{path} cannot be read ({error!r})") from error


def _files(folder: Path, placed: Mapping[str, str]) -> list[Path]:
    """One whole set of weights; some models carry a second set under other file names."""
    if placed:
        return [folder / name for name in sorted(set(placed.values()))]
    if (whole := folder / "model.safetensors").exists():
        return [whole]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    raise _broken(f"{folder} holds no .safetensors files")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise _broken(f"the weight file {file} is missing") from error
    except (OSError, SafetensorError) as error:
        raise _broken(f"{file} is not a whole safetensors file ({error})") from error


def _check(name: str, file: Path, stored: Any, shape: tuple[int, ...]) -> None:
    found = tuple(stored.get_shape())
    if found != shape:
        raise _broken(f"{name} in {file} has shape {list(found)}, but config.json asks for {list(shape)}")
    if stored.get_dtype() not in FLOATS:
        raise ConfigError(
            f"model: {name} in {file} is stored as {stored.get_dtype()}; supported are {', '.join(FLOATS)}. "
            "Use a model whose weights are not quantised.",
            param="model",
        )


def _progress(files: list[Path], tensors: int) -> "tqdm[Any]":
    quick = len(files) == 1 and files[0].stat().st_size <= QUICK_BYTES
    return tqdm(total=tensors, desc="Loading weights", unit="tensor", disable=quick)


def _broken(what: str) -> ConfigError:
    return ConfigError(
        f"model: {what}. Download or convert the model again, or set model to a folder that is whole.", param="model"
    )
