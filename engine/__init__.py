"""The engine: continuous batching over paged KV. Tokens in, tokens out; it knows no text and needs no Ray.

Names are imported on first use, so that the pure parts (scheduler, policies, cache) never load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.engine import Completion, Engine
    from engine.request import FinishReason, Output, SamplingParams

_HOME = {
    "Completion": "engine.engine",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "FinishReason": "engine.request",
    "Output": "engine.request",
    "SamplingParams": "engine.request",
}
__all__ = ["Completion", "Engine", "EngineConfig", "FinishReason", "Output", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
