"""Compiled CPU kernels against the reference in plain torch, and their independence of the batch, bit by bit."""

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from kernels import reference, tile_int8
from kernels.attention_batch import AttentionBatch, AttentionSpec
from kernels.backend import TorchBackend, WeightKind, choose_backend
from kernels.cpu_backend import CpuBackend
from kernels.gpu_backend import TritonBackend

CPU = CpuBackend(workers=2)
SHAPES = [(9, 3, 64, 16), (8, 8, 64, 16), (8, 1, 128, 32), (14, 2, 80, 16), (5, 1, 96, 48)]
SPECS = [AttentionSpec(0.125), AttentionSpec(0.1, window=20), AttentionSpec(0.1, soft_cap=5.0)]
CHUNKS = [(1, 1), (1, 16), (1, 17), (5, 40), (33, 33), (7, 100)]


def make_batch(chunks: list[tuple[int, int]], block_size: int, num_blocks: int) -> AttentionBatch:
    """Chunks as (queries, context), their blocks scattered over the pool."""
    starts = [0]
    for queries, _ in chunks:
        starts.append(starts[-1] + queries)
    scattered = (torch.randperm(num_blocks - 1) + 1).tolist()
    most = max(-(-context // block_size) for _, context in chunks)
    tables, slots = [], []
    for queries, context in chunks:
        blocks = [scattered.pop() for _ in range(-(-context // block_size))]
        tables.append(blocks + [0] * (most - len(blocks)))
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(context - queries, context)]
    contexts = [context for _, context in chunks]
    return AttentionBatch(
        starts,
        contexts,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor(slots, dtype=torch.int32),
    )


def make_pool(groups: int, dim: int, block_size: int, num_blocks: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(num_blocks, groups, dim, block_size), torch.randn(num_blocks, groups, block_size, dim)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("spec", SPECS)
def test_paged_attention_equals_the_reference(shape: tuple[int, int, int, int], spec: AttentionSpec) -> None:
    heads, groups, dim, size = shape
    batch = make_batch(CHUNKS, size, 64)
    pool = make_pool(groups, dim, size)
    q_THD = torch.randn(batch.query_starts[-1], heads, dim)
    torch.testing.assert_close(
        CPU.attend(q_THD, *pool, batch, spec), reference.paged_attention(q_THD, *pool, batch, spec)
    )


def test_the_reference_equals_torchs_own_attention_on_a_contiguous_context() -> None:
    batch = make_batch([(24, 24)], 16, 4)
    k_TGD, v_TGD, q_THD = torch.randn(24, 2, 32), torch.randn(24, 2, 32), torch.randn(24, 4, 32)
    pool = make_pool(2, 32, 16, 4)
    reference.store_kv(k_TGD, v_TGD, *pool, batch)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None],
        k_TGD.transpose(0, 1)[None],
        v_TGD.transpose(0, 1)[None],
        is_causal=True,
        scale=0.2,
        enable_gqa=True,
    )[0].transpose(0, 1)
    torch.testing.assert_close(reference.paged_attention(q_THD, *pool, batch, AttentionSpec(0.2)), expected)


@pytest.mark.parametrize("spec", SPECS)
def test_attention_of_a_token_does_not_depend_on_its_chunk_or_its_neighbours(spec: AttentionSpec) -> None:
    whole = make_batch([(50, 50)], 16, 64)
    pool = make_pool(3, 64, 16)
    q_THD = torch.randn(50, 9, 64)
    together = CPU.attend(q_THD, *pool, whole, spec)
    for first, last in [(0, 1), (1, 8), (8, 49), (49, 50)]:
        part = AttentionBatch(
            [0, last - first],
            [last],
            torch.tensor([0, last - first], dtype=torch.int32),
            torch.tensor([last], dtype=torch.int32),
            whole.block_tables_RM[:, : -(-last // 16)].contiguous(),
            whole.slots_T[first:last],
        )
        assert torch.equal(CPU.attend(q_THD[first:last], *pool, part, spec), together[first:last])


def test_hidden_positions_do_not_leak_into_the_result() -> None:
    """What lies in a block behind the last position, or in the padding block 0, changes no bit."""
    batch = make_batch([(1, 17), (1, 40)], 16, 8)
    k_NGDB, v_NGBD = make_pool(3, 64, 16, 8)
    q_THD = torch.randn(2, 9, 64)
    before = CPU.attend(q_THD, k_NGDB, v_NGBD, batch, SPECS[0])
    last = int(batch.block_tables_RM[0, 1])
    k_NGDB[last, :, :, 1:], v_NGBD[last, :, 1:] = 1e4, -1e4
    k_NGDB[0], v_NGBD[0] = 1e4, 1e4
    assert torch.equal(CPU.attend(q_THD, k_NGDB, v_NGBD, batch, SPECS[0]), before)


def test_stored_keys_and_values_land_where_the_slots_say() -> None:
    batch = make_batch([(5, 20), (1, 3)], 16, 8)
    k_TGD, v_TGD = torch.randn(6, 3, 64), torch.randn(6, 3, 64)
    ours, theirs = make_pool(3, 64, 16, 8), make_pool(3, 64, 16, 8)
    for left, right in zip(ours, theirs, strict=True):
        right.copy_(left)
    CPU.store_kv(k_TGD, v_TGD, *ours, batch)
    reference.store_kv(k_TGD, v_TGD, *theirs, batch)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (1536, 576), (64, 200), (33, 17)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_float64_and_does_not_depend_on_the_rows_beside(inputs: int, outputs: int, bias: bool) -> None:
    weight, bias_N = torch.randn(outputs, inputs), torch.randn(outputs) if bias else None
    linear = CPU.linear(weight, bias_N)
    x_MK = torch.randn(200, inputs)
    all_rows = linear(x_MK)
    exact = torch.nn.functional.linear(x_MK.double(), weight.double(), None if bias_N is None else bias_N.double())
    torch.testing.assert_close(all_rows.double(), exact, atol=1e-4, rtol=1e-5)
    for rows in (1, 2, 3, 5, 6, 7, 31, 97, 199):
        assert torch.equal(linear(x_MK[:rows]), all_rows[:rows])
        assert torch.equal(linear(x_MK[-rows:]), all_rows[-rows:])


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (64, 200), (33, 17)])
def test_half_precision_weights_are_read_exactly_and_summed_in_float32(inputs: int, outputs: int) -> None:
    """The same bits as float32 weights that were rounded to float16 before."""
    weight, bias_N, x_MK = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(40, inputs)
    rounded = CPU.linear(weight.half().float(), bias_N)
    half = CpuBackend(2, "float16").linear(weight, bias_N)
    assert torch.equal(half(x_MK), rounded(x_MK))
    assert torch.equal(half(x_MK[3:4])[0], half(x_MK)[3])


def test_weights_that_half_precision_cannot_hold_are_refused() -> None:
    with pytest.raises(OverflowError, match="too large"):
        CpuBackend(1, "float16").linear(torch.full((16, 16), 1e5))


def test_norm_and_rotation_equal_plain_torch_and_do_not_depend_on_the_rows_beside() -> None:
    plain = TorchBackend()
    x, weight = torch.randn(40, 9, 64), torch.randn(64)
    norm = CPU.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(norm, plain.rms_norm(x, weight, 1e-5))
    assert torch.equal(CPU.rms_norm(x[7:8], weight, 1e-5), norm[7:8])
    angle_TF = torch.randn(40, 32)
    mine, theirs = [(norm.clone(), norm[:, :3].clone()) for _ in range(2)]
    CPU.rotate(*mine, angle_TF.cos(), angle_TF.sin())
    plain.rotate(*theirs, angle_TF.cos(), angle_TF.sin())
    torch.testing.assert_close(mine, theirs)
    together = torch.cat((norm, norm[:, :3]), dim=1)  # as one linear gives them
    CPU.rotate(together[:, :9], together[:, 9:], angle_TF.cos(), angle_TF.sin())
    assert torch.equal(together, torch.cat(mine, dim=1))


def test_sizes_that_fill_no_tile_are_left_to_plain_torch() -> None:
    x, weight = torch.randn(5, 40), torch.randn(40)
    torch.testing.assert_close(CPU.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(CPU.silu_mul(x[:, :36]), reference.silu_mul(x[:, :36]))
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(CPU.add_norm(mine, x, weight, 1e-5), reference.add_norm(theirs, x, weight, 1e-5))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_what_is_fused_equals_its_parts_and_does_not_depend_on_the_rows_beside(rows: int) -> None:
    x, delta, weight = torch.randn(40, 576), torch.randn(40, 576), torch.randn(576)
    gate_up = torch.randn(40, 2 * 176) * 40  # far enough for exp to overflow
    added = x.clone()
    norm, activated = CPU.add_norm(added, delta, weight, 1e-5), CPU.silu_mul(gate_up)
    assert torch.equal(added, x + delta)
    torch.testing.assert_close(norm, torch.nn.functional.rms_norm(x + delta, (576,), weight, 1e-5))
    torch.testing.assert_close(activated, torch.nn.functional.silu(gate_up[:, :176]) * gate_up[:, 176:])
    assert torch.equal(CPU.add_norm(x[:rows].clone(), delta[:rows], weight, 1e-5), norm[:rows])
    assert torch.equal(CPU.silu_mul(gate_up[:rows]), activated[:rows])


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 1536), (1536, 576), (64, 200), (32, 17), (33, 17)])
def test_int8_weights_err_as_eight_bits_do_and_rows_do_not_depend_on_those_beside(inputs: int, outputs: int) -> None:
    """All that shows is the rounding of the weights: beside that, int16 activations are as good as exact."""
    weight, bias_N, x_MK = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(200, inputs)
    x_MK[::3] *= 100.0  # rows of very unequal size
    x_MK[5] = 0.0
    linear = CpuBackend(2, "int8").linear(weight, bias_N)
    given = linear(x_MK)
    scale_N1 = weight.abs().amax(1, keepdim=True) / 127
    rounded = weight.double() if inputs % 2 else (weight / scale_N1).round().double() * scale_N1
    exact = x_MK.double() @ rounded.T + bias_N
    error_M = (given - exact).abs().amax(1) / exact.abs().amax(1)
    assert error_M.max() < 1e-3
    for rows in (1, 2, 3, 5, 6, 7, 8, 9, 31, 97, 199):
        assert torch.equal(linear(x_MK[:rows]), given[:rows])
        assert torch.equal(linear(x_MK[-rows:]), given[-rows:])


@pytest.mark.parametrize("weights", ["float32", "float16", "int8"])
@pytest.mark.parametrize("outputs", [176, 40])
def test_a_gated_linear_is_the_activation_of_two_linears_bit_for_bit(weights: WeightKind, outputs: int) -> None:
    backend = CpuBackend(2, weights)
    gate, up, x_MK = torch.randn(outputs, 96), torch.randn(outputs, 96), torch.randn(200, 96) * 3
    apart = torch.cat((backend.linear(gate)(x_MK), backend.linear(up)(x_MK)), dim=1)
    gated = backend.gated_linear(gate, up)
    assert torch.equal(gated(x_MK), backend.silu_mul(apart))
    assert torch.equal(gated(x_MK[7:8])[0], gated(x_MK)[7])
    plain = TorchBackend().gated_linear(gate, up)(x_MK)
    assert (gated(x_MK) - plain).abs().max() < 0.02 * plain.abs().max()  # as near as eight bits are


@pytest.mark.parametrize("weights", ["float16", "int8"])
def test_memory_that_a_kernel_works_in_is_its_own_until_it_is_done(weights: WeightKind) -> None:
    """At the default model's sizes, for many numbers of rows: an array that is let go too early is soon another's."""
    backend = CpuBackend(2, weights)
    gate, up, x_MK = torch.randn(1536, 576), torch.randn(1536, 576), torch.randn(40, 576)
    gated, linears = backend.gated_linear(gate, up), (backend.linear(gate), backend.linear(up))
    apart = backend.silu_mul(torch.cat([linear(x_MK) for linear in linears], dim=1))
    for rows in range(1, 41):
        assert torch.equal(gated(x_MK[:rows]), apart[:rows])


def test_int8_sums_are_the_same_without_the_instruction_of_one_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same exact integers from plain vector operations, as other machines have them."""
    monkeypatch.setattr(tile_int8, "_has_avx2", lambda: False)
    tile = tile_int8.multiply_int8(3)

    @njit  # type: ignore[untyped-decorator]
    def run(a: int, b: int, c: int, scale: int, bias: int) -> None:
        tile(a, 20, b, 10, c, 16, scale, scale, bias)

    rng = np.random.default_rng(0)
    a = rng.integers(-9000, 9000, (3, 20), np.int16)
    b = rng.integers(-127, 127, (10, 16, 2), np.int8)
    c, scale, bias = np.empty((3, 16), np.float32), np.ones(16, np.float32), np.zeros(16, np.float32)
    run(a.ctypes.data, b.ctypes.data, c.ctypes.data, scale.ctypes.data, bias.ctypes.data)
    exact = a.astype(np.int64) @ b.transpose(0, 2, 1).reshape(20, 16).astype(np.int64)
    assert np.array_equal(c, exact.astype(np.float32))


@pytest.mark.parametrize("spec", SPECS)
def test_half_precision_kv_is_attended_as_if_it_had_been_rounded_before(spec: AttentionSpec) -> None:
    batch = make_batch(CHUNKS, 16, 64)
    k_NGDB, v_NGBD = (pool.half() for pool in make_pool(3, 64, 16))
    k_TGD, v_TGD = (torch.randn(batch.query_starts[-1], 3, 64) for _ in range(2))
    k_TGD[0, 0, 0] = 1e6  # more than it can hold
    expected = k_NGDB.clone(), v_NGBD.clone()
    reference.store_kv(k_TGD, v_TGD, *expected, batch)
    CPU.store_kv(k_TGD, v_TGD, k_NGDB, v_NGBD, batch)
    assert torch.equal(k_NGDB, expected[0]) and torch.equal(v_NGBD, expected[1])
    q_THD = torch.randn(batch.query_starts[-1], 9, 64)
    given = CPU.attend(q_THD, k_NGDB, v_NGBD, batch, spec)
    assert torch.equal(given, CPU.attend(q_THD, k_NGDB.float(), v_NGBD.float(), batch, spec))


def test_the_compiled_kernels_are_chosen_only_where_they_are_right() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert isinstance(choose_backend(cpu, torch.float32, 64, 1), CpuBackend)
    assert isinstance(choose_backend(cpu, torch.bfloat16, 64, 1), TorchBackend)
    assert isinstance(choose_backend(cpu, torch.float32, 40, 1), TorchBackend)
    assert isinstance(choose_backend(gpu, torch.float32, 64, 1), TritonBackend)
    assert torch.float8_e4m3fn not in choose_backend(gpu, torch.bfloat16, 64, 1).kv_dtypes
    assert torch.float8_e4m3fn in choose_backend(gpu, torch.bfloat16, 64, 1, eight_bits=True).kv_dtypes
