"""The paged KV pool as tensors, and attention over it: what a model's layers are given instead of a cache object.

Shapes: L layers, N blocks, G KV heads, D head dim, B tokens per block, T tokens of this step, H query heads.
"""

import torch
from torch import Tensor

from kernels.attention_batch import AttentionBatch, AttentionSpec
from kernels.backend import Backend


class PagedAttention:
    """K blocks as [L, N, G, D, B] and V blocks as [L, N, G, B, D]; zeroed, so that unwritten blocks are finite."""

    def __init__(self, k_LNGDB: Tensor, v_LNGBD: Tensor, backend: Backend) -> None:
        self._k_LNGDB = k_LNGDB
        self._v_LNGBD = v_LNGBD
        self._backend = backend

    @property
    def device(self) -> torch.device:
        return self._k_LNGDB.device

    def __call__(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], batch: AttentionBatch, spec: AttentionSpec
    ) -> Tensor:
        """Store this step's K and V [T, G, D], then attend with Q [T, H, D]; returns [T, H, D]."""
        q_THD, k_TGD, v_TGD = qkv
        k_NGDB, v_NGBD = self._k_LNGDB[layer], self._v_LNGBD[layer]
        self._backend.store_kv(k_TGD, v_TGD, k_NGDB, v_NGBD, batch)
        return self._backend.attend(q_THD, k_NGDB, v_NGBD, batch, spec)


def new_pool(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeroed K and V for (layers, blocks, KV heads, head dim, block size)."""
    layers, blocks, groups, dim, size = shape
    return (
        torch.zeros(layers, blocks, groups, dim, size, dtype=dtype, device=device),
        torch.zeros(layers, blocks, groups, size, dim, dtype=dtype, device=device),
    )
