"""What the model needs of a device, as one interface: compiled CPU kernels, or plain torch on any device.

Shapes as in `reference.py`; M rows, K inputs and N outputs of a linear.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.attention_batch import AttentionBatch, AttentionSpec

Linear = Callable[[Tensor], Tensor]
WeightKind = Literal["float32", "float16", "int8"]
TILE = 16


class Backend(Protocol):
    @property
    def quantizes(self) -> bool:
        """Whether it can keep the weights of linears in eight bits."""
        ...

    @property
    def kv_dtypes(self) -> frozenset[torch.dtype]:
        """What the KV pool may hold."""
        ...

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """A function of x [M, K] that returns x · Wᵀ + bias, [M, N]. It may keep the weight in a layout of its own."""
        ...

    def gated_linear(self, gate_NK: Tensor, up_NK: Tensor) -> Linear:
        """A function of x [M, K] that returns silu(x · Gᵀ) · (x · Uᵀ), [M, N]."""
        ...

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, of size K."""
        ...

    def add_norm(self, x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """x += delta in place; returns the norm of the new x."""
        ...

    def rotate(self, q_THD: Tensor, k_TGD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        """Rotary position embedding of both, in place; F = D / 2 frequencies."""
        ...

    def store_kv(self, k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None: ...

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        """Causal attention of each chunk over its request's context, [T, H, D]."""
        ...


class TorchBackend:
    """Any device, type and head dim: the reference kernels.

    Linears get their rows padded to a multiple of `row_multiple`. With 4, MKL's float32 results for a row do not depend
    on the rows beside it; other libraries promise nothing.
    """

    quantizes = False
    kv_dtypes = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn))

    def __init__(self, row_multiple: int = 1) -> None:
        self._row_multiple = row_multiple

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        def apply(x_MK: Tensor) -> Tensor:
            rows = x_MK.shape[0]
            if missing := -rows % self._row_multiple:
                x_MK = functional.pad(x_MK, (0, 0, 0, missing))
            return functional.linear(x_MK, weight_NK, bias_N)[:rows]

        return apply

    def gated_linear(self, gate_NK: Tensor, up_NK: Tensor) -> Linear:
        both = self.linear(torch.cat((gate_NK, up_NK)))
        return lambda x_MK: reference.silu_mul(both(x_MK))

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight_K, eps)

    def add_norm(self, x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return reference.add_norm(x_MK, delta_MK, weight_K, eps)

    def rotate(self, q_THD: Tensor, k_TGD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        reference.rotate(q_THD, k_TGD, cos_TF, sin_TF)

    def store_kv(self, k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
        reference.store_kv(k_TGD, v_TGD, k_NGDB, v_NGBD, batch)

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        return reference.paged_attention(q_THD, k_NGDB, v_NGBD, batch, spec)


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    workers: int,
    *,
    weights: WeightKind = "float32",
    invariant: bool = False,
    eight_bits: bool = False,
) -> Backend:
    """Compiled kernels where they exist: on a CPU float32 with heads in whole tiles, and GPUs. Elsewhere plain torch.

    `weights` is how the compiled CPU kernels keep those of linears.
    `invariant` asks for results on a GPU that do not depend on the batch; on CPUs they never do, in float32.
    `eight_bits`: whether the GPU knows float8_e4m3fn.
    """
    if device.type == "cpu" and dtype == torch.float32 and head_dim % TILE == 0:
        from kernels.cpu_backend import CpuBackend  # compiles, or loads what it compiled: only for those who use it

        return CpuBackend(workers, weights)
    if device.type == "cuda":
        from kernels.gpu_backend import TritonBackend  # needs Triton: only for those who use it

        return TritonBackend(invariant=invariant, eight_bits=eight_bits)
    return TorchBackend(row_multiple=4)
