"""What broke other engines, replayed: storms, disconnects, prompts aborted half-way, stops among guesses."""

import random
from pathlib import Path

import pytest
import torch

from deployments.choices import Choice, Delta, Style, join
from deployments.client import Submission
from deployments.tokenizer import Tokenizer
from engine import Engine, EngineConfig, SamplingParams
from engine.config import CacheConfig
from engine.loop import EngineLoop
from engine.policies import PolicyConfig, Preemption, Retract
from engine.request import FinishReason, Output, StepOutput
from engine.speculate import DraftConfig, NGramDrafts, NoDrafts
from tests import oracle
from tests.fakes import expected_output
from tests.harness import Harness
from tests.scenarios import endless, prompt

CHUNKED: list[PolicyConfig] = [
    Preemption(max_num_batched_tokens=32, max_num_seqs=8),
    Retract(chunked_prefill_size=32, max_num_seqs=8, max_consecutive_prefills=2),
]


def by_kind(policy: PolicyConfig) -> str:
    return policy.kind


@pytest.mark.parametrize("policy", [Preemption(max_num_seqs=8), Retract(max_num_seqs=8)], ids=by_kind)
def test_a_storm_of_growing_requests_never_stands_still(policy: PolicyConfig) -> None:
    """Eight that end at 256 tokens in a pool for two: a token at least every 50 steps, and each at most 4 evictions."""
    engine = Harness(policy, num_blocks=33)
    for i in range(8):
        engine.add(f"r{i}", prompt(i, 64), max_tokens=192, ignore_eos=True)
    idle = longest = 0
    while engine.core.has_work:
        before = sum(map(len, engine.tokens.values()))
        engine.step()
        idle = 0 if sum(map(len, engine.tokens.values())) > before else idle + 1
        longest = max(longest, idle)
    assert longest < 50
    assert engine.scheduler.num_evictions <= 4 * 8
    assert all(engine.tokens[f"r{i}"] == expected_output(prompt(i, 64), 192, ignore_eos=True) for i in range(8))


@pytest.mark.parametrize("policy", CHUNKED, ids=by_kind)
def test_long_prompts_that_come_together_leave_decodes_a_token_every_third_step(policy: PolicyConfig) -> None:
    engine = Harness(policy, num_blocks=100, max_model_len=512)
    decodes = {f"d{i}": endless(i, 10, 100) for i in range(4)}
    for name, start in decodes.items():
        engine.add(name, start, max_tokens=100)
    while min(map(len, engine.tokens.values())) == 0:
        engine.step()
    for length in (100, 150, 200, 250):
        engine.add(f"p{length}", prompt(length, length), max_tokens=4, ignore_eos=True)
    waits = dict.fromkeys(decodes, 0)
    while any(not engine.tokens[f"p{length}"] for length in (100, 150, 200, 250)):
        before = {name: len(engine.tokens[name]) for name in decodes}
        engine.step()
        waits = {name: 0 if len(engine.tokens[name]) > before[name] else waits[name] + 1 for name in decodes}
        assert max(waits.values()) < 3
    engine.run()
    for length in (100, 150, 200, 250):
        assert engine.tokens[f"p{length}"] == expected_output(prompt(length, length), 4, ignore_eos=True)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_prompt_aborted_half_way_leaves_nothing_false_behind(depth: int) -> None:
    """320 tokens in chunks of 32; aborted after every number of steps; at once the same prompt comes twice."""
    for steps in range(13):
        engine = Harness(CHUNKED[0], num_blocks=60, prefix=True, depth=depth, host_blocks=8)
        start = prompt(steps, 320)
        engine.add("first", start, max_tokens=2)
        for _ in range(steps):
            if engine.core.has_work:
                engine.step()
        engine.core.abort("first")
        for name in ("again", "twice"):
            engine.add(name, start, max_tokens=6, ignore_eos=True)
        engine.run()
        assert engine.tokens["again"] == engine.tokens["twice"] == expected_output(start, 6, ignore_eos=True)


def test_a_chat_never_sees_the_cached_state_of_another() -> None:
    """16 chats that begin alike and have each a word of its own, five turns, in a pool too small for their prefixes."""
    engine = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=16), num_blocks=40, prefix=True, host_blocks=6)
    rng = random.Random(3)
    histories = {f"chat {i}": [*prompt(0, 32), 40 + i, *prompt(1, 7)] for i in range(16)}
    for turn in range(5):
        for name, history in histories.items():
            history += [rng.randrange(60) for _ in range(3)]
            engine.add(f"{name}, turn {turn}", history, max_tokens=8)
        engine.run()
        for name, history in histories.items():
            answer = engine.tokens[f"{name}, turn {turn}"]
            assert answer == expected_output(history, 8)
            history += answer
    assert engine.scheduler.kv.used_blocks == 0


def test_clients_that_all_leave_at_random_leave_no_trace() -> None:
    """Four run and 30 wait; all are aborted at random moments, twenty times over; then eight are served as ever."""
    harness = Harness(Preemption(max_num_batched_tokens=64, max_num_seqs=4))
    given: dict[str, list[int]] = {}

    def publish(step: StepOutput) -> None:
        for output in step:
            given.setdefault(output.request_id, []).extend(output.tokens)

    loop, rng = EngineLoop(harness.core, publish), random.Random(0)
    loop.start()
    try:
        for storm in range(20):
            names = [f"{storm}-{i}" for i in range(34)]
            for i, name in enumerate(names):
                loop.submit(name, prompt(i, 20), SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True))
            rng.shuffle(names)
            for name in names:
                loop.abort([name])
                if rng.random() < 0.2:
                    loop.stats()
        last = [f"last-{i}" for i in range(8)]
        for i, name in enumerate(last):
            loop.submit(name, prompt(i, 14), SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        while harness.core.has_work or loop.stats().last_step_age_s:
            assert loop.stats().last_step_age_s < 30
    finally:
        loop.stop()
    assert [given[name] for name in last] == [expected_output(prompt(i, 14), 6, ignore_eos=True) for i in range(8)]
    stats = harness.core.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)


# With the default model


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.load(model_folder)


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    drafts: dict[str, DraftConfig] = {"plain": NoDrafts(), "drafts": NGramDrafts(min_match=1)}
    return {
        name: Engine(EngineConfig(dtype="float32", cache=CacheConfig(num_blocks=600), drafts=config))
        for name, config in drafts.items()
    }


def answered(
    engine: Engine, tokenizer: Tokenizer, text: str, stop: str, params: SamplingParams
) -> tuple[Choice, Delta]:
    """As the ingress does it: stop strings are found in the text, and then nobody listens any more."""
    ids = tokenizer.encode(text)
    choice = Choice(0, Submission("r", ids, params), Style((stop,) if stop else ()), tokenizer)
    deltas: list[Delta | None] = []
    stream = engine.stream([ids], params)
    for _, output in stream:
        deltas.append(choice.feed(output))
        if choice.finish_reason:
            break
    stream.close()
    return choice, join(delta for delta in deltas if delta)


@pytest.mark.parametrize(
    ("text", "stop", "max_tokens", "shown"),
    [
        ("The letters run ABC", "GHI", 3, None),
        ("1, 2, 3, 4, 5,", "7,", 7, " 6, "),
        ("1, 2, 3, 4, 5,", "", 30, None),
        ("My favourite colour is", "", 10, " blue."),
        ("My favourite colour is", "lue", 10, " b"),
    ],
)
def test_drafts_do_not_show_where_an_answer_ends(
    engines: dict[str, Engine], tokenizer: Tokenizer, text: str, stop: str, max_tokens: int, shown: str | None
) -> None:
    """Text, usage, log probabilities and the reason are the same, although tokens behind the end were accepted."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1)
    (plain, before), (drafted, after) = (
        answered(engines[name], tokenizer, text, stop, params) for name in ("plain", "drafts")
    )
    assert after == before and drafted.completion_tokens == plain.completion_tokens <= max_tokens
    assert drafted.finish_reason == plain.finish_reason
    assert shown is None or after.text == shown


@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": ((57, -100.0),)},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0},
        {"min_tokens": 20},
        {"temperature": 0.9, "seed": 4, "top_p": 0.9},
    ],
)
def test_what_is_asked_of_the_logits_holds_for_guessed_positions(
    engines: dict[str, Engine], tokenizer: Tokenizer, options: dict[str, float]
) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **options})  # type: ignore[arg-type]
    texts = ["The letters run ABC", "1, 2, 3, 4, 5,", "one two one two one", "a b a b a b", "My favourite colour is"]
    prompts = [tokenizer.encode(text) for text in texts]
    plain, drafted = (engines[name].generate(prompts, params) for name in ("plain", "drafts"))
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert options.get("logit_bias") is None or all(57 not in one.tokens for one in drafted)


@pytest.mark.parametrize("stop", [2, 0])
def test_min_tokens_holds_back_a_stop_that_a_bias_wants_at_once(
    engines: dict[str, Engine], tokenizer: Tokenizer, stop: int
) -> None:
    """EOS, and a stop token id: the first eight tokens are those without any bias, the ninth is the stop."""
    stops = () if stop == 2 else (stop,)
    bias = ((stop, 100.0),)
    params = SamplingParams(temperature=0.0, max_tokens=12, min_tokens=8, logit_bias=bias, stop_token_ids=stops)
    for engine in engines.values():
        completion = engine.generate([tokenizer.encode("1, 2, 3, 4, 5,")], params)[0]
        assert completion.tokens == [216, 38, 28, 216, 39, 28, 216, 40, stop]
        assert completion.finish_reason is FinishReason.STOP


def test_a_penalty_changes_nobody_elses_answer(engines: dict[str, Engine], tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode("1, 2, 3, 4, 5,"), tokenizer.encode("Some fruit: apple, pear,")]
    each = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=0.0, max_tokens=40, frequency_penalty=1.05),
    ]
    together = engines["plain"].generate(prompts, each)
    alone = [engines["plain"].generate([prompt], params)[0] for prompt, params in zip(prompts, each, strict=True)]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert together[0].tokens == [216, 38, 28, 216, 39, 28, 216, 40]


def test_scores_of_a_batch_of_prompts_are_those_of_a_forward_pass(
    engines: dict[str, Engine], model_folder: Path
) -> None:
    """As evaluation tools ask for them: token ids, one token of output, the prompt's own log probabilities."""
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 49152) for _ in range(length)] for length in (2, 9, 33, 70)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    judge = oracle.load(model_folder)
    for own, completion in zip(prompts, engines["plain"].generate(prompts, params), strict=True):
        with torch.inference_mode():
            logprobs_TV = torch.log_softmax(judge(torch.tensor([own])).logits[0].float(), dim=-1)
        scores = completion.prompt_logprobs
        assert scores is not None and len(scores) == len(own) and scores[0] is None
        for position, score in enumerate(scores[1:], 1):
            assert score is not None and score.token == own[position]
            assert score.logprob == pytest.approx(float(logprobs_TV[position - 1, own[position]]), abs=1e-4)
            assert score.top[0][0] == int(logprobs_TV[position - 1].argmax())


def test_an_output_says_what_it_says_whatever_holds_it() -> None:
    """A step's columns and its other outputs are read alike."""
    step = StepOutput(["a"], [5], [Output("b", (6, 7))])
    assert [(output.request_id, output.tokens) for output in step] == [("a", (5,)), ("b", (6, 7))]
    assert step.num_tokens == 3 and step and not StepOutput()
