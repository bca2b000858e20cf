"""From a request body to the submissions it asks for, with every check done before the first one is sent.

Prompts times n choices, in prompt order; choice i of a prompt samples with seed + i.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from secrets import randbits
from typing import Generic, TypeVar

from deployments.choices import Choice, Style
from deployments.client import Submission
from deployments.detokenize import Detokenizer
from deployments.respond import ChatShape, CompletionShape
from deployments.schema import ChatRequest, CompletionRequest, GenerationRequest
from deployments.served import ServedModel
from deployments.tokenizer import Tokenizer, encode_batch
from engine.errors import PromptTooLong, RequestError
from engine.intake import LENGTH_CODE, Limits, check
from engine.request import INT64

Call = TypeVar("Call", bound=GenerationRequest)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that the client wrote if it wrote one."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Call]):
    """What tells the two generation endpoints apart. `param` is where a client puts its prompt."""

    id_prefix: str
    param: str
    schema: type[Call]
    read: Callable[[Call, ServedModel, Limits], list[Prompt]]
    shape: type[CompletionShape] | type[ChatShape]

    def prepare(self, call: Call, request_id: str, served: ServedModel, limits: Limits) -> list[Choice]:
        """Raises RequestError if any prompt of the request can never run."""
        try:
            prompts = self.read(call, served, limits)
            return [
                Choice(index, submission, style, served.tokenizer)
                for index, (submission, style) in enumerate(_submissions(call, request_id, prompts, served, limits))
            ]
        except RequestError as error:
            if error.param == "prompt":
                error.param = self.param
            raise


def _submissions(
    call: GenerationRequest, request_id: str, prompts: Sequence[Prompt], served: ServedModel, limits: Limits
) -> Iterator[tuple[Submission, Style]]:
    seed = randbits(63) if call.seed is None else call.seed
    number = itertools.count()
    bad_words = word_ids(call.bad_words, served.tokenizer)
    for prompt in prompts:
        room = limits.longest - len(prompt.ids)
        check(prompt.ids, call.sampling(room, seed, bad_words), limits)
        style = Style(call.stop, call.skip_special_tokens, echo_pieces(prompt, served.tokenizer) if call.echoes else ())
        for i in range(call.n):
            params = call.sampling(room, _wrap(seed + i), bad_words)
            choice_id = f"{request_id}-{next(number)}"
            yield Submission(choice_id, prompt.ids, params, call.priority, call.cache_salt), style


def word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each word, at the beginning of a line and behind a space."""
    return [ids for word in words for ids in _distinct(word, f" {word}", tokenizer)]


def _distinct(text: str, other: str, tokenizer: Tokenizer) -> list[list[int]]:
    first, second = encode_batch(tokenizer.backend, text), encode_batch(tokenizer.backend, other)
    return [first] if first == second else [first, second]


def _wrap(seed: int) -> int:
    """A seed just beyond int64 goes on from its lower end."""
    return (seed + INT64) % (2 * INT64) - INT64


def completion_prompts(call: CompletionRequest, served: ServedModel, limits: Limits) -> list[Prompt]:
    return [_read_prompt(prompt, served.tokenizer, limits) for prompt in call.prompt]


def _read_prompt(prompt: str | list[int], tokenizer: Tokenizer, limits: Limits) -> Prompt:
    if isinstance(prompt, list):
        return Prompt(prompt)
    _check_length(len(prompt), tokenizer, limits)
    return Prompt(tokenizer.encode(prompt), prompt)


def chat_prompts(call: ChatRequest, served: ServedModel, limits: Limits) -> list[Prompt]:
    """One prompt. `developer` is the newer name of `system`, and the one of the two that templates know."""
    _check_length(sum(len(message.content) for message in call.messages), served.tokenizer, limits)
    messages = [message.model_dump() for message in call.messages]
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
    return [Prompt(served.template.encode(messages))]


def _check_length(characters: int, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuses a text that is too long whatever its tokens are, without the time it takes to find them."""
    fewest = characters // tokenizer.longest_token
    if fewest >= limits.longest:
        raise PromptTooLong(
            f"The prompt has {characters} characters, at least {fewest} tokens, but prompt and output together may "
            f"have {limits.longest} tokens. Shorten the prompt.",
            param="prompt",
            code=LENGTH_CODE,
        )


def echo_pieces(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str, ...]:
    """The prompt's text, split as its tokens are. What the tokenizer put before the client's text is not echoed."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    pieces = [detokenizer.feed(token) for token in prompt.ids]
    pieces[-1] += detokenizer.finish()
    whole = "".join(pieces)
    if prompt.text is None or not whole.endswith(prompt.text):
        return tuple(pieces)
    return _without_front(pieces, len(whole) - len(prompt.text))


def _without_front(pieces: Sequence[str], characters: int) -> tuple[str, ...]:
    kept: list[str] = []
    for piece in pieces:
        kept.append(piece[characters:])
        characters = max(characters - len(piece), 0)
    return tuple(kept)


COMPLETIONS = Endpoint("cmpl", "prompt", CompletionRequest, completion_prompts, CompletionShape)
CHAT = Endpoint("chatcmpl", "messages", ChatRequest, chat_prompts, ChatShape)
