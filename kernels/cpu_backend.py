"""The compiled CPU kernels behind the interface of `backend.py`: float32, independent of the batch, bit by bit.

Tensors cross over as addresses. M rows, K inputs and N outputs of a linear; other shapes as in `reference.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels import cpu_attention, cpu_fused, cpu_linear, reference
from kernels.attention_batch import AttentionBatch, AttentionSpec, heads_together
from kernels.backend import Linear, WeightKind
from kernels.vector import WIDTH

FLOATS = {"float32": torch.float32, "float16": torch.float16}
FLOAT_BYTES = 4
MOST_INPUTS = 1 << 16  # so many products of int8 with at least 8 bits of activation fit an int32 sum


class CpuBackend:
    """Weights of linears are kept as `weights`. With float16 and int8 there is less memory to read, which is what takes
    the time of small batches; sums are float32, or exact. Raises OverflowError for a weight that is too large.
    """

    quantizes = True
    kv_dtypes = frozenset((torch.float32, torch.float16))

    def __init__(self, workers: int, weights: WeightKind = "float32") -> None:
        self._workers = workers
        self._weights = weights

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        outputs, inputs = weight_NK.shape
        padded = -(-outputs // WIDTH) * WIDTH
        if padded > outputs:
            weight_NK = functional.pad(weight_NK, (0, 0, 0, padded - outputs))
        bias = torch.zeros(padded)
        if bias_N is not None:
            bias[:outputs] = bias_N
        if self._weights == "int8" and inputs % 2 == 0 and inputs <= MOST_INPUTS:
            return _Int8Linear(weight_NK, bias, outputs, self._workers)
        kind = FLOATS.get(self._weights, torch.float16)
        least, most = torch.aminmax(weight_NK)
        if not max(-least, most) <= torch.finfo(kind).max:
            raise OverflowError(f"a weight is too large for {kind}")
        return _PackedLinear(weight_NK.to(kind), bias, outputs, self._workers)

    def gated_linear(self, gate_NK: Tensor, up_NK: Tensor) -> Linear:
        outputs, inputs = gate_NK.shape
        if outputs % WIDTH:
            both = self.linear(torch.cat((gate_NK, up_NK)))
            return lambda x_MK: self.silu_mul(both(x_MK))
        tiles = (gate_NK.view(-1, WIDTH, inputs), up_NK.view(-1, WIDTH, inputs))
        both = self.linear(torch.stack(tiles, dim=1).view(-1, inputs))
        assert isinstance(both, _PackedLinear | _Int8Linear)
        return both.gated

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        if weight_K.shape[0] % WIDTH:
            return reference.rms_norm(x, weight_K, eps)
        x = x.contiguous()
        out, size = torch.empty_like(x), weight_K.shape[0]
        rows = x.numel() // size
        cpu_fused.rms_norm(x.data_ptr(), weight_K.data_ptr(), eps, out.data_ptr(), rows, size, self._workers)
        return out

    def add_norm(self, x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        rows, size = x_MK.shape
        if size % WIDTH:
            return reference.add_norm(x_MK, delta_MK, weight_K, eps)
        out_MK = torch.empty_like(x_MK)
        addresses = x_MK.data_ptr(), delta_MK.data_ptr(), weight_K.data_ptr()
        cpu_fused.add_norm(*addresses, eps, out_MK.data_ptr(), rows, size, self._workers)
        return out_MK

    def silu_mul(self, gate_up_MN: Tensor) -> Tensor:
        rows, both = gate_up_MN.shape
        if both // 2 % WIDTH:
            return reference.silu_mul(gate_up_MN)
        out_MK = torch.empty(rows, both // 2)
        cpu_fused.silu_mul(gate_up_MN.data_ptr(), out_MK.data_ptr(), rows, both // 2, self._workers)
        return out_MK

    def rotate(self, q_THD: Tensor, k_TGD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        tokens, half = cos_TF.shape
        addresses = cos_TF.data_ptr(), sin_TF.data_ptr()
        (_, heads, dim), row = q_THD.shape, q_THD.stride(0)
        if k_TGD.data_ptr() == q_THD.data_ptr() + heads * dim * FLOAT_BYTES and k_TGD.stride(0) == row:
            heads += k_TGD.shape[1]  # they are one array: one call for both
        else:
            assert k_TGD.stride(1) == dim and k_TGD.stride(2) == 1, "a token's heads must follow each other"
            k_row, groups = k_TGD.stride(0), k_TGD.shape[1]
            cpu_fused.rotate(k_TGD.data_ptr(), k_row, *addresses, tokens, groups, half, self._workers)
        assert q_THD.stride(1) == dim and q_THD.stride(2) == 1, "a token's heads must follow each other"
        cpu_fused.rotate(q_THD.data_ptr(), row, *addresses, tokens, heads, half, self._workers)

    def store_kv(self, k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
        k_TGD, v_TGD = heads_together(k_TGD), heads_together(v_TGD)
        if k_TGD.stride(0) != v_TGD.stride(0):
            k_TGD, v_TGD = k_TGD.contiguous(), v_TGD.contiguous()
        cpu_fused.store_kv(
            k_TGD.data_ptr(),
            v_TGD.data_ptr(),
            k_TGD.stride(0),
            k_NGDB.data_ptr(),
            v_NGBD.data_ptr(),
            batch.slots_T.data_ptr(),
            k_TGD.shape[0],
            _pool(k_NGDB),
            self._workers,
        )

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        q_THD = heads_together(q_THD)
        out_THD = torch.empty(q_THD.shape)
        cpu_attention.paged_attention(
            q_THD.data_ptr(),
            q_THD.stride(0),
            k_NGDB.data_ptr(),
            v_NGBD.data_ptr(),
            batch.query_starts_R1.data_ptr(),
            batch.context_lens_R.data_ptr(),
            batch.block_tables_RM.data_ptr(),
            batch.block_tables_RM.shape[1],
            out_THD.data_ptr(),
            batch.block_tables_RM.shape[0],
            q_THD.shape[1],
            _pool(k_NGDB),
            spec.scale,
            spec.window,
            spec.soft_cap,
            self._workers,
        )
        return out_THD


def _pool(k_NGDB: Tensor) -> tuple[int, int, int, int]:
    _, groups, dim, size = k_NGDB.shape
    return groups, dim, size, k_NGDB.dtype.itemsize


def _tiles(weight_NK: Tensor, depth: int) -> Tensor:
    """[N / 16, K / depth, 16, depth]: what one register tile reads is contiguous."""
    outputs, inputs = weight_NK.shape
    return weight_NK.view(outputs // WIDTH, WIDTH, inputs // depth, depth).transpose(1, 2).contiguous()


class _PackedLinear:
    """Weights in float32 or float16, as [N / 16, K, 16]."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor, outputs: int, workers: int) -> None:
        self._packed = _tiles(weight_NK, 1)
        self._bias_N = bias_N
        self._outputs = outputs
        self._shape = weight_NK.shape[1], weight_NK.shape[0] // WIDTH, weight_NK.dtype.itemsize, workers

    def __call__(self, x_MK: Tensor) -> Tensor:
        x_MK = x_MK.contiguous()
        rows = x_MK.shape[0]
        out_MN = torch.empty(rows, self._bias_N.shape[0])
        addresses = x_MK.data_ptr(), self._packed.data_ptr(), self._bias_N.data_ptr(), out_MN.data_ptr()
        cpu_linear.linear(*addresses, rows, *self._shape)
        return out_MN if out_MN.shape[1] == self._outputs else out_MN[:, : self._outputs].contiguous()

    def gated(self, x_MK: Tensor) -> Tensor:
        """silu(x · Gᵀ) · (x · Uᵀ) of weights whose tiles alternate."""
        x_MK = x_MK.contiguous()
        rows = x_MK.shape[0]
        out_MN = torch.empty(rows, self._outputs // 2)
        cpu_linear.gated(x_MK.data_ptr(), self._packed.data_ptr(), out_MN.data_ptr(), rows, *self._shape)
        return out_MN


class _Int8Linear:
    """Weights in int8 as [N / 16, K / 2, 16, 2], with a scale for each output: its largest weight becomes 127."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor, outputs: int, workers: int) -> None:
        least_N, most_N = torch.aminmax(weight_NK, dim=1)
        self._scale_N = (torch.maximum(-least_N, most_N) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        rounded_NK = (weight_NK / self._scale_N[:, None]).round_().to(torch.int8)
        self._packed = _tiles(rounded_NK, 2)
        self._bias_N = bias_N
        self._outputs = outputs
        self._shape = weight_NK.shape[1], weight_NK.shape[0] // WIDTH, workers

    def __call__(self, x_MK: Tensor) -> Tensor:
        x_MK = x_MK.contiguous()
        rows = x_MK.shape[0]
        out_MN = torch.empty(rows, self._bias_N.shape[0])
        addresses = x_MK.data_ptr(), self._packed.data_ptr(), self._scale_N.data_ptr(), self._bias_N.data_ptr()
        cpu_linear.linear_int8(*addresses, out_MN.data_ptr(), rows, *self._shape)
        return out_MN if out_MN.shape[1] == self._outputs else out_MN[:, : self._outputs].contiguous()

    def gated(self, x_MK: Tensor) -> Tensor:
        """silu(x · Gᵀ) · (x · Uᵀ) of weights whose tiles alternate."""
        x_MK = x_MK.contiguous()
        rows = x_MK.shape[0]
        out_MN = torch.empty(rows, self._outputs // 2)
        addresses = x_MK.data_ptr(), self._packed.data_ptr(), self._scale_N.data_ptr(), self._bias_N.data_ptr()
        cpu_linear.gated_int8(*addresses, out_MN.data_ptr(), rows, *self._shape)
        return out_MN
