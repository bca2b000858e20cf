"""Block copies between the KV pool on the device and the host tier: what the cache owes before a step runs.

Shapes: L layers, N blocks on the device, M blocks in host memory, C blocks copied at once, G KV heads, D head dim,
B tokens per block. The host tier keeps a block's layers together: [M, L, …], so that a block is one stretch of memory.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from engine.contract import Move, Route
from engine.transfer import on

Pool = tuple[Tensor, Tensor]


class BlockCopies(Protocol):
    def apply(self, moves: Sequence[Move]) -> None:
        """Make these copies, as if one after the other, before whatever is submitted to the device next."""
        ...


class NoHost:
    """There is no second pool."""

    def apply(self, moves: Sequence[Move]) -> None:
        assert not moves, "there is no host tier to copy to or from"


class HostCopies:
    """Between two pools in ordinary memory: [L, N, …] and [M, L, …]."""

    def __init__(self, device: Pool, host: Pool) -> None:
        self._pairs = list(zip(device, host, strict=True))

    def apply(self, moves: Sequence[Move]) -> None:
        for run in runs(moves):
            source_C, target_C = indices(run, torch.device("cpu"))
            for device, host in self._pairs:
                for layer in range(len(device)):  # one at a time, so that what is gathered stays in the cache
                    if run[0].route is Route.DOWN:
                        host[target_C, layer] = device[layer][source_C]
                    else:
                        device[layer][target_C] = host[source_C, layer]


class Streams(Protocol):
    """The order between the stream of the steps and one for copies."""

    def copying(self) -> AbstractContextManager[object]:
        """Within it, work goes to the copies' stream, behind all that the steps' stream was given so far."""
        ...

    def join(self) -> None:
        """What the steps' stream is given from now on waits for the copies."""
        ...


class CudaStreams:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._side)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._side)


Copy = Callable[[Tensor, Tensor, Tensor, Tensor], None]


class PinnedHostCopies:
    """Between a device's memory and pinned host memory, on a stream of its own: the host never waits.

    `copy` takes source and target pool as [blocks, layers, …] and the blocks of each [C]. A GPU reads and writes pinned
    memory where it is, so that one launch makes all copies of a run.
    """

    def __init__(self, device: Pool, host: Pool, streams: Streams, copy: Copy) -> None:
        self._pairs = [(pool.transpose(0, 1), host_pool) for pool, host_pool in zip(device, host, strict=True)]
        self._streams = streams
        self._copy = copy

    def apply(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        with self._streams.copying():
            for run in runs(moves):
                for device, host in self._pairs:
                    pools = (device, host) if run[0].route is Route.DOWN else (host, device)
                    self._copy(*pools, *indices(run, device.device))
        self._streams.join()


def indices(run: Sequence[Move], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sources and targets of a run, each [C]."""
    sources, targets = on(device, [[move.source for move in run], [move.target for move in run]], torch.int64)
    return sources, targets


def runs(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """The moves in order, cut so that those of one run may be made at once: one route, and no block written twice."""
    run: list[Move] = []
    written: set[int] = set()
    for move in moves:
        if run and (move.route is not run[0].route or move.target in written):
            yield run
            run, written = [], set()
        run.append(move)
        written.add(move.target)
    if run:
        yield run


def new_host_pool(device: Pool, num_blocks: int, *, pinned: bool) -> Pool:
    """K and V for `num_blocks` blocks of the shape of the device's, a block's layers together."""
    k, v = (
        torch.zeros(num_blocks, layers, *block, dtype=pool.dtype, pin_memory=pinned)
        for pool in device
        for layers, _, *block in [pool.shape]
    )
    return k, v
