"""Rotary position embedding: the angles of every position, computed once, in float32 as the models were trained.

Shapes: P positions, F = D / 2 frequencies.
"""

import math

import torch
from torch import Tensor

from engine.model_config import ModelConfig


def rope_tables(config: ModelConfig, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, two contiguous float32 tensors [P, F]."""
    frequency_F = SCALINGS[config.rope_scaling.get("rope_type", "default")](config)
    angle_PF = torch.outer(torch.arange(positions, dtype=torch.float32), frequency_F)
    return angle_PF.cos().to(device), angle_PF.sin().to(device)


def _default(config: ModelConfig) -> Tensor:
    """Su et al., 2021: theta ** (-2i / D) radians per position for pair i."""
    exponent_F = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    return torch.pow(config.rope_theta, exponent_F).reciprocal()


def _linear(config: ModelConfig) -> Tensor:
    return _default(config) / float(config.rope_scaling["factor"])


def _llama3(config: ModelConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    scaling, frequency_F = config.rope_scaling, _default(config)
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns_F = frequency_F * float(scaling["original_max_position_embeddings"]) / (2 * math.pi)
    keep_F = ((turns_F - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep_F) * frequency_F / float(scaling["factor"]) + keep_F * frequency_F


SCALINGS = {"default": _default, "linear": _linear, "llama3": _llama3}
