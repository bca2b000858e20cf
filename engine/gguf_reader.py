"""A GGUF file as metadata and tensors; whatever is wrong with the file is a ConfigError that says so."""

from pathlib import Path
from typing import Any, TypeVar, overload

import gguf
import numpy as np
import numpy.typing as npt

from engine.errors import ConfigError

T = TypeVar("T")
D = TypeVar("D")


class GgufFile:
    """Metadata by key, tensors by name. Raises ConfigError if the file is not a whole GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metadata, self._tensors = _read(path)
        if self.value("split.count", int, 1) > 1:
            raise self.error("is one part of several. Join them first: llama-gguf-split --merge FIRST_PART WHOLE.gguf")

    @property
    def architecture(self) -> str:
        return self.value("general.architecture", str)

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Slowest dimension first, as torch has it."""
        return tuple(int(size) for size in reversed(self._find(name).shape))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor's exact values, in float32."""
        tensor = self._find(name)
        try:
            return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise self.error(
                f"stores {name} as {kind}, which cannot be read. Use F32, F16, BF16, Q8_0, Q4_K or the like."
            ) from error

    @overload
    def value(self, key: str, kind: type[T], /) -> T: ...
    @overload
    def value(self, key: str, kind: type[T], default: D, /) -> T | D: ...
    def value(self, key: str, kind: type[T], /, *default: D) -> T | D:
        """The metadata under `key`; ConfigError if it is of another type, or absent and no default is given."""
        if key not in self._metadata and default:
            return default[0]
        value = self._metadata.get(key)
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, kind):
            found = "is absent" if value is None else f"is a {type(value).__name__}"
            raise self.error(f"has no usable metadata: {key} {found}, it must be a {kind.__name__}. Convert it again.")
        return value

    def _find(self, name: str) -> Any:
        if name not in self._tensors:
            raise self.error(f"holds no tensor {name}; it is not a whole language model. Convert it again.")
        return self._tensors[name]

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"model: {self.path} {what}", param="model")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        reader = gguf.GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, LookupError, OverflowError) as error:
        raise ConfigError(
            f"model: {path} is not a whole GGUF file ({error}); it is damaged or was cut short. "
            "Delete it and download it again.",
            param="model",
        ) from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}
