"""How many blocks the KV pools have: what the configuration asks for, within the memory that is free."""

import torch

from engine.config import EngineConfig
from engine.device import Device
from engine.errors import ConfigError
from engine.model_config import ModelConfig


def _block_bytes(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
    values = 2 * model_config.layers * model_config.kv_heads * model_config.head_dim * config.cache.block_size
    return values * dtype.itemsize


def num_blocks(config: EngineConfig, model_config: ModelConfig, device: Device, max_model_len: int) -> int:
    """Blocks in the pool, block 0 included. At least one sequence of max_model_len must fit, unless asked otherwise."""
    cache, block_bytes = config.cache, _block_bytes(config, model_config, device.kv_dtype)
    free = _free_bytes(device.device)
    blocks = cache.num_blocks or int(free * cache.memory_fraction) // block_bytes
    if blocks * block_bytes > free:
        raise ConfigError(
            f"cache.num_blocks is {blocks}, which needs {_gib(blocks * block_bytes)}, but {_gib(free)} are free. "
            f"Write at most num_blocks: {int(free * 0.9) // block_bytes}.",
            param="cache.num_blocks",
        )
    _check_host_tier(config, block_bytes, blocks * block_bytes)
    needed = -(-max_model_len // cache.block_size) + 1
    if blocks < needed:
        raise ConfigError(
            f"The KV pool has {blocks} blocks of {cache.block_size} tokens, too few for one sequence of "
            f"max_model_len {max_model_len}: that takes {needed} ({_gib(needed * block_bytes)}, "
            f"free: {_gib(free)}). Write cache.num_blocks: {needed}, a larger cache.memory_fraction, or "
            f"max_model_len: {max(2, (blocks - 1) * cache.block_size)}.",
            param="cache",
        )
    return blocks


def _check_host_tier(config: EngineConfig, block_bytes: int, pool_bytes: int) -> None:
    """On a CPU both tiers share one memory."""
    if not config.cache.host_blocks:
        return
    free = _free_bytes(torch.device("cpu")) - (pool_bytes if config.device == "cpu" else 0)
    wanted = config.cache.host_blocks * block_bytes
    if wanted > free:
        raise ConfigError(
            f"cache.host_blocks is {config.cache.host_blocks}, which needs {_gib(wanted)}, but {_gib(free)} of host "
            f"memory are free. Write at most host_blocks: {max(0, int(free * 0.9)) // block_bytes}.",
            param="cache.host_blocks",
        )


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # a machine with a GPU can do without it

    available: int = psutil.virtual_memory().available
    return available


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
