"""The decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM) on a flat batch of tokens.

Shapes: T tokens of this step over all requests, E hidden size, H query heads, G KV heads, D head dim, F = D / 2,
V vocabulary. Paged attention is an argument of forward; nothing here knows of requests or devices.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.attention import PagedAttention
from engine.model_config import ModelConfig
from engine.rope import rope_tables
from engine.weights import WeightSource
from kernels.attention_batch import AttentionBatch, AttentionSpec
from kernels.backend import Backend, Linear


@dataclass(frozen=True, slots=True)
class Tokens:
    """One step's tokens and where they stand in their sequences."""

    id_T: Tensor
    position_T: Tensor
    batch: AttentionBatch


class Model(Protocol):
    def forward(self, tokens: Tokens, rows_R: Tensor, attend: PagedAttention) -> Tensor:
        """Runs all T tokens; returns the logits [R, V] of those rows that need them."""
        ...


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float, backend: Backend) -> None:
        self._weight = weight
        self._eps = eps
        self._backend = backend

    def __call__(self, x: Tensor) -> Tensor:
        return self._backend.rms_norm(x, self._weight, self._eps)

    def after_adding(self, delta_TE: Tensor, x_TE: Tensor) -> Tensor:
        """The norm of x + delta, which x becomes."""
        return self._backend.add_norm(x_TE, delta_TE, self._weight, self._eps)


class Loader:
    """Builds parts out of a weight source by the names that checkpoints use."""

    def __init__(self, config: ModelConfig, source: WeightSource, backend: Backend) -> None:
        self.config = config
        self.source = source
        self.backend = backend

    def norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self.source.get(f"{name}.weight", (size,)), self.config.norm_eps, self.backend)

    def fused_linear(self, names: list[str], outputs: list[int], inputs: int, bias: bool) -> Linear:
        """Several linears of the same input as one, their outputs side by side."""
        parts = list(zip(names, outputs, strict=True))
        weight = torch.cat([self.source.get(f"{name}.weight", (size, inputs)) for name, size in parts])
        if not bias:
            return self.backend.linear(weight)
        return self.backend.linear(weight, torch.cat([self.source.get(f"{n}.bias", (size,)) for n, size in parts]))

    def linear(self, name: str, outputs: int, inputs: int, bias: bool = False) -> Linear:
        return self.fused_linear([name], [outputs], inputs, bias)


class Attention:
    """Grouped-query attention; with q/k norms in Qwen3, with biases in Qwen2."""

    def __init__(self, load: Loader, prefix: str, layer: int) -> None:
        config = load.config
        self._layer = layer
        self._heads, self._groups, self._dim = config.heads, config.kv_heads, config.head_dim
        self._backend = load.backend
        self._spec = AttentionSpec(scale=config.head_dim**-0.5, window=config.window)
        sizes = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        names = [f"{prefix}.{part}_proj" for part in "qkv"]
        self._qkv = load.fused_linear(names, sizes, config.hidden, config.qkv_bias)
        has_bias = load.source.has(f"{prefix}.o_proj.bias")
        self._out = load.linear(f"{prefix}.o_proj", config.hidden, sizes[0], has_bias)
        self._q_norm = load.norm(f"{prefix}.q_norm", config.head_dim) if config.qk_norm else _identity
        self._k_norm = load.norm(f"{prefix}.k_norm", config.head_dim) if config.qk_norm else _identity

    def __call__(
        self, x_TE: Tensor, rope: tuple[Tensor, Tensor], batch: AttentionBatch, attend: PagedAttention
    ) -> Tensor:
        qkv_TXD = self._qkv(x_TE).view(x_TE.shape[0], -1, self._dim)
        q_THD, k_TGD, v_TGD = torch.split(qkv_TXD, [self._heads, self._groups, self._groups], dim=1)
        q_THD, k_TGD = self._q_norm(q_THD), self._k_norm(k_TGD)
        self._backend.rotate(q_THD, k_TGD, *rope)
        out_THD = attend(self._layer, (q_THD, k_TGD, v_TGD), batch, self._spec)
        return self._out(out_THD.flatten(1))


def _identity(x: Tensor) -> Tensor:
    return x


class FeedForward:
    """SwiGLU: silu(gate) · up, then down."""

    def __init__(self, load: Loader, prefix: str) -> None:
        hidden, ffn = load.config.hidden, load.config.ffn
        gate, up = (load.source.get(f"{prefix}.{part}_proj.weight", (ffn, hidden)) for part in ("gate", "up"))
        self._gate_up = load.backend.gated_linear(gate, up)
        self._down = load.linear(f"{prefix}.down_proj", hidden, ffn)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return self._down(self._gate_up(x_TE))


class Layer:
    """Each half adds what the half before it computed to x, so that the addition and the norm are one pass."""

    def __init__(self, load: Loader, index: int) -> None:
        prefix, hidden = f"model.layers.{index}", load.config.hidden
        self._attention_norm = load.norm(f"{prefix}.input_layernorm", hidden)
        self._attention = Attention(load, f"{prefix}.self_attn", index)
        self._ffn_norm = load.norm(f"{prefix}.post_attention_layernorm", hidden)
        self._ffn = FeedForward(load, f"{prefix}.mlp")

    def __call__(
        self,
        x_TE: Tensor,
        delta_TE: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: AttentionBatch,
        attend: PagedAttention,
    ) -> Tensor:
        """Returns what is to be added to x."""
        delta_TE = self._attention(self._attention_norm.after_adding(delta_TE, x_TE), rope, batch, attend)
        return self._ffn(self._ffn_norm.after_adding(delta_TE, x_TE))


class Decoder:
    """Embeds, runs the layers, and pays for norm and head only on the rows that are asked for."""

    def __init__(self, load: Loader, positions: int) -> None:
        config = load.config
        self._embedding_VE = load.source.get("model.embed_tokens.weight", (config.vocab_size, config.hidden))
        self._layers = [Layer(load, index) for index in range(config.layers)]
        self._norm = load.norm("model.norm", config.hidden)
        if config.tied:
            self._head = load.backend.linear(self._embedding_VE)
        else:
            self._head = load.linear("lm_head", config.vocab_size, config.hidden)
        self._cos_PF, self._sin_PF = rope_tables(config, positions, self._embedding_VE.device)

    def forward(self, tokens: Tokens, rows_R: Tensor, attend: PagedAttention) -> Tensor:
        x_TE = self._embedding_VE[tokens.id_T]
        rope = self._cos_PF[tokens.position_T], self._sin_PF[tokens.position_T]
        delta_TE = torch.zeros_like(x_TE)
        for layer in self._layers:
            delta_TE = layer(x_TE, delta_TE, rope, tokens.batch, attend)
        return self._head(self._norm.after_adding(delta_TE[rows_R], x_TE[rows_R]))
