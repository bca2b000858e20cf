"""The proof: whatever the scheduler does, a request's tokens and log probabilities are those it has alone, bit for bit.

`make matrix` runs every combination of policy, eviction, chunk size, prefix cache, drafts, host tier, overlap, batch
mates and sampling on a small random model; the tests run a choice in which every pair of settings meets.
"""

import argparse
import itertools
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.config import CacheConfig
from engine.policies import PolicyConfig, Preemption, Retract, Static
from engine.speculate import NGramDrafts, NoDrafts

LONGEST = 160
VOCAB = 320
DIMENSIONS: dict[str, tuple[str, ...]] = {
    "policy": ("preemption", "retract", "static"),
    "eviction": ("none", "every 3 steps", "tight pool"),
    "chunk": ("32", "512", "whole"),
    "prefix": ("cold", "warm"),
    "drafts": ("off", "on"),
    "host": ("off", "on"),
    "overlap": ("0", "1"),
    "mates": ("alone", "with 7"),
    "sampling": ("greedy", "seeded"),
}


@dataclass(frozen=True, slots=True)
class Combination:
    policy: str
    eviction: str
    chunk: str
    prefix: str
    drafts: str
    host: str
    overlap: str
    mates: str
    sampling: str

    def config(self, model: Path) -> EngineConfig:
        blocks = 14 if self.eviction == "tight pool" else 300
        return EngineConfig(
            model=str(model),
            max_model_len=LONGEST,
            cache=CacheConfig(num_blocks=blocks, host_blocks=40 if self.host == "on" else 0),
            policy=self._policy(),
            drafts=NGramDrafts(max_draft_tokens=5) if self.drafts == "on" else NoDrafts(),
            overlap=self.overlap == "1",
            threads=1,
            evict_every_steps=3 if self.eviction == "every 3 steps" else 0,
        )

    def _policy(self) -> PolicyConfig:
        tokens = {"32": 32, "512": 512, "whole": 8192}[self.chunk]
        policies: dict[str, PolicyConfig] = {
            "preemption": Preemption(max_num_batched_tokens=tokens, max_num_seqs=8),
            "retract": Retract(chunked_prefill_size=tokens, max_num_seqs=8, schedule_conservativeness=0.1),
            "static": Static(max_num_seqs=8),
        }
        return policies[self.policy]


@dataclass(frozen=True, slots=True)
class Outcome:
    requests: int
    tokens: int
    differing: int


@dataclass(frozen=True, slots=True)
class Job:
    prompt: list[int]
    params: SamplingParams


def jobs(sampling: str) -> list[Job]:
    """The requests that are judged: text that repeats, so that drafts are made, and text that does not."""
    rng = random.Random(1)
    words = [rng.randrange(VOCAB) for _ in range(12)]
    prompts = [words * 4, [rng.randrange(VOCAB) for _ in range(49)], words[:5] * 3]
    return [Job(prompt, wanted(sampling, number)) for number, prompt in enumerate(prompts)]


def wanted(sampling: str, number: int) -> SamplingParams:
    if sampling == "greedy":
        return SamplingParams(temperature=0.0, max_tokens=36, logprobs=2, prompt_logprobs=1 if number == 1 else None)
    return SamplingParams(
        temperature=0.8,
        seed=number,
        max_tokens=36,
        min_tokens=4,
        top_k=40 if number else 0,
        top_p=0.95,
        min_p=0.01 if number == 2 else 0.0,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2 if number else -0.4,
        logit_bias=((7, 2.0), (8, -3.0)),
        bad_words=((9, 10), (11,)),
        stop_token_ids=(5,),
        logprobs=1,
    )


def mates() -> list[Job]:
    """Seven others, of all kinds."""
    rng = random.Random(2)
    return [
        Job([rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))], wanted(rng.choice(("greedy", "seeded")), number))
        for number in range(7)
    ]


class Matrix:
    """Runs combinations against what each request gives alone, in an engine with room and nothing switched on."""

    def __init__(self, model: Path) -> None:
        self._model = model
        engine = Engine(EngineConfig(model=str(model), cache=CacheConfig(num_blocks=300, prefix=False)))
        self.alone = {
            sampling: [engine.generate([job.prompt], job.params)[0] for job in jobs(sampling)]
            for sampling in DIMENSIONS["sampling"]
        }

    def run(self, combination: Combination) -> Outcome:
        engine = Engine(combination.config(self._model))
        judged = jobs(combination.sampling)
        if combination.prefix == "warm":
            engine.generate([job.prompt for job in judged], SamplingParams(max_tokens=1))
        together = [judged + mates()] if combination.mates == "with 7" else [[job] for job in judged]
        given = [
            completion
            for batch in together
            for completion in engine.generate([job.prompt for job in batch], [job.params for job in batch])
        ]
        expected = self.alone[combination.sampling]
        mine = given[: len(expected)]
        assert engine.stats().kv_blocks_used == 0
        return Outcome(
            requests=len(mine),
            tokens=sum(len(completion.tokens) for completion in mine),
            differing=sum(differing(one, other) for one, other in zip(mine, expected, strict=True)),
        )


def differing(mine: Completion, expected: Completion) -> int:
    """Tokens that are not the same, or whose log probability is not, to the last bit; at least 1 if anything is not."""
    pairs = itertools.zip_longest(
        zip(mine.tokens, mine.logprobs, strict=True), zip(expected.tokens, expected.logprobs, strict=True)
    )
    wrong = sum(one != other for one, other in pairs)
    same = mine.prompt_logprobs == expected.prompt_logprobs and mine.finish_reason == expected.finish_reason
    return wrong or int(not same)


def everything() -> Iterator[Combination]:
    for values in itertools.product(*DIMENSIONS.values()):
        yield Combination(*values)


def pairwise(seed: int = 0) -> list[Combination]:
    """A choice in which any two settings of different dimensions meet: the candidate with most new pairs, each time."""
    rng = random.Random(seed)
    missing = {pair for combination in everything() for pair in pairs_of(combination)}
    chosen = []
    while missing:
        candidates = [Combination(*map(rng.choice, DIMENSIONS.values())) for _ in range(60)]
        best = max(candidates, key=lambda candidate: len(missing.intersection(pairs_of(candidate))))
        if found := missing.intersection(pairs_of(best)):
            missing -= found
            chosen.append(best)
    return chosen


def pairs_of(combination: Combination) -> set[tuple[tuple[str, str], ...]]:
    settings = [(field.name, str(getattr(combination, field.name))) for field in fields(combination)]
    return set(itertools.combinations(settings, 2))


def tiny_model(folder: Path) -> Path:
    """Random weights, large enough that no two tokens are nearly as likely."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.2, eos_token_id=2, bos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def total(outcomes: Sequence[Outcome]) -> str:
    requests, tokens, wrong = (sum(getattr(outcome, field.name) for outcome in outcomes) for field in fields(Outcome))
    return f"combinations={len(outcomes)} requests={requests} tokens={tokens} differing={wrong}"


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if any token or log probability differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder or catalogue name instead of the small random model")
    parser.add_argument("--pairwise", action="store_true", help="only a choice in which every pair of settings meets")
    options = parser.parse_args(arguments)
    combinations = pairwise() if options.pairwise else list(everything())
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(options.model or tiny_model(Path(folder)))
        for combination in tqdm(combinations, unit="combination", mininterval=5):
            outcomes.append(matrix.run(combination))
            if outcomes[-1].differing:
                print(f"DIFFERS: {combination}", flush=True)
    print(total(outcomes))
    return 1 if any(outcome.differing for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
