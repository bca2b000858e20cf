"""Compiles every Triton kernel ahead of time for GPUs that need not be there, and says what it takes of them.

`python -m kernels.compile`: a table of registers and shared memory. A configuration is one kernel with its types and
constants; whatever compiles here compiles on the machine that has the GPU.
"""

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import gpu_attention, gpu_cache, gpu_fused, gpu_sampling, matmul

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FLOATS = ("fp32", "fp16", "bf16")
EIGHT_BITS = "fp8e4nv"  # sm_80 has no such numbers
DIMS = (64, 80, 96, 128)
SHARED = (1, 2, 3, 4, 5, 6, 7, 8)  # query heads of a KV head
MOST_SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "gfx942": 64 << 10}


@dataclass(frozen=True, slots=True)
class Configuration:
    """`types` of the arguments and `constants`, by name; together they are all that the kernel takes."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        kinds = {kind.removeprefix("*") for kind in self.types.values()} & {*FLOATS, EIGHT_BITS}
        shown = ("DIM", "HEADS", "ROWS", "SPREAD", "WINDOWED", "CAPPED", "HAS_BIAS")
        constants = [f"{name.lower()} {self.constants[name]:d}" for name in shown if name in self.constants]
        return " ".join([self.kernel.__name__.removesuffix("_kernel"), *sorted(kinds), *constants])


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int
    shared_memory: int
    assembly: str


def compile_for(configuration: Configuration, target: str) -> Compiled:
    """Raises what Triton raises if the kernel is wrong, and AssertionError if it would not fit."""
    kernel = configuration.kernel
    signature = {name: configuration.types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=configuration.constants)
    made = triton.compile(source, target=TARGETS[target], options=configuration.options)
    shared_memory = made.metadata.shared
    assert shared_memory <= MOST_SHARED_MEMORY[target], f"{configuration.name} takes {shared_memory} bytes on {target}"
    if "cubin" in made.asm:
        return Compiled(_registers(made.asm["cubin"]), shared_memory, made.asm["ptx"])
    assembly = made.asm["amdgcn"]
    return Compiled(int(re.findall(r"\.vgpr_count:\s+(\d+)", assembly)[0]), shared_memory, assembly)


def _registers(binary: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", report)[0])


def _attention(element: str, kv: str, dim: int, shared: int, flags: tuple[bool, ...]) -> Iterator[Configuration]:
    tuning, (spread, windowed, capped) = gpu_attention.DEFAULT, flags
    groups, rows = 2, tuning.decode_rows if spread else tuning.rows
    constants = {
        "HEADS": groups * shared, "GROUPS": groups, "DIM": dim, "DIM_PADDED": triton.next_power_of_2(dim),
        "ROWS": rows, "SPLIT": tuning.split, "WINDOWED": windowed,
    }  # fmt: skip
    more = {"BLOCK": 16, "TILE": tuning.tile, "SPREAD": spread, "CAPPED": capped, "WIDEN": False}
    options = {"num_warps": tuning.warps, "num_stages": gpu_attention.stages(element, tuning)}
    partial = dict.fromkeys(("blend_RGPXD", "sum_RGPX", "largest_RGPX"), "*fp32")
    where = dict.fromkeys(("starts_R1", "contexts_R"), "*i32")
    outer = {"out_THD": f"*{element}", **partial, **where, "splits": "i32", "window": "i32"}
    inner = {"q_THD": f"*{element}", "k_NGDB": f"*{kv}", "v_NGBD": f"*{kv}", "tables_RM": "*i32"}
    numbers = {**dict.fromkeys(("requests", "columns", "q_row"), "i32"), "scale": "fp32", "soft_cap": "fp32"}
    yield Configuration(gpu_attention.attention_kernel, outer | inner | numbers, constants | more, options)
    if spread:
        yield Configuration(gpu_attention.fold_kernel, outer, constants, {"num_warps": tuning.warps})


def _elementwise(element: str, dim: int) -> Iterator[Configuration]:
    pointer = f"*{element}"
    norm = {**dict.fromkeys(("x_MK", "delta_MK", "weight_K", "out_MK"), pointer), "size": "i32", "eps": "fp32"}
    for adds in (False, True):
        sizes = {"SIZE_PADDED": 4096, "ADDS": adds}
        yield Configuration(gpu_fused.norm_kernel, norm, sizes, {"num_warps": gpu_fused.warps(4096)})
    rows = {"q_row": "i32", "k_row": "i32"}
    rotate = {"q_THD": pointer, "k_TGD": pointer, "cos_TF": "*fp32", "sin_TF": "*fp32", **rows}
    sizes = {"HEADS": 32, "HALF": dim // 2, "HALF_PADDED": triton.next_power_of_2(dim // 2)}
    yield Configuration(gpu_fused.rotate_kernel, rotate, sizes, {"num_warps": 1})
    silu = {"gate_up_MN": pointer, "out_MK": pointer, "size": "i32"}
    yield Configuration(gpu_fused.silu_mul_kernel, silu, {"COLUMNS": gpu_fused.COLUMNS}, {"num_warps": 4})
    for has_bias in (False, True):
        operands = dict.fromkeys(("x_MK", "weight_NK", "bias_N", "out_MN"), pointer)
        counts = dict.fromkeys(("rows", "outputs", "inputs"), "i32")
        tile = {name: getattr(matmul, name) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")}
        options = {"num_warps": matmul.WARPS, "num_stages": matmul.STAGES}
        yield Configuration(matmul.linear_kernel, operands | counts, {"HAS_BIAS": has_bias, **tile}, options)


def _store(element: str, kv: str, dim: int) -> Configuration:
    types = {
        **dict.fromkeys(("k_TGD", "v_TGD"), f"*{element}"), **dict.fromkeys(("k_NGDB", "v_NGBD"), f"*{kv}"),
        "slots_T": "*i32", "k_row": "i32", "v_row": "i32", "largest": "fp32",
    }  # fmt: skip
    sizes = {"DIM": dim, "DIM_PADDED": triton.next_power_of_2(dim), "BLOCK": 16}
    return Configuration(gpu_cache.store_kernel, types, sizes, {"num_warps": 1})


def _without_element() -> Iterator[Configuration]:
    strides = dict.fromkeys(("source_block", "source_layer", "target_block", "target_layer"), "i64")
    copy = {"source": "*i32", "target": "*i32", "sources_C": "*i64", "targets_C": "*i64", "size": "i32", **strides}
    yield Configuration(gpu_cache.copy_kernel, copy, {"WORDS": gpu_cache.WORDS}, {"num_warps": 4})
    floats = dict.fromkeys(("logits_RV", "temperature_R", "top_p_R", "min_p_R"), "*fp32")
    longs = dict.fromkeys(("top_k_R", "seed_R", "position_R", "token_R"), "*i64")
    yield Configuration(
        gpu_sampling.sample_kernel, {**floats, **longs, "vocab": "i32"}, {"BLOCK": gpu_sampling.BLOCK}, {"num_warps": 8}
    )


def configurations(target: str) -> Iterator[Configuration]:
    """All that the launchers can ask for, up to sizes that are no constants."""
    eight_bits = () if target == "sm_80" else (EIGHT_BITS,)
    flags = [*itertools.product((False, True), repeat=3)]
    for element, dim in itertools.product(FLOATS, DIMS):
        for kv in (element, *eight_bits):
            yield _store(element, kv, dim)
            for shared, flag in itertools.product(SHARED, flags):
                yield from _attention(element, kv, dim, shared, flag)
        yield from _elementwise(element, dim)
    yield from _without_element()


def cover(given: Iterable[Configuration], ignored: frozenset[str] = frozenset()) -> list[Configuration]:
    """Few of these, with every type and constant of every kernel among them but the `ignored` ones."""
    chosen: list[Configuration] = []
    seen: set[tuple[str, str, Any]] = set()
    for configuration in given:
        kernel = configuration.kernel.__name__
        known = configuration.constants | configuration.types
        facts = {(kernel, name, value) for name, value in known.items() if name not in ignored}
        if not facts <= seen:
            seen |= facts
            chosen.append(configuration)
    return chosen


def table(configurations: Sequence[Configuration], target: str) -> Iterator[str]:
    yield f"{target + ', ' + str(len(configurations)) + ' configurations':<84}{'registers':>10}{'shared, bytes':>15}"
    for configuration in tqdm(configurations, desc=target, unit="kernel", disable=None):
        made = compile_for(configuration, target)
        yield f"{configuration.name:<84}{made.registers:>10}{made.shared_memory:>15}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: all")
    parser.add_argument("--all", action="store_true", help="thousands of configurations, not a cover: hours")
    options = parser.parse_args()
    for target in options.target or TARGETS:
        chosen = [*configurations(target)] if options.all else cover(configurations(target))
        for line in table(chosen, target):
            print(line, flush=True)


if __name__ == "__main__":
    main()
