"""The Triton kernels behind the interface of `backend.py`, linears by the vendor's library or in one fixed tile shape.

Shapes as in `reference.py`; M rows, K inputs and N outputs of a linear.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels import gpu_attention, gpu_cache, gpu_fused, matmul
from kernels.attention_batch import AttentionBatch, AttentionSpec, heads_together
from kernels.backend import Linear


class TritonBackend:
    """float32, float16 or bfloat16 on a GPU. `invariant`: no result depends on the batch, at the cost of large linears.

    `eight_bits` says whether the GPU knows float8_e4m3fn.
    """

    quantizes = False

    def __init__(self, *, invariant: bool = False, eight_bits: bool = True) -> None:
        self._invariant = invariant
        self._tuning = gpu_attention.INVARIANT if invariant else gpu_attention.DEFAULT
        self.kv_dtypes = frozenset(
            (torch.float32, torch.float16, torch.bfloat16, *((torch.float8_e4m3fn,) if eight_bits else ()))
        )

    def linear(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        weight_NK = weight_NK.contiguous()
        if self._invariant:
            return lambda x_MK: matmul.linear(x_MK, weight_NK, bias_N)
        return lambda x_MK: functional.linear(x_MK, weight_NK, bias_N)

    def gated_linear(self, gate_NK: Tensor, up_NK: Tensor) -> Linear:
        both = self.linear(torch.cat((gate_NK, up_NK)))
        return lambda x_MK: gpu_fused.silu_mul(both(x_MK))

    def rms_norm(self, x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return gpu_fused.rms_norm(x, weight_K, eps)

    def add_norm(self, x_MK: Tensor, delta_MK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        return gpu_fused.add_norm(x_MK, delta_MK, weight_K, eps)

    def rotate(self, q_THD: Tensor, k_TGD: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> None:
        gpu_fused.rotate(q_THD, k_TGD, cos_TF, sin_TF)

    def store_kv(self, k_TGD: Tensor, v_TGD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch) -> None:
        gpu_cache.store_kv(heads_together(k_TGD), heads_together(v_TGD), k_NGDB, v_NGBD, batch)

    def attend(
        self, q_THD: Tensor, k_NGDB: Tensor, v_NGBD: Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        return gpu_attention.paged_attention(heads_together(q_THD), k_NGDB, v_NGBD, batch, spec, self._tuning)
