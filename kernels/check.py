"""Every Triton kernel against its reference, on whatever device there is: a list of errors beside what is allowed.

Small shapes for the interpreter, large ones for a GPU. Shapes as in `reference.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import gpu_attention, gpu_cache, gpu_fused, gpu_sampling, matmul, reference
from kernels.attention_batch import AttentionBatch, AttentionSpec

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """`error` is the largest difference, relative to the largest number expected."""

    name: str
    error: float
    allowed: float

    @property
    def good(self) -> bool:
        return self.error <= self.allowed


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the checks are: chunks as (tokens, context), rows and size of matrices, vocabulary."""

    chunks: Sequence[tuple[int, int]]
    rows: int
    size: int
    vocab: int


SMALL = Scale(((1, 17), (5, 40), (1, 33)), 5, 96, 200)
LARGE = Scale(((1, 17), (300, 1000), (1, 4100), (33, 33), (1, 2048), (1, 1)), 300, 4096, 128_256)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPECS = {
    "plain": AttentionSpec(0.125),
    "window": AttentionSpec(0.1, window=24),
    "soft cap": AttentionSpec(0.1, soft_cap=5.0),
}


def make_batch(chunks: Sequence[tuple[int, int]], device: torch.device) -> tuple[AttentionBatch, int]:
    """The chunks' blocks scattered over a pool, and how many blocks that must have."""
    owned = [-(-context // BLOCK) for _, context in chunks]
    scattered = (torch.randperm(sum(owned)) + 1).tolist()
    tables = torch.zeros(len(chunks), max(owned), dtype=torch.int32)
    starts, slots = [0], []
    for row, ((tokens, context), count) in enumerate(zip(chunks, owned, strict=True)):
        blocks = [scattered.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks)
        starts.append(starts[-1] + tokens)
        slots += [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(context - tokens, context)]
    contexts = [context for _, context in chunks]
    tensors = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, contexts, slots)]
    return AttentionBatch(starts, contexts, tensors[0], tensors[1], tables.to(device), tensors[2]), sum(owned) + 1


def difference(given: Tensor, expected: Tensor) -> float:
    given, expected = given.double(), expected.double()
    return float((given - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def attention(scale: Scale, dtype: torch.dtype, device: torch.device) -> Iterator[Finding]:
    batch, blocks = make_batch(scale.chunks, device)
    for (heads, groups, dim), (kind, spec) in zip(((8, 2, 128), (4, 4, 64), (7, 1, 80)), SPECS.items(), strict=True):
        k = torch.randn(blocks, groups, dim, BLOCK, device=device).to(dtype)
        v = torch.randn(blocks, groups, BLOCK, dim, device=device).to(dtype)
        q = torch.randn(batch.query_starts[-1], heads, dim, device=device).to(dtype)
        expected = reference.paged_attention(q, k, v, batch, spec)
        given = gpu_attention.paged_attention(q, k, v, batch, spec)
        yield Finding(f"attention, {kind}, {heads} heads of {dim}", difference(given, expected), TOLERANCE[dtype])
        tunings = (gpu_attention.Tuning(enough_programs=count) for count in (0, 1 << 30))
        in_turn, apart = (gpu_attention.paged_attention(q, k, v, batch, spec, tuning) for tuning in tunings)
        yield Finding(f"attention, {kind}, splits apart or in turn", difference(in_turn, apart), 0.0)


def cache(scale: Scale, dtype: torch.dtype, device: torch.device) -> Iterator[Finding]:
    batch, blocks = make_batch(scale.chunks, device)
    tokens = batch.query_starts[-1]
    k_TGD, v_TGD = (torch.randn(tokens, 2, 64, device=device).to(dtype) for _ in range(2))
    mine, theirs = (
        (
            torch.zeros(blocks, 2, 64, BLOCK, device=device, dtype=dtype),
            torch.zeros(blocks, 2, BLOCK, 64, device=device, dtype=dtype),
        )
        for _ in range(2)
    )
    gpu_cache.store_kv(k_TGD, v_TGD, *mine, batch)
    reference.store_kv(k_TGD, v_TGD, *theirs, batch)
    yield Finding("KV store", max(difference(*pair) for pair in zip(mine, theirs, strict=True)), 0.0)
    pool = torch.randn(3, blocks, 2, 64, BLOCK, device=device).to(dtype)
    host = torch.zeros(4, 3, 2, 64, BLOCK, dtype=dtype, pin_memory=device.type == "cuda")
    sources, targets = torch.tensor([1, 2], device=device), torch.tensor([3, 0], device=device)
    gpu_cache.copy_blocks(pool.transpose(0, 1), host, sources, targets)
    if device.type == "cuda":
        torch.cuda.synchronize()
    yield Finding("block copies to the host", difference(host[[3, 0]], pool[:, 1:3].transpose(0, 1).cpu()), 0.0)
    gpu_cache.copy_blocks(host, pool.transpose(0, 1), targets, sources.flip(0))
    yield Finding("block copies from the host", difference(pool[:, 2].cpu(), host[3]), 0.0)


def fused(scale: Scale, dtype: torch.dtype, device: torch.device) -> Iterator[Finding]:
    x, delta = (torch.randn(scale.rows, scale.size, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(scale.size, device=device).to(dtype)
    results = [module.add_norm(x.clone(), delta, weight, 1e-5) for module in (gpu_fused, reference)]
    yield Finding("residual and norm", difference(*results), TOLERANCE[dtype])
    results = [module.silu_mul(x) for module in (gpu_fused, reference)]
    yield Finding("activation", difference(*results), TOLERANCE[dtype])
    qkv_TXD, angle_TF = torch.randn(scale.rows, 6, 64, device=device).to(dtype), torch.randn(scale.rows, 32)
    mine, theirs = qkv_TXD.clone(), qkv_TXD.clone()
    cos, sin = angle_TF.cos().to(device), angle_TF.sin().to(device)
    gpu_fused.rotate(mine[:, :4], mine[:, 4:5], cos, sin)
    reference.rotate(theirs[:, :4], theirs[:, 4:5], cos, sin)
    yield Finding("rotation", difference(mine, theirs), TOLERANCE[dtype])


def linear(scale: Scale, dtype: torch.dtype, device: torch.device) -> Iterator[Finding]:
    x, weight = (torch.randn(rows, scale.size, device=device).to(dtype) for rows in (scale.rows, 2 * scale.size))
    given = matmul.linear(x, weight)
    yield Finding("invariant linear", difference(given, x.double() @ weight.double().T), TOLERANCE[dtype])
    alone = torch.cat([matmul.linear(x[row : row + 1], weight) for row in range(3)])
    if device.type == "cuda":  # numpy, which multiplies in the interpreter, treats the rows of a tile unequally
        yield Finding("invariant linear, rows alone", difference(alone, given[:3]), 0.0)


def sampling(scale: Scale, dtype: torch.dtype, device: torch.device) -> Iterator[Finding]:
    """The share of rows whose token differs: sums of other order may decide one in a million otherwise."""
    rows, generator = min(scale.rows, 64), torch.Generator().manual_seed(0)

    def uniform(least: float, most: float) -> Tensor:
        return torch.rand(rows, generator=generator) * (most - least) + least

    def whole(least: int, most: int) -> Tensor:
        return torch.randint(least, most, (rows,), generator=generator)

    temperature, top_k, top_p, min_p = uniform(0.2, 1.5), whole(0, 50), uniform(0.1, 1.2), uniform(-0.1, 0.1)
    temperature[::4] = 0.0
    asked = (temperature, top_k, top_p.clamp(max=1.0), min_p.clamp(min=0.0), whole(0, 1 << 40), whole(0, 10_000))
    logits_RV = torch.randn(rows, scale.vocab, generator=generator) * 3
    given = gpu_sampling.sample(logits_RV.to(device), *(one.to(device) for one in asked))
    expected = reference.sample(logits_RV, *asked)
    yield Finding("sampling", float((given.cpu() != expected).double().mean()), 0.0 if device.type == "cpu" else 0.02)


Check = Callable[[Scale, torch.dtype, torch.device], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (attention, cache, fused, linear)


def check_all(scale: Scale, device: torch.device) -> Iterator[tuple[str, Finding]]:
    """(number type, finding) of every kernel."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for check in CHECKS:
            if check is linear and dtype == torch.bfloat16 and device.type == "cpu":
                continue  # the interpreter multiplies the bits of bfloat16 as integers
            for finding in check(scale, dtype, device):
                yield str(dtype).removeprefix("torch."), finding
    for finding in sampling(scale, torch.float32, device):
        yield "float32", finding


def as_json(kind: str, finding: Finding) -> dict[str, Any]:
    return {"kernel": finding.name, "dtype": kind, "error": finding.error, "allowed": finding.allowed}
