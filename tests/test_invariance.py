"""The check at start: it finds a model whose rows depend on the batch, and passes ours."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.build import build_core
from engine.config import CacheConfig, EngineConfig
from engine.errors import ConfigError
from engine.inputs import InputBuilder
from engine.invariance import CHECKS, LENGTH, Probe, is_invariant, needed_blocks
from engine.model import Tokens
from kernels.backend import TorchBackend
from tests.matrix import VOCAB, tiny_model

NOTHING: Any = None


class Peculiar:
    """Logits are a function of a row's own token and position, plus what `fault` makes of the batch."""

    def __init__(self, fault: Callable[[Tokens], float]) -> None:
        self._fault = fault
        self.highest_block = 0

    def forward(self, tokens: Tokens, rows_R: Tensor, attend: Any) -> Tensor:
        self.highest_block = max(self.highest_block, int(tokens.batch.block_tables_RM.max()))
        own_R = tokens.id_T[rows_R] * 1000 + tokens.position_T[rows_R] + self._fault(tokens)
        return own_R[:, None] * torch.arange(VOCAB)[None]


FAULTS: dict[str, Callable[[Tokens], float]] = {
    "a single row": lambda tokens: len(tokens.id_T) == 1,
    "few rows": lambda tokens: len(tokens.id_T) < 4,
    "several chunks": lambda tokens: len(tokens.batch.query_starts) > 2,
    "a prompt in one piece": lambda tokens: len(tokens.id_T) == LENGTH,
}


def holds(model: Peculiar) -> bool:
    return is_invariant(Probe(model, NOTHING, InputBuilder(4, 8, 16, torch.device("cpu"))), VOCAB, 16)


def test_a_model_whose_rows_are_their_own_passes_and_its_blocks_are_those_it_needs() -> None:
    model = Peculiar(lambda tokens: 0.0)
    assert holds(model)
    assert model.highest_block == needed_blocks(16)


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_that_depends_on_the_batch_is_found(name: str) -> None:
    assert not holds(Peculiar(FAULTS[name]))


def test_require_refuses_and_check_warns_and_off_does_not_look(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"batch_invariant is require.*Write batch_invariant: check"):
        CHECKS["require"](lambda: False)
    CHECKS["require"](lambda: True)
    with caplog.at_level(logging.WARNING):
        CHECKS["check"](lambda: False)
    assert "Results depend on the batch" in caplog.text

    def never() -> bool:
        raise AssertionError("off does not look")

    CHECKS["off"](never)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"cache": {"num_blocks": 40, "block_size": 32}}])
def test_our_kernels_pass(tmp_path: Path, options: dict[str, Any]) -> None:
    fields = {"model": str(tiny_model(tmp_path)), "batch_invariant": "require", "cache": {"num_blocks": 40}, **options}
    build_core(EngineConfig.model_validate(fields), lambda: 0.0)


def test_an_engine_without_room_for_the_check_starts_all_the_same(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tiny_model(tmp_path)), max_model_len=32, cache=CacheConfig(num_blocks=3))
    assert build_core(config, lambda: 0.0).limits.max_model_len == 32


@pytest.mark.parametrize("rows", range(1, 14))
def test_padded_linears_give_a_row_the_same_among_any_number(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, 96, generator=generator) for size in (160, 64))
    linear = TorchBackend(row_multiple=4).linear(weight)
    assert torch.equal(linear(x[:rows]), linear(x)[:rows])
