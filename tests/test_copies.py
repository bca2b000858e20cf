"""Copies between the two KV pools: bit for bit what one after the other would give, and in the streams' right order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import new_pool
from engine.contract import Move, Route
from engine.copies import HostCopies, NoHost, PinnedHostCopies, Pool, new_host_pool, runs
from kernels.reference import copy_blocks

DEVICE_BLOCKS, HOST_BLOCKS = 5, 4
UP, DOWN = Route.UP, Route.DOWN


class RecordedStreams:
    """One stream in truth; says in which order the two would be used."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        self.log.append("fork")
        yield
        self.log.append("copied")

    def join(self) -> None:
        self.log.append("join")


def pools(dtype: torch.dtype = torch.float32) -> tuple[Pool, Pool]:
    """3 layers, 2 KV heads, head dim 4, 8 tokens a block; every number different."""
    device = new_pool((3, DEVICE_BLOCKS, 2, 4, 8), dtype, torch.device("cpu"))
    host = new_host_pool(device, HOST_BLOCKS, pinned=False)
    for offset, pool in enumerate((*device, *host)):
        pool.copy_(torch.arange(pool.numel()).reshape(pool.shape) % 1000 + offset / 4)
    return device, host


def one_by_one(device: Pool, host: Pool, moves: Sequence[Move]) -> None:
    for move in moves:
        for device_LN, host_ML in zip(device, host, strict=True):
            for layer in range(3):
                if move.route is DOWN:
                    host_ML[move.target, layer] = device_LN[layer, move.source]
                else:
                    device_LN[layer, move.target] = host_ML[move.source, layer]


def copier(kind: str, device: Pool, host: Pool) -> HostCopies | PinnedHostCopies:
    return (
        HostCopies(device, host) if kind == "plain" else PinnedHostCopies(device, host, RecordedStreams(), copy_blocks)
    )


DOWNS = st.builds(Move, st.just(DOWN), st.integers(0, DEVICE_BLOCKS - 1), st.integers(0, HOST_BLOCKS - 1))
UPS = st.builds(Move, st.just(UP), st.integers(0, HOST_BLOCKS - 1), st.integers(0, DEVICE_BLOCKS - 1))
MOVES = st.lists(st.one_of(DOWNS, UPS), max_size=12)


@pytest.mark.parametrize("kind", ["plain", "pinned"])
@settings(max_examples=60, deadline=None)
@given(moves=MOVES)
def test_any_moves_give_what_one_after_the_other_gives(kind: str, moves: list[Move]) -> None:
    (device, host), (expected_device, expected_host) = pools(), pools()
    copier(kind, device, host).apply(moves)
    one_by_one(expected_device, expected_host, moves)
    for mine, expected in zip((*device, *host), (*expected_device, *expected_host), strict=True):
        assert torch.equal(mine, expected)


@given(MOVES)
def test_a_run_has_one_route_and_writes_no_block_twice(moves: list[Move]) -> None:
    cut = list(runs(moves))
    assert [move for run in cut for move in run] == moves
    for run in cut:
        assert len({move.route for move in run}) == 1
        assert len({move.target for move in run}) == len(run)


def test_moves_that_do_not_touch_are_made_at_once() -> None:
    moves = [Move(DOWN, 1, 0), Move(DOWN, 2, 1), Move(UP, 0, 3), Move(UP, 1, 4), Move(UP, 2, 4)]
    assert [len(run) for run in runs(moves)] == [2, 2, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_block_that_goes_down_and_comes_up_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    device, host = pools(dtype)
    before = [pool[:, 2].clone() for pool in device]
    HostCopies(device, host).apply([Move(DOWN, 2, 3), Move(UP, 3, 1)])
    assert all(torch.equal(pool[:, 1], kept) for pool, kept in zip(device, before, strict=True))


def test_copies_wait_for_the_steps_before_and_the_step_behind_waits_for_them() -> None:
    device, host = pools()
    streams = RecordedStreams()
    PinnedHostCopies(device, host, streams, copy_blocks).apply([Move(DOWN, 1, 0), Move(UP, 1, 2)])
    assert streams.log == ["fork", "copied", "join"]


def test_a_step_without_moves_waits_for_nothing() -> None:
    streams = RecordedStreams()
    PinnedHostCopies(*pools(), streams, copy_blocks).apply([])
    assert streams.log == []


def test_without_a_host_tier_no_move_may_come() -> None:
    NoHost().apply([])
    with pytest.raises(AssertionError, match="no host tier"):
        NoHost().apply([Move(DOWN, 1, 0)])
