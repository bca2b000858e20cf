"""Sampling: noise by (seed, position) only, filters as published, results independent of batch mates."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError
from engine.logits import Row
from engine.request import SamplingParams
from engine.sampler import logprobs, sample
from kernels.noise import noise

VOCAB = 3000


MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """SplitMix64 in plain integers: what the tensors have to give."""

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & MASK64
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
        return value ^ (value >> 31)

    return (mix((mix(seed & MASK64) + position * 0x9E3779B97F4A7C15) & MASK64) >> 11) * 2.0**-53


def rows(params: SamplingParams, count: int = 1) -> list[Row]:
    return [Row(params, position) for position in range(count)]


def flat_logits(count: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(1, VOCAB).mul(2).expand(count, -1).clone()


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**31)), min_size=1))
def test_the_noise_of_a_batch_is_that_of_each_row(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    assert noise(seeds, positions).tolist() == [uniform(*pair) for pair in pairs]


def test_the_noise_is_uniform_and_a_function_of_seed_and_position() -> None:
    draws = [uniform(seed, position) for seed in range(40) for position in range(250)]
    assert uniform(7, 3) == uniform(7, 3) != uniform(3, 7)
    assert all(0 <= draw < 1 for draw in draws) and len(set(draws)) == len(draws)
    counts = [sum(bucket / 20 <= draw < (bucket + 1) / 20 for draw in draws) for bucket in range(20)]
    chi_squared = sum((count - 500) ** 2 / 500 for count in counts)
    assert chi_squared < 43.8  # 19 degrees of freedom: one in a thousand


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 2000, "top_p": 0.99}, {"min_p": 0.01}, {"min_p": 1e-4, "top_p": 0.9}],
)
def test_samples_follow_the_filtered_distribution(options: dict[str, float]) -> None:
    """Chi-squared over ten classes of about equal mass, 4,000 samples: the critical value is for one in a thousand."""
    logits = flat_logits(1)[0]
    params = SamplingParams(temperature=1.3, seed=11, **options)  # type: ignore[arg-type]
    expected = torch.softmax(logits.double() / 1.3, dim=-1)
    order = expected.argsort(descending=True)
    keep = order[: int(options.get("top_k", VOCAB))]
    keep = keep[expected[keep] >= options.get("min_p", 0.0) * expected.max()]
    mass = (expected[keep] / expected[keep].sum()).cumsum(-1)
    keep = keep[: int((mass < options.get("top_p", 1.0)).sum()) + 1]
    filtered = torch.zeros(VOCAB, dtype=torch.float64).index_put((keep,), expected[keep] / expected[keep].sum())
    counts = torch.bincount(sample(flat_logits(4000), rows(params, 4000)), minlength=VOCAB)
    assert set(counts.nonzero().flatten().tolist()) <= set(keep.tolist())
    classes = (filtered[order].cumsum(-1) * 10).long().clamp(max=9)
    wanted = torch.zeros(10, dtype=torch.float64).index_add(0, classes, filtered[order]) * 4000
    seen = torch.zeros(10, dtype=torch.float64).index_add(0, classes, counts[order].double())
    used = wanted > 1
    assert ((seen - wanted)[used] ** 2 / wanted[used]).sum() < 27.9


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.8}, {"top_k": 5}, {"top_p": 0.9999}, {"min_p": 0.1}, {"min_p": 1e-6}]
)
def test_a_row_does_not_depend_on_the_rows_beside_it(options: dict[str, float]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(8, VOCAB)
    own = SamplingParams(temperature=0.8, seed=3, **options)  # type: ignore[arg-type]
    alone = [int(sample(logits[index : index + 1].clone(), [Row(own, index)])[0]) for index in range(8)]
    mates = [
        Row(own, 0),
        Row(SamplingParams(temperature=0.0), 1),
        *[Row(own if i % 2 else SamplingParams(temperature=1.9, top_p=0.999, seed=i), i) for i in range(2, 8)],
    ]
    together = sample(logits.clone(), mates).tolist()
    assert [together[index] for index in (0, 3, 5, 7)] == [alone[index] for index in (0, 3, 5, 7)]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-7, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert sample(flat_logits(1), rows(SamplingParams(temperature=temperature))).tolist() == [
        int(flat_logits(1).argmax())
    ]


@pytest.mark.parametrize(
    "options",
    [{"temperature": 1e-5}, {"temperature": 1e-4}, {"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}],
)
def test_settings_next_to_greedy_pick_the_best_token(options: dict[str, float]) -> None:
    params = SamplingParams(seed=5, **options)  # type: ignore[arg-type]
    assert sample(flat_logits(20), rows(params, 20)).tolist() == [int(flat_logits(1).argmax())] * 20


def test_every_way_to_switch_top_k_off_gives_the_same_tokens() -> None:
    choices = [
        sample(flat_logits(50), rows(SamplingParams(seed=5, top_k=k), 50)).tolist() for k in (-1, 0, VOCAB, 10**9)
    ]
    assert choices[0] == choices[1] == choices[2] == choices[3]


def test_banned_tokens_are_never_chosen() -> None:
    best = int(flat_logits(1).argmax())
    assert sample(flat_logits(1), [Row(SamplingParams(temperature=0.0), 0, banned=(best,))]).tolist() != [best]


def test_logprobs_are_the_models_own_best_first() -> None:
    logits = flat_logits(2)
    entries = logprobs(logits, torch.tensor([5, 6]), [3, 0]).entries()
    expected = torch.log_softmax(logits[0], dim=-1)
    assert math.isclose(entries[0].logprob, float(expected[5]), rel_tol=1e-6)
    assert [token for token, _ in entries[0].top] == expected.topk(3).indices.tolist()
    assert entries[1].token == 6 and entries[1].top == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("max_tokens", -1),
        ("min_tokens", 17),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", 1e-30),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", ((3, 101.0),)),
        ("bad_words", ((),)),
        ("allowed_token_ids", ()),
        ("seed", 2**63),
        ("seed", -(2**63) - 1),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
