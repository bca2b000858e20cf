"""Where and how a model computes: device, number types and kernels, chosen from the configuration."""

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_config import ModelConfig
from kernels.backend import Backend, WeightKind, choose_backend


@dataclass(frozen=True, slots=True)
class Device:
    """`dtype` of the arithmetic, `kv_dtype` of the KV pool."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: Backend


def choose_device(config: EngineConfig, model_config: ModelConfig) -> Device:
    """Raises ConfigError if the device is not there or has no kernels for what is asked."""
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU here. Write device: cpu.", param="device")
    threads = config.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, automatic if config.dtype == "auto" else config.dtype)
    invariant = config.batch_invariant == "require"
    weights = _weight_kind(config)
    backend = choose_backend(
        device,
        dtype,
        model_config.head_dim,
        threads,
        weights=weights,
        invariant=invariant,
        eight_bits=device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9),
    )
    if weights == "int8" and not backend.quantizes:
        raise ConfigError(
            "quantization is int8, which only the compiled CPU kernels do: device cpu, dtype auto and a head dim that "
            "is a multiple of 16. Write quantization: none.",
            param="quantization",
        )
    return Device(device, dtype, _kv_dtype(config, dtype, backend), backend)


def _kv_dtype(config: EngineConfig, dtype: torch.dtype, backend: Backend) -> torch.dtype:
    wanted = config.cache.dtype
    if wanted == "auto":
        return torch.float16 if config.dtype == "auto" and torch.float16 in backend.kv_dtypes else dtype
    kv_dtype: torch.dtype = getattr(torch, wanted)
    if kv_dtype not in backend.kv_dtypes:
        known = ", ".join(sorted(str(one).removeprefix("torch.") for one in backend.kv_dtypes))
        raise ConfigError(
            f"cache.dtype is {wanted}, but the kernels for this device take {known}. Write dtype: auto.",
            param="cache.dtype",
        )
    return kv_dtype


def _weight_kind(config: EngineConfig) -> WeightKind:
    """How the compiled CPU kernels keep the weights of linears."""
    if config.quantization == "int8":
        return "int8"
    return "float16" if config.dtype == "auto" else "float32"
