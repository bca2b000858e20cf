"""The Triton kernels in Triton's interpreter, against their references. Run by test_gpu_kernels.py in its own process.

Shapes are small: the interpreter is a thousand times slower than a GPU.
"""

import pytest
import torch
from torch import Tensor

from engine.logits import Row
from engine.request import SamplingParams
from engine.sampler import sample_on_gpu
from kernels import gpu_attention, gpu_cache, gpu_fused, gpu_sampling, reference
from kernels.attention_batch import AttentionSpec
from tests.test_kernels import make_batch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# The interpreter cuts off what a GPU rounds: one unit in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SMALL = gpu_attention.Tuning(tile=16, split=32)
BORDERS = [(1, 15), (1, 16), (1, 17), (1, 33), (1, 100)]
MIXED = [(1, 1), (5, 40), (33, 33), (1, 64), (7, 100)]
SPECS = {
    "plain": AttentionSpec(0.125),
    "window": AttentionSpec(0.1, window=20),
    "cap": AttentionSpec(0.1, soft_cap=5.0),
}


def close(given: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(given, expected, atol=tolerance, rtol=tolerance)


def pool(groups: int, dim: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(32, groups, dim, size).to(dtype), torch.randn(32, groups, size, dim).to(dtype)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("dtype", "chunks"),
    [(torch.float32, BORDERS), *((dtype, MIXED) for dtype in FLOATS)],
    ids=["decodes", *map(str, FLOATS)],
)
@pytest.mark.parametrize(
    ("dim", "groups", "shared", "size"),
    [
        (64, 2, 1, 16), (80, 1, 2, 16), (96, 2, 3, 32), (128, 1, 4, 16),
        (64, 1, 5, 48), (80, 1, 6, 16), (64, 1, 7, 16), (128, 1, 8, 16),
    ],
)  # fmt: skip
def test_attention_is_that_of_the_reference_for_every_shape(
    dtype: torch.dtype, dim: int, groups: int, shared: int, size: int, chunks: list[tuple[int, int]]
) -> None:
    batch = make_batch(chunks, size, 32)
    q_THD, blocks = torch.randn(batch.query_starts[-1], groups * shared, dim).to(dtype), pool(groups, dim, size, dtype)
    spec = SPECS["plain"]
    given = gpu_attention.paged_attention(q_THD, *blocks, batch, spec, SMALL)
    close(given, reference.paged_attention(q_THD, *blocks, batch, spec))


@pytest.mark.parametrize("name", SPECS)
def test_whether_splits_run_side_by_side_or_in_turn_changes_no_bit(name: str) -> None:
    batch, blocks = make_batch(MIXED, 16, 32), pool(2, 64, 16, torch.float32)
    q_THD = torch.randn(batch.query_starts[-1], 4, 64)
    apart = gpu_attention.Tuning(tile=16, split=32, enough_programs=1 << 20)
    in_turn = gpu_attention.Tuning(tile=16, split=32, enough_programs=0)
    given = [gpu_attention.paged_attention(q_THD, *blocks, batch, SPECS[name], tuning) for tuning in (apart, in_turn)]
    assert torch.equal(*given)
    close(given[0], reference.paged_attention(q_THD, *blocks, batch, SPECS[name]))


@pytest.mark.parametrize("name", SPECS)
def test_a_token_is_attended_alike_alone_and_in_a_chunk(name: str) -> None:
    """With one number of rows for every launch. numpy, which computes a tile here, must find a row at its place."""
    tuning = gpu_attention.Tuning(rows=16, tile=16, split=32)
    whole, blocks = make_batch([(40, 40)], 16, 32), pool(1, 64, 16, torch.float32)
    q_THD = torch.randn(40, 16, 64)  # 16 heads: a program holds one token
    together = gpu_attention.paged_attention(q_THD, *blocks, whole, SPECS[name], tuning)
    for position in (0, 15, 16, 31, 39):
        table = whole.block_tables_RM[:, : position // 16 + 1].tolist()[0]
        one = make_batch([(1, position + 1)], 16, 32)
        one.block_tables_RM.copy_(torch.tensor([table]))
        alone = gpu_attention.paged_attention(q_THD[position : position + 1], *blocks, one, SPECS[name], tuning)
        assert torch.equal(alone[0], together[position])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_eight_bit_blocks_are_attended_as_what_they_hold(dtype: torch.dtype) -> None:
    batch, eight = make_batch(MIXED, 16, 32), pool(1, 64, 16, torch.float8_e4m3fn)
    q_THD = torch.randn(batch.query_starts[-1], 4, 64).to(dtype)
    wide = eight[0].to(dtype), eight[1].to(dtype)
    given = gpu_attention.paged_attention(q_THD, *eight, batch, SPECS["plain"], SMALL)
    close(given, reference.paged_attention(q_THD, *wide, batch, SPECS["plain"]))


def test_what_lies_behind_the_context_does_not_leak_into_the_result() -> None:
    batch, (k, v) = make_batch([(1, 17), (1, 40)], 16, 8), pool(1, 64, 16, torch.float32)
    q_THD = torch.randn(2, 4, 64)
    before = gpu_attention.paged_attention(q_THD, k, v, batch, SPECS["plain"], SMALL)
    last = int(batch.block_tables_RM[0, 1])
    k[last, :, :, 1:], v[last, :, 1:] = float("nan"), float("nan")
    k[0], v[0] = float("nan"), float("nan")
    assert torch.equal(gpu_attention.paged_attention(q_THD, k, v, batch, SPECS["plain"], SMALL), before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_rotation_and_store_are_those_of_the_reference(dtype: torch.dtype, dim: int) -> None:
    """Q, K and V as they come from one linear: tokens lie apart."""
    batch = make_batch([(5, 20), (1, 3)], 16, 8)
    qkv_TXD, angle_TF = torch.randn(6, 8, dim).to(dtype), torch.randn(6, dim // 2)
    mine, theirs = qkv_TXD.clone(), qkv_TXD.clone()
    gpu_fused.rotate(mine[:, :4], mine[:, 4:6], angle_TF.cos(), angle_TF.sin())
    reference.rotate(theirs[:, :4], theirs[:, 4:6], angle_TF.cos(), angle_TF.sin())
    close(mine, theirs)
    for kind in (dtype, torch.float8_e4m3fn):
        ours, expected = ((torch.zeros(8, 2, dim, 16).to(kind), torch.zeros(8, 2, 16, dim).to(kind)) for _ in range(2))
        k_TGD, v_TGD = theirs[:, 4:6].to(kind).to(dtype), theirs[:, 6:8].to(kind).to(dtype)  # nothing is to be rounded
        k_TGD[0, 0, :3], v_TGD[1, 1, :3] = 1000.0, -1000.0  # more than eight bits can hold
        gpu_cache.store_kv(k_TGD, v_TGD, *ours, batch)
        reference.store_kv(k_TGD, v_TGD, *expected, batch)
        assert all(torch.equal(left.float(), right.float()) for left, right in zip(ours, expected, strict=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("size", [64, 200, 576])
def test_norm_and_activation_are_those_of_the_reference(dtype: torch.dtype, size: int) -> None:
    x, delta, weight = torch.randn(5, size).to(dtype), torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    close(gpu_fused.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    mine, theirs = x.clone(), x.clone()
    close(gpu_fused.add_norm(mine, delta, weight, 1e-5), reference.add_norm(theirs, delta, weight, 1e-5))
    close(mine, theirs)
    close(gpu_fused.silu_mul(x * 4), reference.silu_mul(x * 4))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn], ids=str)
def test_many_copies_in_one_launch_go_down_and_up_again(dtype: torch.dtype) -> None:
    device = torch.randn(3, 6, 2, 80, 16).to(dtype)
    before, host = device.clone(), torch.zeros(4, 3, 2, 80, 16).to(dtype)
    gpu_cache.copy_blocks(device.transpose(0, 1), host, torch.tensor([5, 2]), torch.tensor([0, 3]))
    assert torch.equal(host[0].float(), before[:, 5].float()) and torch.equal(host[3].float(), before[:, 2].float())
    gpu_cache.copy_blocks(host, device.transpose(0, 1), torch.tensor([3, 0]), torch.tensor([1, 2]))
    expected = before.clone().float()
    expected[:, 1], expected[:, 2] = before[:, 2].float(), before[:, 5].float()
    assert torch.equal(device.float(), expected)


@pytest.mark.parametrize("vocab", [50, 300])
def test_sampling_chooses_what_the_reference_chooses_ties_and_all_filters_included(vocab: int) -> None:
    rows = 24
    logits_RV = (torch.randn(rows, vocab) * 6).round() / 2  # half steps: many logits are equal
    temperature_R, top_k_R = torch.rand(rows) * 1.5 + 0.1, torch.randint(1, 40, (rows,))
    top_p_R, min_p_R = torch.rand(rows) * 0.98 + 0.01, torch.rand(rows) * 0.3
    temperature_R[::7], top_k_R[::3], top_p_R[::4], min_p_R[::2] = 0.0, 0, 1.0, 0.0
    logits_RV[:, 7] = float("-inf")
    seed_R, position_R = torch.randint(-(2**62), 2**62, (rows,)), torch.randint(0, 10_000, (rows,))
    asked = (temperature_R, top_k_R, top_p_R, min_p_R, seed_R, position_R)
    assert torch.equal(gpu_sampling.sample(logits_RV, *asked), reference.sample(logits_RV, *asked))


def test_the_engine_asks_for_what_each_row_wants() -> None:
    each = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5, seed=3),
        SamplingParams(temperature=1.2, top_p=0.6, min_p=0.01, seed=4),
        SamplingParams(temperature=1.0, seed=5, allowed_token_ids=(9, 11)),
    ]
    logits_RV = torch.randn(4, 60) * 3
    best = int(logits_RV[0].argmax())
    rows = [Row(params, 17 + index, banned=(best,) if index == 0 else ()) for index, params in enumerate(each)]
    given = sample_on_gpu(logits_RV.clone(), rows, {})
    logits_RV[0, best] = float("-inf")
    allowed = torch.full((60,), float("-inf"))
    allowed[[9, 11]] = logits_RV[3, [9, 11]]
    logits_RV[3] = allowed
    expected = reference.sample(
        logits_RV,
        torch.tensor([0.0, 0.7, 1.2, 1.0]),
        torch.tensor([0, 5, 0, 0]),
        torch.tensor([1.0, 1.0, 0.6, 1.0]),
        torch.tensor([0.0, 0.0, 0.01, 0.0]),
        torch.tensor([0, 3, 4, 5]),
        torch.arange(17, 21),
    )
    assert torch.equal(given, expected) and int(given[0]) != best and int(given[3]) in (9, 11)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy says so; a GPU does not
def test_logits_that_are_no_numbers_still_give_a_token_of_the_vocabulary() -> None:
    ones = torch.ones(1)
    whole = torch.zeros(1, dtype=torch.int64)
    token = gpu_sampling.sample(torch.full((1, 40), float("nan")), ones, whole, ones, 0 * ones, whole, whole)
    assert 0 <= int(token) < 40
