"""Decoders that are not ours: transformers' own modules with our paged attention as their attention implementation.

Shapes: T tokens of this step, R rows that need logits, H query heads, G KV heads, D head dim, V vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.attention import PagedAttention, new_pool
from engine.errors import ConfigError
from engine.model import Tokens
from kernels.attention_batch import AttentionBatch, AttentionSpec
from kernels.backend import TorchBackend

TRANSLATED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "eos_token_id",
)
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def translate(folder: Path) -> dict[str, Any]:
    """config.json in the names that `model_config` reads; transformers knows each architecture's own."""
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(f"model: transformers cannot read {folder / 'config.json'}: {error}") from None
    if not hasattr(config, "num_attention_heads"):
        raise ConfigError(f"model: {config.model_type} has no attention heads, so no KV to page. Choose another model.")
    known = {name: getattr(config, name, None) for name in TRANSLATED}
    return {"architectures": config.architectures, **{k: v for k, v in known.items() if v is not None}}


class ForeignModel:
    """See `model.Model`. transformers calls `_attend` for each layer of the forward pass that is under way."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._step: tuple[AttentionBatch, PagedAttention] | None = None
        name = f"sluice_paged_{id(self)}"
        AttentionInterface.register(name, self._attend)
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
        model.set_attn_implementation(name)

    def forward(self, tokens: Tokens, rows_R: Tensor, attend: PagedAttention) -> Tensor:
        self._step = (tokens.batch, attend)
        output = self._model(
            input_ids=tokens.id_T[None],
            position_ids=tokens.position_T[None],
            use_cache=False,
            logits_to_keep=rows_R,
        )
        self._step = None
        return output.logits[0]  # type: ignore[no-any-return]

    def _attend(
        self, module: Any, query_1HTD: Tensor, key_1GTD: Tensor, value_1GTD: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        assert self._step is not None, "attention runs only inside forward"
        batch, attend = self._step
        q_THD, k_TGD, v_TGD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1GTD, value_1GTD))
        scale = options.get("scaling")
        spec = AttentionSpec(
            scale=q_THD.shape[-1] ** -0.5 if scale is None else float(scale),
            window=options.get("sliding_window") or 0,
            soft_cap=options.get("softcap") or 0.0,
        )
        return attend(module.layer_idx, (q_THD, k_TGD, v_TGD), batch, spec)[None], None


def load_foreign(folder: Path, load_format: str, dtype: torch.dtype, device: torch.device) -> ForeignModel:
    """Raises ConfigError if the architecture is unknown, or does something that paged attention cannot do."""
    try:
        if load_format == "dummy":
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model: transformers cannot load {folder}: {error}") from None
    model.to(device).eval()
    return _verified(model)


@torch.inference_mode()
def _verified(model: PreTrainedModel) -> ForeignModel:
    """Learned position offsets, ALiBi or a cache of its own would make a model wrong without a word. So try it."""
    config = model.config.get_text_config(decoder=True)
    id_T = torch.arange(24, device=model.device) * 7 % config.vocab_size
    expected_TV = model(input_ids=id_T[None], use_cache=False).logits[0]
    foreign = ForeignModel(model)
    found_TV = _run_in_two_chunks(foreign, model, id_T)
    error = (found_TV - expected_TV).abs().max().item()
    if not error <= TOLERANCE[model.dtype] * max(1.0, expected_TV.abs().max().item()):
        raise ConfigError(
            f"model: {type(model).__name__} gives other logits with paged attention than without (by {error:.3g}); "
            "it does something beside plain causal attention. Choose another model."
        )
    return foreign


def _run_in_two_chunks(foreign: ForeignModel, model: PreTrainedModel, id_T: Tensor) -> Tensor:
    config = model.config.get_text_config(decoder=True)
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    pool = new_pool((config.num_hidden_layers, 3, groups, dim, 16), model.dtype, model.device)
    attend = PagedAttention(*pool, TorchBackend())
    return torch.cat(
        [
            foreign.forward(_chunk(id_T, start, end), _rows(id_T, end - start), attend)
            for start, end in ((0, 17), (17, 24))
        ]
    )


def _rows(like: Tensor, count: int) -> Tensor:
    return torch.arange(count, device=like.device)


def _chunk(id_T: Tensor, start: int, end: int) -> Tokens:
    """Positions start … end - 1 of one request that holds blocks 1 and 2 of 16 tokens."""
    position_T = torch.arange(start, end, device=id_T.device)
    batch = AttentionBatch(
        query_starts=[0, end - start],
        context_lens=[end],
        query_starts_R1=torch.tensor([0, end - start], dtype=torch.int32, device=id_T.device),
        context_lens_R=torch.tensor([end], dtype=torch.int32, device=id_T.device),
        block_tables_RM=torch.tensor([[1, 2]], dtype=torch.int32, device=id_T.device),
        slots_T=(position_T + 16).int(),
    )
    return Tokens(id_T[start:end], position_T, batch)
