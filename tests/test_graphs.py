"""Decode steps from recorded graphs: whatever ran before at the same places, each step gives what it gives unrecorded.

The recorder here calls the model anew at the graph's own places in memory: that is what a replay does.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import Engine, EngineConfig, SamplingParams
from engine.attention import PagedAttention, new_pool
from engine.build import build_core
from engine.config import CacheConfig
from engine.contract import Chunk
from engine.graphs import GraphedModel, Longest, sizes_up_to
from engine.inputs import InputBuilder
from engine.model import Decoder, Loader
from engine.model_config import ModelConfig, read_config
from engine.request import Request
from engine.weights import DummySource
from kernels.cpu_backend import CpuBackend
from tests.matrix import tiny_model

BLOCKS, BLOCK = 40, 16


class Recorder:
    """Counts recordings and replays."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return run()

        return replay


class Bench:
    """The same weights and requests twice: with graphs, and without."""

    def __init__(self, folder: Path) -> None:
        config: ModelConfig = read_config(folder, lambda path: {})
        self.recorder = Recorder()
        backend = CpuBackend(1)
        self.plain = Decoder(Loader(config, DummySource(dtype=torch.float32, device=torch.device("cpu")), backend), 256)
        shape = (config.layers, BLOCKS, config.kv_heads, config.head_dim, BLOCK)
        pools = [new_pool(shape, torch.float32, torch.device("cpu")) for _ in range(2)]
        self.attends = [PagedAttention(*pool, backend) for pool in pools]
        self.graphed = GraphedModel(self.plain, self.attends[1], self.recorder, [1, 2, 4, 8], Longest(8, 128))
        self.vocab = config.vocab_size
        cpu = torch.device("cpu")
        self.inputs = InputBuilder(8, 8, BLOCK, cpu), InputBuilder(8, 8, BLOCK, cpu, self.graphed.padding)

    @torch.inference_mode()
    def run(self, chunks: list[Chunk], rows: list[int]) -> tuple[Tensor, Tensor]:
        (tokens, (rows_R,)), (padded, (padded_R,)) = (inputs.build(chunks, rows) for inputs in self.inputs)
        return (
            self.plain.forward(tokens, rows_R, self.attends[0]),
            self.graphed.forward(padded, padded_R, self.attends[1]),
        )


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tiny_model(tmp_path))


def test_replayed_steps_equal_plain_ones_whatever_ran_at_the_same_places_before(bench: Bench) -> None:
    rng = random.Random(0)
    requests = [Request(f"r{i}", [rng.randrange(bench.vocab) for _ in range(90)], 90) for i in range(8)]
    free = list(range(1, BLOCKS))
    for request in requests:
        request.blocks = []
    done = dict.fromkeys(requests, 0)
    for step in range(40):
        running = rng.sample(requests, rng.randint(1, 8))
        lengths = [rng.choice((1, 1, 3)) if step % 5 == 0 else 1 for _ in running]
        chunks = []
        for request, length in zip(running, lengths, strict=True):
            while len(request.blocks) * BLOCK < done[request] + length:
                request.blocks.append(free.pop())
            chunks.append(Chunk(request, done[request], length, samples=True, life=0))
            done[request] += length
        ends = [sum(lengths[: index + 1]) - 1 for index in range(len(lengths))]
        plain, replayed = bench.run(chunks, rng.sample(ends, rng.randint(1, len(ends))))
        assert torch.equal(plain, replayed)
    assert bench.recorder.recorded == 4 and bench.recorder.replayed >= 32
    first, second = (attend._k_LNGDB for attend in bench.attends)
    assert torch.equal(first[:, 1:], second[:, 1:]), "what fills a step up wrote to blocks that belong to requests"


def test_steps_are_filled_up_to_the_next_size_that_was_recorded(bench: Bench) -> None:
    assert [bench.graphed.padding(count) for count in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 9]


@pytest.mark.parametrize("most", [1, 2, 5, 8, 64, 100, 256, 1000])
def test_sizes_end_at_the_most_and_waste_little(most: int) -> None:
    sizes = sizes_up_to(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    for requests in range(33, most + 1):
        size = next(size for size in sizes if size >= requests)
        assert size - requests < size / 5


def test_an_engine_whose_steps_are_filled_up_gives_the_same_tokens(tmp_path: Path) -> None:
    """Padding alone, without graphs, through scheduler and runner: eight requests that end at different times."""
    config = EngineConfig(model=str(tiny_model(tmp_path)), cache=CacheConfig(num_blocks=60))
    plain, padded = Engine(config), build_core(config, clock=lambda: 0.0)
    padded._executor.inputs._padding = lambda requests: -(-requests // 4) * 4  # type: ignore[attr-defined]
    prompts = [[3 + i, 5, 7, 11] * (1 + i % 3) for i in range(7)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(7)]
    expected, given = plain.generate(prompts, params), Engine(config, padded).generate(prompts, params)
    assert [one.tokens for one in given] == [one.tokens for one in expected]
