"""What the model needs of a device, as one interface: compiled CPU kernels, or plain torch on any device.

Shapes as in `reference.py`; M rows, K inputs and N outputs of a linear.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.attention_batch import AttentionBatch, AttentionSpec

Linear = Callable[[Tensor], Tensor]
TILE = 16


class Backend(Protocol):
    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """A function of x [M, K] that returns x · Wᵀ + bias, [M, N]. It may keep the weight in a layout of its own."""
        ...

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension, of size K."""
        ...

    def rotate(self, x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        """Rotary position embedding in place; F = D / 2 frequencies."""
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

    def __init__(self, row_multiple: int = 1) -> None:
        self._row_multiple = row_multiple

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        def apply(x_MK: Tensor) -> Tensor:
            rows = x_MK.shape[0]
            if missing := -rows % self._row_multiple:
                x_MK = functional.pad(x_MK, (0, 0, 0, missing))
            return functional.linear(x_MK, weight_NK, bias_N)[:rows]

        return apply

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight_K.shape, weight_K, eps)

    def rotate(self, x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        first, second = x_THD.chunk(2, dim=-1)
        cos, sin = cos_TF[:, None].to(x_THD.dtype), sin_TF[:, None].to(x_THD.dtype)
        x_THD.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))

    def store_kv(self, k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
        reference.store_kv(k_TGD, v_TGD, k_NGDB, v_NGBD, batch)

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        return reference.paged_attention(q_THD, k_NGDB, v_NGBD, batch, spec)


class FixedTileBackend(TorchBackend):
    """For GPUs, where libraries choose their tiles by the batch: linears with one tile shape, see `matmul.py`."""

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        from kernels import matmul  # needs Triton: only for those who use it

        weight_NK = weight_NK.contiguous()
        return lambda x_MK: matmul.linear(x_MK, weight_NK, bias_N)


class CpuBackend:
    """float32 on the CPU with the compiled kernels of `cpu.py`: independent of the batch, bit by bit.

    Weights of linears are kept as `weights`, float32 or float16: half the memory to read, and sums in float32 all the
    same. Raises OverflowError if a weight is too large for float16.
    """

    def __init__(self, workers: int, weights: torch.dtype = torch.float32) -> None:
        from kernels import cpu  # compiles, or loads what it compiled before: only for those who use it

        self._kernels = cpu
        self._workers = workers
        self._weights = weights

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        outputs, inputs = weight_NK.shape
        padded = -(-outputs // TILE) * TILE
        if padded > outputs:
            weight_NK = functional.pad(weight_NK, (0, 0, 0, padded - outputs))
        packed = weight_NK.to(self._weights).view(padded // TILE, TILE, inputs).transpose(1, 2).contiguous()
        if not torch.isfinite(packed).all():
            raise OverflowError(f"a weight is too large for {self._weights}")
        bias = torch.zeros(padded)
        if bias_N is not None:
            bias[:outputs] = bias_N
        return _PackedLinear(packed, bias, outputs, self._kernels.linear, self._workers)

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1]).contiguous()
        out_MK = torch.empty_like(x_MK)
        self._kernels.rms_norm(x_MK.numpy(), weight_K.numpy(), eps, out_MK.numpy())
        return out_MK.view(x.shape)

    def rotate(self, x_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        self._kernels.rotate(x_THD.numpy(), cos_TF.numpy(), sin_TF.numpy())

    def store_kv(self, k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
        self._kernels.store_kv(k_TGD.numpy(), v_TGD.numpy(), k_NGDB.numpy(), v_NGBD.numpy(), batch.slots_T.numpy())

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        out_THD = torch.empty(q_THD.shape)
        self._kernels.paged_attention(
            q_THD.numpy(),
            k_NGDB.numpy(),
            v_NGBD.numpy(),
            batch.query_starts_R1.numpy(),
            batch.context_lens_R.numpy(),
            batch.block_tables_RM.numpy(),
            out_THD.numpy(),
            spec.scale,
            spec.window,
            spec.soft_cap,
            self._workers,
        )
        return out_THD


class _PackedLinear:
    """Weights as [N / 16, K, 16], kept as bytes: what one register tile reads is contiguous."""

    def __init__(self, packed: Tensor, bias_N: Tensor, outputs: int, kernel: Callable[..., None], workers: int) -> None:
        self._packed = packed.view(len(packed), -1).view(torch.uint8).numpy()
        self._bias_N = bias_N.numpy()
        self._outputs = outputs
        self._kernel = kernel
        self._workers = workers

    def __call__(self, x_MK: Tensor) -> Tensor:
        out_MN = torch.empty(x_MK.shape[0], self._bias_N.shape[0])
        self._kernel(x_MK.contiguous().numpy(), self._packed, self._bias_N, out_MN.numpy(), self._workers)
        return out_MN if out_MN.shape[1] == self._outputs else out_MN[:, : self._outputs].contiguous()


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    workers: int,
    *,
    weights: torch.dtype | None = None,
    invariant: bool = False,
) -> Backend:
    """Compiled kernels where they exist: float32 on a CPU with heads in whole tiles. Plain torch elsewhere.

    `weights` None: as `dtype`; the compiled kernels also take float16.
    `invariant` asks for linears on a GPU that do not depend on the batch; on CPUs they never do, in float32.
    """
    if device.type == "cpu" and dtype == torch.float32 and head_dim % TILE == 0:
        return CpuBackend(workers, weights or dtype)
    if device.type == "cuda":
        return FixedTileBackend() if invariant else TorchBackend()
    return TorchBackend(row_multiple=4)
