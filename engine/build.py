"""Puts an engine together from its configuration: model, KV pool, scheduler. The one place that knows all parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.attention import PagedAttention, new_pool
from engine.cache.events import EventLog
from engine.cache.host import HostMemory, NoHostTier
from engine.cache.paged import PagedKV
from engine.cache.prefix import HashedPrefix, NoPrefix
from engine.capacity import num_blocks
from engine.catalogue import resolve
from engine.config import EngineConfig
from engine.copies import BlockCopies, CudaStreams, HostCopies, NoHost, PinnedHostCopies, Pool, new_host_pool
from engine.core import EngineCore
from engine.device import Device, choose_device
from engine.errors import ConfigError
from engine.grammar import Grammars, NoGrammars
from engine.graphs import CudaCapture, GraphedModel, Longest, sizes_up_to
from engine.inputs import InputBuilder, Padding, no_padding
from engine.intake import Limits
from engine.invariance import CHECKS, Probe, is_invariant, needed_blocks
from engine.lanes import Inline, WorkerLane
from engine.model import Decoder, Loader, Model
from engine.model_config import ModelConfig, read_config
from engine.runner import Device as RunnerDevice
from engine.runner import ModelRunner
from engine.sampler import sample, sample_on_gpu
from engine.scheduler import Scheduler
from engine.timing import StepTimer
from engine.weights import DummySource, SafetensorsSource, WeightSource


def build_core(
    config: EngineConfig,
    clock: Callable[[], float],
    choose: Callable[[EngineConfig, ModelConfig], Device] = choose_device,
) -> EngineCore:
    """Raises ConfigError if the model cannot be had, does not fit, or the device is not there.

    `choose` says where and how the model computes.
    """
    folder = resolve(config.model, config.model_cache, weights=config.load_format != "dummy")
    model_config = read_config(folder, _translate)
    device = choose(config, model_config)
    max_model_len = _max_model_len(config, model_config)
    model = _load_model(config, folder, model_config, device, max_model_len)
    blocks = num_blocks(config, model_config, device, max_model_len)
    kv = _cache(config, device, blocks)
    parts = _runner_device(config, model_config, device, blocks, _grammars(folder, model_config))
    longest = Longest(kv.blocks_for(max_model_len), max_model_len)
    model, padding = _graphed(config, model, parts.attend, longest, device.device)
    inputs = InputBuilder(config.policy.max_num_seqs, longest.blocks, kv.block_size, device.device, padding)
    eos = model_config.eos_token_ids
    runner = ModelRunner(model, parts, inputs, eos, StepTimer(clock))
    _check_invariance(config, runner, model_config.vocab_size, kv)
    limits = Limits(max_model_len, kv.capacity, model_config.vocab_size, eos)
    scheduler = Scheduler(
        config.policy.build(), kv, eos, drafts=config.drafts, evict_every_steps=config.evict_every_steps
    )
    return EngineCore(scheduler, runner, limits, runner.timer, depth=int(config.overlap))


def _graphed(
    config: EngineConfig, model: Model, attend: PagedAttention, longest: Longest, device: torch.device
) -> tuple[Model, Padding]:
    """On a GPU our own decoder's decode steps are recorded, for so many requests that steps are filled up to."""
    if device.type != "cuda" or not config.graphs or not isinstance(model, Decoder):
        return model, no_padding
    graphed = GraphedModel(model, attend, CudaCapture(), sizes_up_to(config.policy.max_num_seqs), longest)
    return graphed, graphed.padding


def _check_invariance(config: EngineConfig, runner: ModelRunner, vocab_size: int, kv: PagedKV) -> None:
    """Before anything is in the pool; one that is too small for it is for tests."""
    if kv.usable_blocks >= needed_blocks(kv.block_size):
        probe = Probe(runner.model, runner.device.attend, runner.inputs)
        CHECKS[config.batch_invariant](lambda: is_invariant(probe, vocab_size, kv.block_size))


def _grammars(folder: Path, model_config: ModelConfig) -> Grammars:
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        return NoGrammars()
    from engine.matchers import LlguidanceGrammars  # a model without a tokenizer can do without it

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
        if config.quantization != "none":
            raise ConfigError(
                f"quantization is {config.quantization}, but {model_config.architecture} runs through transformers' "
                "modules here, whose linears are not ours. Write quantization: none.",
                param="quantization",
            )
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


def _runner_device(
    config: EngineConfig, model_config: ModelConfig, device: Device, num_blocks: int, grammars: Grammars
) -> RunnerDevice:
    """The KV pools of both tiers, and the lane that the steps run on."""
    block = (model_config.kv_heads, model_config.head_dim, config.cache.block_size)
    pool = new_pool((model_config.layers, num_blocks, *block), device.kv_dtype, device.device)
    copies = _copies(config, pool, device.device)
    asynchronous = device.device.type == "cuda"  # a GPU runs on while the host plans: it needs no thread for that
    lane = WorkerLane(torch.get_num_threads()) if config.overlap and not asynchronous else Inline()
    choose = sample_on_gpu if asynchronous else sample
    return RunnerDevice(PagedAttention(*pool, device.backend), copies, lane, choose, grammars)


def _copies(config: EngineConfig, pool: Pool, device: torch.device) -> BlockCopies:
    if not config.cache.host_blocks:
        return NoHost()
    host = new_host_pool(pool, config.cache.host_blocks, pinned=device.type == "cuda")
    if device.type == "cuda":
        from kernels.gpu_cache import copy_blocks  # needs Triton: only for those who use it

        return PinnedHostCopies(pool, host, CudaStreams(device), copy_blocks)
    return HostCopies(pool, host)
