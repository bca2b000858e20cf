"""Between host and device without waiting: what a step needs goes over while the one before still runs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 4  # numbers of 32 bits: kernels read 16 bytes at once


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """To a GPU out of pinned memory, so that the host need not wait until it has arrived."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def on(device: torch.device, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """A list as a tensor there."""
    return to_device(torch.tensor(values, dtype=dtype), device)


def together(arrays: Sequence[NDArray[np.integer[Any]]], device: torch.device) -> list[Tensor]:
    """One copy for all: int32 tensors of their shapes, each on a border of 16 bytes."""
    starts = np.cumsum([0, *(-(-array.size // ALIGNMENT) * ALIGNMENT for array in arrays)]).tolist()
    packed = np.zeros(max(1, starts[-1]), np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.reshape(-1)
    whole = to_device(torch.from_numpy(packed), device)
    return [whole[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=False)]


def read(tensor: Tensor) -> Callable[[], Tensor]:
    """Starts the way to the host; the returned call waits for this tensor, and for nothing that comes after it."""
    if tensor.device.type == "cpu":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Tensor:
        arrived.synchronize()
        return host

    return wait
