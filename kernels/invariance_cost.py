"""What batch invariance costs: linears of a model's shapes, ours beside torch's own and torch's with padded rows.

`python -m kernels.invariance_cost`: microseconds, weights from memory, in turns; 100 % is torch's own, which is not
invariant. Shapes: M rows, K inputs, N outputs.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.backend import Backend, TorchBackend
from kernels.cpu_backend import CpuBackend

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))  # the default model's: QKV, out, gate and up, down
COPIES = 24  # together larger than the caches, so that weights come from memory as they do in a model
Linear = Callable[[Tensor], Tensor]


def linears(backend: Backend, inputs: int, outputs: int) -> list[Linear]:
    generator = torch.Generator().manual_seed(0)
    return [backend.linear(torch.randn(outputs, inputs, generator=generator)) for _ in range(COPIES)]


def microseconds(layers: list[Linear], x_MK: Tensor) -> float:
    start = time.perf_counter()
    for layer in layers:
        layer(x_MK)
    return 1e6 * (time.perf_counter() - start) / len(layers)


def measure(rows: int, rounds: int, threads: int) -> dict[str, float]:
    """Sums over the shapes of the medians over the rounds."""
    backends: dict[str, Backend] = {"torch": TorchBackend(), "padded": TorchBackend(4), "ours": CpuBackend(threads)}
    sums = dict.fromkeys(backends, 0.0)
    for inputs, outputs in SHAPES:
        x_MK = torch.randn(rows, inputs)
        layers = {name: linears(backend, inputs, outputs) for name, backend in backends.items()}
        times: dict[str, list[float]] = {name: [] for name in backends}
        for _, name in itertools.product(range(rounds + 1), backends):
            times[name].append(microseconds(layers[name], x_MK))
        for name in backends:
            sums[name] += statistics.median(times[name][1:])
    return sums


def equal_alone(rows: int, backend: Backend) -> bool:
    """Whether each row has the bits that it has alone."""
    (linear, *_), x_MK = linears(backend, *SHAPES[0]), torch.randn(rows, SHAPES[0][0])
    return all(torch.equal(linear(x_MK[row : row + 1])[0], linear(x_MK)[row]) for row in range(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'rows':>6}{'torch':>10}{'padded':>10}{'cost':>8}{'ours':>10}{'cost':>8}   invariant: torch, padded, ours")
    for rows in (1, 2, 3, 8, 32, 128):
        times = measure(rows, options.rounds, options.threads)
        cost = {name: f"{100 * (times[name] / times['torch'] - 1):+.0f} %" for name in times}
        same = [
            equal_alone(rows, backend) for backend in (TorchBackend(), TorchBackend(4), CpuBackend(options.threads))
        ]
        print(
            f"{rows:6}{times['torch']:10.0f}{times['padded']:10.0f}{cost['padded']:>8}{times['ours']:10.0f}"
            f"{cost['ours']:>8}   {', '.join('yes' if one else 'no' for one in same)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
