"""Output that follows a grammar: the default model's JSON always validates, whatever the scheduler does meanwhile."""

import json
import random
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine import Engine, EngineConfig, FinishReason, SamplingParams
from engine.config import CacheConfig
from engine.errors import RequestError
from engine.matchers import LlguidanceGrammars, Matcher
from engine.policies import Preemption
from engine.speculate import NGramDrafts
from tests.fakes_schemas import random_schema

COMPACT: Any = {"whitespace_flexible": False}


def of_schema(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Many at once, in a pool that is too small for them, with drafts and overlap."""
    return Engine(
        EngineConfig(
            max_model_len=400,
            cache=CacheConfig(num_blocks=300),
            policy=Preemption(max_num_seqs=64),
            drafts=NGramDrafts(),
            overlap=True,
            evict_every_steps=20,
        )
    )


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def test_200_random_schemas_always_validate(
    engine: Engine, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(0)
    schemas = [random_schema(rng) for _ in range(200)]
    prompt = encode(tokenizer, "Here is an example in JSON:\n")
    each = [
        SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_tokens=300, grammar=of_schema(schema))
        for i, schema in enumerate(schemas)
    ]
    completions = engine.generate([prompt] * 200, each)
    for schema, completion in zip(schemas, completions, strict=True):
        assert completion.finish_reason is FinishReason.STOP, "did not come to an end"
        jsonschema.validate(json.loads(tokenizer.decode(completion.tokens)), schema)
    stats = engine.stats()
    with capfd.disabled():
        tokens = sum(len(completion.tokens) for completion in completions)
        print(f"\n200 schemas: {tokens} tokens valid, {stats.evictions} evictions, {stats.notes}")
    assert stats.evictions > 0 and stats.notes["accepted_draft_tokens"] > 0


def test_what_a_grammar_allows_does_not_depend_on_the_scheduler(engine: Engine, tokenizer: Tokenizer) -> None:
    roomy = Engine(EngineConfig(max_model_len=400, cache=CacheConfig(num_blocks=100, prefix=False)))
    rng = random.Random(7)
    prompts = [encode(tokenizer, f"Item {i} as JSON: ") for i in range(6)]
    each = [
        SamplingParams(temperature=0.9, seed=i, max_tokens=60, grammar=of_schema(random_schema(rng)), logprobs=1)
        for i in range(6)
    ]
    together = engine.generate(prompts, each)
    for prompt, params, mine in zip(prompts, each, together, strict=True):
        alone = roomy.generate([prompt], params)[0]
        assert (mine.tokens, mine.logprobs, mine.finish_reason) == (alone.tokens, alone.logprobs, alone.finish_reason)


@pytest.mark.parametrize("regex", ["[0-9]{3}-[0-9]{4}", "(yes|no)", "[A-F]{2,5}!"])
def test_a_regex_is_matched_as_a_whole(engine: Engine, tokenizer: Tokenizer, regex: str) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=30, grammar=LLMatcher.grammar_from_regex(regex))
    completion = engine.generate([encode(tokenizer, "Call me at ")], params)[0]
    assert re.fullmatch(regex, tokenizer.decode(completion.tokens))
    assert completion.finish_reason is FinishReason.STOP


def test_a_length_that_is_too_short_still_ends_and_min_tokens_does_not_break_the_form(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    """Of a text that the grammar ends, EOS is all that is left, and min_tokens would forbid it: the form wins."""
    yes = LLMatcher.grammar_from_regex("yes")
    params = SamplingParams(temperature=0.0, max_tokens=10, min_tokens=8, grammar=yes)
    completion = engine.generate([encode(tokenizer, "Well, ")], params)[0]
    assert tokenizer.decode(completion.tokens) == "yes" and completion.finish_reason is FinishReason.STOP
    cut = SamplingParams(temperature=0.0, max_tokens=2, grammar=of_schema({"type": "object", "required": ["aaaa"]}))
    assert engine.generate([encode(tokenizer, "Well, ")], cut)[0].finish_reason is FinishReason.LENGTH


def test_what_is_no_grammar_is_refused_before_it_runs(engine: Engine) -> None:
    with pytest.raises(RequestError, match="unclosed group") as caught:
        engine.generate([[1000]], SamplingParams(grammar=LLMatcher.grammar_from_regex("(a")))
    assert caught.value.param == "grammar"
    assert engine.stats().running == engine.stats().waiting == 0


def test_a_matcher_goes_back_to_where_two_outputs_agree(model_folder: Path, tokenizer: Tokenizer) -> None:
    grammars = LlguidanceGrammars(model_folder / "tokenizer.json", 49152, [2])
    grammar = of_schema({"enum": ["abc", "abd", "xyz"]})
    followed = Matcher(grammars._compiled(grammar).deep_copy())
    for text in ('"', '"ab', '"abc', '"ab', '"x', '"abd"', ""):
        output = encode(tokenizer, text)
        fresh = Matcher(grammars._compiled(grammar).deep_copy())
        assert followed.mask(output) == fresh.mask(output), text
    assert followed.mask(encode(tokenizer, "no such text")) is None
    assert followed.mask(encode(tokenizer, '"')) is not None
