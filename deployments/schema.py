"""What a client may send: request bodies, read strictly. `true` is not 1, "3" is not 3, and null means left out.

Anything wrong becomes a RequestError that names the parameter. Unknown fields are ignored.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from deployments.structured import read_grammar
from deployments.unsupported import CHAT, COMPLETION, refuse_unsupported
from engine.errors import RequestError
from engine.request import INT64, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
MAX_N = 128
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 1024
MAX_SALT_LENGTH = 256
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_ALLOWED_TOKENS = 1024


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _null_means_left_out(cls, data: object) -> object:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


def _read_stop(value: object) -> tuple[str, ...]:
    # Before any look at the entries: there may be half a million of them.
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or len(strings) > MAX_STOP_STRINGS:
        raise _wrong(f"must be a string or a list of at most {MAX_STOP_STRINGS} strings")
    if not all(isinstance(string, str) and 0 < len(string) <= MAX_STOP_LENGTH for string in strings):
        raise _wrong(f"must hold strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(strings)


def _read_prompts(value: object) -> list[str | list[int]]:
    """One prompt or many, each as text or as token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _all_ids(value):
            return [value]
        if all(type(item) is str for item in value) or all(type(item) is list and _all_ids(item) for item in value):
            return value
    raise _wrong("must be a string, a list of token ids, a list of strings or a list of lists of token ids, not empty")


def _all_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _read_content(value: object) -> str:
    """A message's text, from a string or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong("must be a string or a list of text parts")
    return "".join(map(_read_part, value))


def _read_part(part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case _:
            raise _wrong('may hold only parts of the form {"type": "text", "text": "..."}')


def _read_bias(value: object) -> tuple[tuple[int, float], ...]:
    """{"token id": bias} as pairs, in the order of the ids."""
    if not isinstance(value, dict) or len(value) > MAX_BIASED_TOKENS:
        raise _wrong(f"must be an object of at most {MAX_BIASED_TOKENS} token ids")
    if not all(_is_id(token) and type(bias) in (int, float) for token, bias in value.items()):
        raise _wrong('must map token ids, as strings of digits, to numbers: {"42": -100}')
    return tuple(sorted((int(token), float(bias)) for token, bias in value.items()))


def _is_id(token: str) -> bool:
    return token.isascii() and token.isdigit() and len(token) < 10


def _wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{message}", {"message": message})


class StreamOptions(_Strict):
    include_usage: bool = False


class Message(_Strict):
    """One turn. Fields beyond these, such as tool_calls, go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_read_content)] = ""


class GenerationRequest(_Strict):
    """What both endpoints take. Ranges are OpenAI's where OpenAI has the parameter.

    `grammar` is made of whatever constraint the client asked for, see `structured`.
    """

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str
    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=0)
    min_tokens: int = Field(0, ge=0)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_read_bias)] = ()
    bad_words: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]] = Field(
        [], max_length=MAX_BAD_WORDS
    )
    allowed_token_ids: list[int] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    grammar: str | None = None
    seed: int | None = Field(None, ge=-INT64, le=INT64 - 1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_read_stop)] = ()
    stop_token_ids: list[int] = Field([], max_length=128)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None
    policy: str = "auto"
    priority: int = Field(0, ge=-INT64, le=INT64 - 1)
    cache_salt: str = Field("", min_length=1, max_length=MAX_SALT_LENGTH)
    draft_tokens: int | None = Field(None, ge=0, le=64)

    def output_tokens(self, room: int) -> int:
        """The most tokens to generate, when prompt and output together leave `room` for them."""
        raise NotImplementedError

    @property
    def logprob_count(self) -> int | None:
        """Alternatives wanted beside each token's log probability; None if log probabilities are not wanted."""
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        return False

    def sampling(self, room: int, seed: int, bad_words: Sequence[Sequence[int]] = ()) -> SamplingParams:
        """`bad_words` as token ids."""
        count = self.logprob_count
        return SamplingParams(
            max_tokens=self.output_tokens(room),
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            grammar=self.grammar,
            bad_words=tuple(map(tuple, bad_words)),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            seed=seed,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=count,
            prompt_logprobs=count if self.echoes else None,
            draft_tokens=self.draft_tokens,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `best_of` other than n would need a ranking that is not built."""

    neutral = COMPLETION

    prompt: Annotated[list[str | list[int]], BeforeValidator(_read_prompts)]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> "CompletionRequest":
        if len(self.prompt) * self.n > MAX_CHOICES:
            many = f"{len(self.prompt)} prompts times n = {self.n}"
            raise RequestError(f"{many} is over {MAX_CHOICES} choices; send several requests.", param="prompt")
        return self

    @model_validator(mode="after")
    def _check_best_of(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise RequestError(
                f"best_of is {self.best_of}; only n ({self.n}) is supported. Leave it out.", param="best_of"
            )
        return self

    def output_tokens(self, room: int) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    neutral = CHAT

    messages: Annotated[list[Message], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=0)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs; set logprobs to true.", param="top_logprobs")
        return self

    def output_tokens(self, room: int) -> int:
        """Without a limit a chat may run to the end of the context."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return max(room, 1) if limit is None else limit

    @property
    def logprob_count(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


Parsed = TypeVar("Parsed", bound=GenerationRequest)


def parse(schema: type[Parsed], body: bytes) -> Parsed:
    """The request in a body of JSON. NaN and Infinity are not JSON."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}. Send one JSON object.") from None
    if not isinstance(data, dict):
        raise RequestError(f"The body is a JSON {type(data).__name__}; send a JSON object.")
    refuse_unsupported(data, schema.neutral)
    try:
        return schema.model_validate({**data, "grammar": read_grammar(data)})
    except ValidationError as error:
        raise _request_error(error) from None


def _request_error(error: ValidationError) -> RequestError:
    """The first thing wrong, with its path: `messages[0].role: Field required.`"""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).lstrip(".")
    return RequestError(f"{path}: {first['msg']}.", param=str(first["loc"][0]) if first["loc"] else None)
