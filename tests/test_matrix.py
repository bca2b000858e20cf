"""Every pair of settings of the scheduler, together, changes no token and no log probability. See tests/matrix.py."""

from dataclasses import fields, replace

import pytest

from engine import Completion
from engine.request import FinishReason, Logprob
from tests.matrix import Combination, Matrix, Outcome, differing, everything, pairs_of, pairwise, tiny_model, total

CHOSEN = pairwise()


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize(
    "combination", CHOSEN, ids=lambda one: ", ".join(getattr(one, field.name) for field in fields(one))
)
def test_a_request_gives_what_it_gives_alone(matrix: Matrix, combination: Combination) -> None:
    outcome = matrix.run(combination)
    assert outcome.differing == 0
    assert outcome.requests == 3 and outcome.tokens > 60


def test_in_the_chosen_combinations_every_pair_of_settings_meets() -> None:
    wanted = {pair for combination in everything() for pair in pairs_of(combination)}
    assert {pair for combination in CHOSEN for pair in pairs_of(combination)} == wanted
    assert len(CHOSEN) < 30 and len(list(everything())) == 1728


def test_whatever_differs_is_counted() -> None:
    one = Completion([1, 2], [Logprob(1, -0.5), Logprob(2, -1.0)], None, FinishReason.LENGTH)
    assert differing(one, one) == 0
    assert differing(replace(one, tokens=[1, 3]), one) == 1
    assert differing(replace(one, logprobs=[Logprob(1, -0.5000001), Logprob(2, -1.0)]), one) == 1
    assert differing(replace(one, tokens=[1], logprobs=one.logprobs[:1]), one) == 1
    assert differing(replace(one, finish_reason=FinishReason.STOP), one) == 1
    assert differing(replace(one, prompt_logprobs=[None]), one) == 1


def test_the_last_line_adds_everything_up() -> None:
    assert total([Outcome(3, 10, 0), Outcome(2, 5, 1)]) == "combinations=2 requests=5 tokens=15 differing=1"
