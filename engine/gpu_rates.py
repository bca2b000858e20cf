"""Rates of an engine on this device, beside what its memory could deliver: part of the GPU check."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.engine import Engine
from engine.gpu_models import Shape, engine, prompts
from engine.request import SamplingParams

VARIANTS: dict[str, dict[str, Any]] = {
    "as served": {},
    "overlap": {"overlap": True},
    "without graphs": {"graphs": False},
    "batch-invariant": {"invariant": True},
}


class Rates(NamedTuple):
    """`roofline`: time to read the weights once, as a share of a step. `host_share`: of a step, the host's own work."""

    variant: str
    batch: int
    decode_tokens_per_s: float
    step_ms: float
    roofline: float
    host_share: float
    prefill_tokens_per_s: float
    parts_ms: dict[str, float]


def bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of the best of some large copies."""
    size = 1 << (30 if device.type == "cuda" else 24)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(6):
        _wait(device)
        start = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / min(seconds)


def measure(shape: Shape, folder: Path, device: torch.device, bytes_per_s: float) -> Iterator[Rates]:
    weights = weight_bytes(shape)
    for variant, options in VARIANTS.items():
        served = engine(shape, folder, device, **options)
        _run(served, shape, 1, 2)  # compiles what it needs
        for batch in shape.batches:
            yield _rates(served, shape, variant, batch, weights / bytes_per_s)
        del served
        if device.type == "cuda":
            torch.cuda.empty_cache()


def weight_bytes(shape: Shape) -> int:
    """What one step reads: all linears; of the embedding only a few rows."""
    sizes = shape.sizes
    hidden, ffn, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    kv = hidden * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * kv) + 3 * hidden * ffn
    numbers: int = sizes["num_hidden_layers"] * layer + vocab * hidden
    dtype: torch.dtype = getattr(torch, shape.dtype)
    return numbers * dtype.itemsize


def _rates(served: Engine, shape: Shape, variant: str, batch: int, floor: float) -> Rates:
    """Prefill and one token each; then the same and `new` more, whose difference is decode alone."""
    short, _, _ = _run(served, shape, batch, 1)
    before = served.stats().part_seconds
    long, steps, parts = _run(served, shape, batch, 1 + shape.new)
    decode = max(long - short, 1e-9)
    step = decode / shape.new
    host = {part: (parts[part] - before[part]) / steps for part in parts}
    return Rates(
        variant, batch, batch * shape.new / decode, 1e3 * step, floor / step, sum(host.values()) / (long / steps),
        batch * shape.prompt / short, {part: 1e3 * seconds for part, seconds in host.items()},
    )  # fmt: skip


def _run(served: Engine, shape: Shape, batch: int, new: int) -> tuple[float, int, dict[str, float]]:
    """Seconds, steps, and the host's seconds so far by part."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    steps, start = served.stats().steps, time.perf_counter()
    served.generate(prompts(shape, batch), params)
    seconds, stats = time.perf_counter() - start, served.stats()
    return seconds, stats.steps - steps, stats.part_seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
