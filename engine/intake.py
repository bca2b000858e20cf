"""The checks a request passes before it may enter: one function for the ingress, the engine and the offline API.

No torch, no text here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.errors import PromptTooLong, RequestError
from engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What a running engine can take. `kv_tokens` is what the empty KV pool holds."""

    max_model_len: int
    kv_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens that prompt and output together may have."""
        return min(self.max_model_len, self.kv_tokens)


def check(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """Raise RequestError if this request could never run, whatever else the engine does."""
    _check_ids("prompt", prompt, limits)
    for name, ids in _ids(params):
        _check_ids(name, ids, limits)
    if not prompt:
        raise RequestError("The prompt is empty; give at least one token.", param="prompt")
    if len(prompt) + max(params.max_tokens, 1) > limits.longest:
        raise PromptTooLong(_too_long(len(prompt), params.max_tokens, limits), param="prompt", code=LENGTH_CODE)


def _ids(params: SamplingParams) -> Iterator[tuple[str, Sequence[int]]]:
    yield "stop_token_ids", params.stop_token_ids
    yield "logit_bias", [token for token, _ in params.logit_bias]
    yield "bad_words", [token for word in params.bad_words for token in word]
    yield "allowed_token_ids", params.allowed_token_ids or ()


LENGTH_CODE = "context_length_exceeded"


def _check_ids(name: str, ids: Sequence[int], limits: Limits) -> None:
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            known = f"ids run from 0 to {limits.vocab_size - 1}"
            raise RequestError(f"{name} holds token id {token}, which is out of vocabulary: {known}.", param=name)


def _too_long(prompt_len: int, max_tokens: int, limits: Limits) -> str:
    bound = f"the model's context is {limits.max_model_len} tokens"
    if limits.kv_tokens < limits.max_model_len:
        bound = f"the KV pool holds {limits.kv_tokens} tokens (context {limits.max_model_len})"
    if prompt_len >= limits.longest:
        return f"The prompt has {prompt_len} tokens, but {bound} and one is kept for the output. Shorten the prompt."
    return (
        f"The prompt has {prompt_len} tokens and max_tokens is {max_tokens}, together {prompt_len + max_tokens}, "
        f"but {bound}. Shorten the prompt or lower max_tokens to {limits.longest - prompt_len}."
    )
