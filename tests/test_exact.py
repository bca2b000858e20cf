"""The default model under drafts, overlap, host tier and eviction at once: not a token, not a logprob differs."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.config import CacheConfig
from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.speculate import NGramDrafts
from tests.goldens import GOLDENS

COUNT = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28]  # "1, 2, 3, 4, 5," goes on for long
PROMPTS = [
    COUNT,
    [1000 + i for i in range(40)] * 2,
    COUNT * 3,
    [1000, 1001] * 8,
    list(range(2000, 2050)),
    [*COUNT, 1000],
]


def wanted(index: int) -> SamplingParams:
    """Greedy and sampled by turns; all with logprobs, some with prompt logprobs or a minimum length."""
    return SamplingParams(
        temperature=0.0 if index % 2 == 0 else 0.8,
        top_p=0.9 if index % 3 == 0 else 1.0,
        seed=index,
        max_tokens=40,
        min_tokens=6 if index == 4 else 0,
        ignore_eos=index != 5,
        logprobs=2,
        prompt_logprobs=0 if index == 3 else None,
    )


@pytest.fixture(scope="module")
def alone() -> list[Completion]:
    """One at a time, roomy, nothing special."""
    engine = Engine(EngineConfig(cache=CacheConfig(num_blocks=600, prefix=False)))
    return [engine.generate([prompt], wanted(index))[0] for index, prompt in enumerate(PROMPTS)]


def everything(policy: PolicyConfig, *, overlap: bool) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_blocks=20, host_blocks=24),
        max_model_len=256,
        policy=policy,
        drafts=NGramDrafts(max_draft_tokens=5),
        overlap=overlap,
        evict_every_steps=7,
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "policy", [Preemption(max_num_batched_tokens=48, max_num_seqs=8), Retract(chunked_prefill_size=32), Static()]
)
def test_nothing_the_scheduler_does_changes_a_token_or_a_logprob(
    alone: list[Completion], policy: PolicyConfig, overlap: bool
) -> None:
    engine = Engine(everything(policy, overlap=overlap))
    together = engine.generate(PROMPTS, [wanted(index) for index in range(len(PROMPTS))])
    stats = engine.stats()
    for mine, expected in zip(together, alone, strict=True):
        assert mine.tokens == expected.tokens
        assert mine.logprobs == expected.logprobs
        assert mine.prompt_logprobs == expected.prompt_logprobs
        assert mine.finish_reason == expected.finish_reason
    assert stats.evictions > 0 and stats.kv_blocks_used == 0
    assert 0 < stats.notes["accepted_draft_tokens"] <= stats.notes["draft_tokens"]


@pytest.mark.parametrize("overlap", [False, True])
def test_goldens_with_drafts_and_overlap(overlap: bool, model_folder: Path) -> None:
    """Text that repeats needs fewer steps than tokens; where it ends by itself nothing leaks behind the end."""
    config = EngineConfig(cache=CacheConfig(num_blocks=600), drafts=NGramDrafts(), overlap=overlap)
    engine = Engine(config)
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    for text, golden in GOLDENS.items():
        params = SamplingParams(temperature=0.0, max_tokens=len(golden))
        assert engine.generate([list(tokenizer.encode(text, add_special_tokens=False).ids)], params)[0].tokens == golden
    assert engine.stats().generated_tokens == sum(map(len, GOLDENS.values()))
    assert engine.stats().notes["accepted_draft_tokens"] > 0
