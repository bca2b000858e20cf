"""What attention must know of a step besides Q, K and V: where each request's queries and blocks are.

Shapes: T tokens of this step, R requests, M most blocks of a request.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """How one layer attends. `window` 0: the whole context; `soft_cap` 0: none."""

    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """One step's chunks, in order. Request r owns queries `query_starts[r] … query_starts[r + 1] - 1`, the last of its
    first `context_lens[r]` positions; block i of its context is `block_tables_RM[r, i]`.

    `slots_T` says where each token's K and V go: block times block size plus offset.
    The `*_R` tensors repeat the two lists for kernels that read tensors. All tensors are int32.
    """

    query_starts: list[int]
    context_lens: list[int]
    query_starts_R1: Tensor
    context_lens_R: Tensor
    block_tables_RM: Tensor
    slots_T: Tensor


def heads_together(x_THD: Tensor) -> Tensor:
    """The same numbers, with each token's heads one after the other; tokens may lie apart."""
    return x_THD if x_THD.stride(1) == x_THD.shape[2] and x_THD.stride(2) == 1 else x_THD.contiguous()
