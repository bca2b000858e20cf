"""The default model end to end in one process: golden tokens, 200 random prompts against transformers, exactness."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import Engine, EngineConfig, FinishReason, SamplingParams
from engine.config import CacheConfig
from engine.errors import PromptTooLong
from engine.policies import Preemption
from tests import oracle
from tests.goldens import GOLDENS


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Roomy: nothing is evicted."""
    return Engine(EngineConfig(cache=CacheConfig(num_blocks=1400), policy=Preemption(max_num_seqs=64)))


@pytest.fixture(scope="module")
def tight() -> Engine:
    """32 usable blocks for up to 8 requests, 32 tokens a step."""
    policy = Preemption(max_num_batched_tokens=32, max_num_seqs=8)
    return Engine(EngineConfig(cache=CacheConfig(num_blocks=33), max_model_len=512, policy=policy))


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", GOLDENS)
def test_golden_tokens(engine: Engine, tokenizer: Tokenizer, text: str) -> None:
    golden = GOLDENS[text]
    params = SamplingParams(temperature=0.0, max_tokens=len(golden))
    assert engine.generate([encode(tokenizer, text)], params)[0].tokens == golden


def test_200_random_prompts_served_together_equal_transformers(
    model_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In float32, as transformers. Mixed lengths, 12 tokens each; half are text-like (repeating), half random ids."""
    cache = CacheConfig(num_blocks=1400)
    engine = Engine(EngineConfig(dtype="float32", cache=cache, policy=Preemption(max_num_seqs=64)))
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 49152) for _ in range(rng.choice((1, 3, 8, 17, 30, 64, 100)))] for _ in range(100)]
    prompts += [(prompt * 3)[: rng.randrange(2, 120)] for prompt in prompts]
    completions = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    judge = oracle.load(model_folder)
    verdicts = [oracle.judge(judge, p, c.tokens) for p, c in zip(prompts, completions, strict=True)]
    compared, ties = sum(v.compared for v in verdicts), sum(v.near_tie for v in verdicts)
    with capfd.disabled():  # for the reader of the test run
        print(f"\n200 prompts: {compared} tokens equal to transformers, {ties} prompts had a near-tie")
    assert compared > 2000


def test_eviction_chunks_and_batch_mates_change_no_token_and_no_logprob(engine: Engine, tight: Engine) -> None:
    prompts = [[1000 + i] * 20 + list(range(2000, 2040)) for i in range(8)]
    each = [
        SamplingParams(temperature=0.7 if i % 2 else 0.0, seed=i, max_tokens=60, ignore_eos=True, logprobs=2)
        for i in range(8)
    ]
    alone = [engine.generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    before = tight.stats().evictions
    together = tight.generate(prompts, each)
    assert tight.stats().evictions > before, "the pool was meant to be too small"
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.logprobs == theirs.logprobs
        assert len(mine.tokens) == 60 and mine.finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_do_not_depend_on_chunks_or_cache(engine: Engine, tight: Engine) -> None:
    prompt = list(range(1000, 1100))
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=1, prompt_logprobs=1)
    first, second = (tight.generate([prompt], params)[0] for _ in range(2))
    whole = engine.generate([prompt], params)[0]
    assert whole.prompt_logprobs is not None and len(whole.prompt_logprobs) == 100
    assert whole.prompt_logprobs[0] is None and None not in whole.prompt_logprobs[1:]
    assert [entry.token for entry in whole.prompt_logprobs if entry] == prompt[1:]
    assert first.prompt_logprobs == second.prompt_logprobs == whole.prompt_logprobs
    assert first.cached_tokens == second.cached_tokens == 0


def test_a_prefix_hit_changes_no_token(engine: Engine) -> None:
    prompt = list(range(3000, 3050))
    params = SamplingParams(temperature=0.0, max_tokens=8)
    cold, warm = (engine.generate([prompt], params)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 48)
    assert cold.tokens == warm.tokens


def test_min_tokens_holds_back_every_way_to_end(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = encode(tokenizer, "My favourite colour is")
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=5, stop_token_ids=(30,))
    tokens = engine.generate([prompt], params)[0].tokens
    assert 2 not in tokens[:5] and 30 not in tokens[:5]


def test_a_stop_token_id_ends_the_output_and_is_its_last_token(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = encode(tokenizer, "1, 2, 3, 4, 5,")
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(40,))
    completion = engine.generate([prompt], params)[0]
    assert completion.tokens == GOLDENS["1, 2, 3, 4, 5,"][:8] and completion.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on(engine: Engine, tokenizer: Tokenizer) -> None:
    prompt = encode(tokenizer, "My favourite colour is")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    assert engine.generate([prompt], params)[0].tokens == [4461, 30, 2, 198, 1, 520, 9531, 198]


def test_streaming_gives_the_same_tokens_one_step_at_a_time(engine: Engine, tokenizer: Tokenizer) -> None:
    prompts = [encode(tokenizer, text) for text in GOLDENS]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    joined: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    for index, output in engine.stream(prompts, params):
        assert len(output.tokens) == 1
        joined[index] += output.tokens
    assert list(joined.values()) == [golden[:6] for golden in GOLDENS.values()]


def test_leaving_a_stream_early_frees_its_blocks(engine: Engine) -> None:
    stream = engine.stream([[1000] * 40] * 3, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(stream)
    assert engine.stats().kv_blocks_used > 0
    stream.close()
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.running, stats.waiting) == (0, 0, 0)


def test_one_prompt_that_cannot_fit_refuses_the_call_and_loses_nothing_else(tight: Engine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with pytest.raises(PromptTooLong, match="600 tokens"):
        tight.generate([[1000] * 10, [1000] * 600], params)
    assert tight.stats().kv_blocks_used == 0
    assert len(tight.generate([[1000] * 10], params)[0].tokens) == 4


def test_step_time_is_split_into_its_parts(engine: Engine) -> None:
    before = engine.stats()
    engine.generate([[1000] * 40], SamplingParams(temperature=0.0, max_tokens=4))
    after = engine.stats()
    assert after.steps > before.steps
    grown = [part for part, seconds in after.part_seconds.items() if seconds > before.part_seconds[part]]
    assert grown == ["plan", "prepare", "forward", "sample", "publish"]
