"""Puts an engine together from its configuration: model, KV pool, scheduler. The one place that knows all parts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.attention import PagedAttention, new_pool
from engine.cache.events import EventLog
from engine.cache.host import HostMemory, NoHostTier
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, NoPrefix
from engine.catalogue import resolve
from engine.config import EngineConfig
from engine.copies import BlockCopies, CudaStreams, HostCopies, NoHost, PinnedHostCopies, Pool, new_host_pool
from engine.core import EngineCore
from engine.errors import ConfigError
from engine.grammar import Grammars, LlguidanceGrammars, NoGrammars
from engine.inputs import InputBuilder
from engine.intake import Limits
from engine.invariance import CHECKS, Probe, is_invariant, needed_blocks
from engine.lanes import Inline, WorkerLane
from engine.model import Decoder, Loader, Model
from engine.model_config import ModelConfig, read_config
from engine.runner import Device as RunnerDevice
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.timing import StepTimer
from engine.weights import DummySource, SafetensorsSource, WeightSource
from kernels.backend import Backend, WeightKind, choose_backend


@dataclass(frozen=True, slots=True)
class Device:
    """Where and how the model computes."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    backend: Backend


def build_core(config: EngineConfig, clock: Callable[[], float]) -> EngineCore:
    """Raises ConfigError if the model cannot be had, does not fit, or the device is not there."""
    folder = resolve(config.model, config.model_cache, weights=config.load_format != "dummy")
    model_config = read_config(folder, _translate)
    device = _device(config, model_config)
    max_model_len = _max_model_len(config, model_config)
    model = _load_model(config, folder, model_config, device, max_model_len)
    num_blocks = _num_blocks(config, model_config, device, max_model_len)
    kv = _cache(config, device, num_blocks)
    timer = StepTimer(clock)
    grammars = _grammars(folder, model_config)
    eos = model_config.eos_token_ids
    runner = ModelRunner(
        model,
        _runner_device(config, model_config, device, num_blocks, grammars),
        InputBuilder(config.policy.max_num_seqs, kv.blocks_for(max_model_len), kv.block_size, device.device),
        eos,
        timer,
    )
    _check_invariance(config, runner, model_config.vocab_size, kv)
    limits = Limits(max_model_len, kv.capacity, model_config.vocab_size, eos)
    scheduler = Scheduler(
        config.policy.build(), kv, eos, drafts=config.drafts, evict_every_steps=config.evict_every_steps
    )
    return EngineCore(scheduler, runner, limits, timer, depth=int(config.overlap))


def _check_invariance(config: EngineConfig, runner: ModelRunner, vocab_size: int, kv: PagedKV) -> None:
    """Before anything is in the pool; one that is too small for it is for tests."""
    if kv.usable_blocks >= needed_blocks(kv.block_size):
        probe = Probe(runner.model, runner.device.attend, runner.inputs)
        CHECKS[config.batch_invariant](lambda: is_invariant(probe, vocab_size, kv.block_size))


def _grammars(folder: Path, model_config: ModelConfig) -> Grammars:
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        return NoGrammars()
    return LlguidanceGrammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids)


def _cache(config: EngineConfig, device: Device, num_blocks: int) -> PagedKV:
    """Blocks are known by the model that computed them, so that engines can compare what they remember."""
    cache, events = config.cache, EventLog()
    namespace = {
        "model": config.model,
        "dtype": f"{config.dtype} {device.dtype} {device.kv_dtype}",
        "implementation": config.implementation,
        "quantization": config.quantization,
    }
    index = HashedPrefix(namespace) if cache.prefix else NoPrefix()
    host = HostMemory(cache.host_blocks, events) if cache.host_blocks else NoHostTier()
    return PagedKV(num_blocks, cache.block_size, index, host, events)


def _device(config: EngineConfig, model_config: ModelConfig) -> Device:
    device = torch.device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no GPU here. Write device: cpu.", param="device")
    threads = config.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, automatic if config.dtype == "auto" else config.dtype)
    invariant = config.batch_invariant == "require"
    weights = _weight_kind(config)
    backend = choose_backend(device, dtype, model_config.head_dim, threads, weights=weights, invariant=invariant)
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


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    wanted = config.max_model_len or model_config.context
    if wanted > model_config.context:
        raise ConfigError(
            f"max_model_len is {wanted}, but the model was trained for {model_config.context} positions. "
            f"Write max_model_len: {model_config.context} or less.",
            param="max_model_len",
        )
    return wanted


def _load_model(config: EngineConfig, folder: Path, model_config: ModelConfig, device: Device, positions: int) -> Model:
    if not model_config.own or config.implementation == "transformers":
        from engine.foreign import load_foreign  # transformers takes seconds to import: only for those who need it

        return load_foreign(folder, config.load_format, device.dtype, device.device)
    source: WeightSource
    if config.load_format == "dummy":
        source = DummySource(dtype=device.dtype, device=device.device)
    else:
        source = SafetensorsSource(folder, dtype=device.dtype, device=device.device)
    try:
        decoder = Decoder(Loader(model_config, source, device.backend), positions)
    except OverflowError as error:
        raise ConfigError(f"dtype: {error}. Write dtype: float32.", param="dtype") from None
    _check_all_used(source, model_config)
    return decoder


def _check_all_used(source: WeightSource, model_config: ModelConfig) -> None:
    """A weight that nobody asked for is a part of the model that we would leave out without a word."""
    derived = ("rotary_emb.inv_freq", *(["lm_head.weight"] if model_config.tied else []))
    unknown = [name for name in source.unused() if not name.endswith(derived)]
    if unknown:
        raise ConfigError(
            f"model: our {model_config.architecture} has no use for {len(unknown)} of its tensors, such as "
            f"{unknown[0]}. Write implementation: transformers.",
            param="model",
        )


def _translate(folder: Path) -> dict[str, Any]:
    from engine.foreign import translate

    return translate(folder)


def _block_bytes(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> int:
    values = 2 * model_config.layers * model_config.kv_heads * model_config.head_dim * config.cache.block_size
    return values * dtype.itemsize


def _num_blocks(config: EngineConfig, model_config: ModelConfig, device: Device, max_model_len: int) -> int:
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
    free = _free_bytes(torch.device("cpu")) - (pool_bytes if config.device == "cpu" else 0)
    wanted = config.cache.host_blocks * block_bytes
    if wanted > free:
        raise ConfigError(
            f"cache.host_blocks is {config.cache.host_blocks}, which needs {_gib(wanted)}, but {_gib(free)} of host "
            f"memory are free. Write at most host_blocks: {max(0, int(free * 0.9)) // block_bytes}.",
            param="cache.host_blocks",
        )


def _runner_device(
    config: EngineConfig, model_config: ModelConfig, device: Device, num_blocks: int, grammars: Grammars
) -> RunnerDevice:
    """The KV pools of both tiers, and the lane that the steps run on."""
    block = (model_config.kv_heads, model_config.head_dim, config.cache.block_size)
    pool = new_pool((model_config.layers, num_blocks, *block), device.kv_dtype, device.device)
    copies = _copies(config, pool, device.device)
    lane = WorkerLane(torch.get_num_threads()) if config.overlap else Inline()
    return RunnerDevice(PagedAttention(*pool, device.backend), copies, lane, grammars)


def _copies(config: EngineConfig, pool: Pool, device: torch.device) -> BlockCopies:
    if not config.cache.host_blocks:
        return NoHost()
    host = new_host_pool(pool, config.cache.host_blocks, pinned=device.type == "cuda")
    if device.type == "cuda":
        return PinnedHostCopies(pool, host, CudaStreams(device))
    return HostCopies(pool, host)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
