"""The engine as a worker that looks inside its steps: `bench.py`'s lines, and what the machine could do at best.

{"prompts": …, "outputs": …}  →  as `bench`, with the seconds of linears and attention, and the floor of a decode step.
Times are taken around each kernel on the host, so they are true on CPUs only.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine import bench
from engine.build import build_core
from engine.config import EngineConfig
from engine.device import Device, choose_device
from engine.engine import Engine
from engine.model_config import ModelConfig
from kernels.attention_batch import AttentionBatch, AttentionSpec
from kernels.backend import Backend, Linear


class TimedBackend:
    """A backend that notes how long linears and attention took; all else goes through as it is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.seconds = {"linears": 0.0, "attention": 0.0}
        self.weights = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        self.weights += weight_NK.numel()
        return self._timed("linears", self._backend.linear(weight_NK, bias_N))

    def gated_linear(self, gate_NK: Tensor, up_NK: Tensor) -> Linear:
        self.weights += gate_NK.numel() + up_NK.numel()
        return self._timed("linears", self._backend.gated_linear(gate_NK, up_NK))

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        attend: Callable[..., Tensor] = self._timed("attention", self._backend.attend)
        return attend(q_THD, k_NGDB, v_NGBD, batch, spec)

    def _timed(self, part: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def timed(*arguments: Any) -> Tensor:
            start = time.perf_counter()
            result = run(*arguments)
            self.seconds[part] += time.perf_counter() - start
            return result

        return timed


def machine(threads: int) -> dict[str, float]:
    """Bytes per second of reading, and multiplications per second of the libraries' matrix products, at their best."""
    torch.set_num_threads(threads)
    large, square = torch.ones(100_000_000), torch.randn(2048, 2048)
    rate = {"bytes_per_s": 4 * large.numel() / _best(large.sum), "macs_per_s": 2048**3 / _best(lambda: square @ square)}
    return {**rate, "int8_macs_per_s": 512 * 1536 * 1536 / _best(_int8_product())}


def _int8_product() -> Callable[[], Tensor]:
    weight = torch.quantize_per_tensor(torch.randn(1536, 1536), 0.1, 0, torch.qint8)
    packed, x = torch.ops.quantized.linear_prepack(weight, None), torch.randn(512, 1536)
    return lambda: torch.ops.quantized.linear_dynamic(x, packed)


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


class Profiler:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.engine = Engine(config, build_core(config, time.perf_counter, self._choose))

    def run(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Runs it twice: what is once only, such as memory that is touched for the first time, is not asked for."""
        bench.run(self.engine, workload)
        before = dict(self._backend.seconds)
        result = bench.run(self.engine, workload)
        inside = {part: self._backend.seconds[part] - before[part] for part in before}
        known = machine(self._config.threads or torch.get_num_threads())
        return {**result, "inside": inside, "machine": known, "floor": self._floor(workload, known)}

    def _choose(self, config: EngineConfig, model_config: ModelConfig) -> Device:
        device = choose_device(config, model_config)
        self._model, self._kv_bytes = model_config, device.kv_dtype.itemsize
        self._backend = TimedBackend(device.backend)
        return replace(device, backend=self._backend)

    def _floor(self, workload: dict[str, Any], known: dict[str, float]) -> float:
        """Seconds that a decode step takes at least: to read weights and KV once, or to multiply."""
        batch, model = len(workload["prompts"]), self._model
        context = sum(len(prompt) + n / 2 for prompt, n in zip(workload["prompts"], workload["outputs"], strict=True))
        kv = 2 * context * model.layers * model.kv_heads * model.head_dim
        quantized = self._config.quantization == "int8"
        number = 1 if quantized else 2 if self._config.dtype == "auto" else 4
        read = (self._backend.weights * number + kv * self._kv_bytes) / known["bytes_per_s"]
        linears = batch * self._backend.weights / known["int8_macs_per_s" if quantized else "macs_per_s"]
        attention = kv * model.heads / model.kv_heads / known["macs_per_s"]
        floor: float = max(read, linears + attention)
        return floor


def main() -> None:
    assert __doc__ is not None
    profiler = Profiler(bench.config(bench.parser(__doc__).parse_args()))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(profiler.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
