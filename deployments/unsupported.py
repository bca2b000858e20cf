"""Parameters that are known but not built: each is refused by name unless it has the value that changes nothing."""

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError

SAMPLING: Mapping[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
}
COMPLETION = {**SAMPLING, "suffix": ("",)}
CHAT = {
    **SAMPLING,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raise RequestError for the first parameter of `neutral` that asks for something; null asks for nothing."""
    for name, values in neutral.items():
        asked = body.get(name)
        if asked is not None and not any(_same(asked, value) for value in values):
            allowed = "".join(f" or send {json.dumps(value)}" for value in values)
            raise RequestError(f"{name} is not supported; leave it out{allowed}.", param=name, code="unsupported")


def _same(value: object, neutral: object) -> bool:
    """Equality by which `true` is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
