"""The cost of scheduling: that what is measured is what it says, on small numbers. No time is judged here."""

import json

import pytest

from loadtests import scheduler_cost
from loadtests.scheduler_cost import BLOCK, POLICIES, STEPS, OurDecodes, Row, by, linearity, ratios, step


@pytest.mark.parametrize("policy", POLICIES)
def test_every_round_gives_every_request_a_token_a_step(policy: str) -> None:
    decodes = OurDecodes(policy, running=20, rounds=2)
    running = list(decodes._scheduler._running)
    before = [len(request.tokens) for request in running]
    for _ in range(3):
        decodes.round(STEPS)
    assert len(running) == 20
    assert [len(request.tokens) for request in running] == [length + 3 * STEPS for length in before]
    assert STEPS % BLOCK == 0  # block borders in their true proportion


def test_a_step_that_does_not_serve_everybody_is_no_measurement() -> None:
    decodes = OurDecodes("preemption", running=4, rounds=1)
    decodes._scheduler.abort("r0")
    with pytest.raises(AssertionError, match="not every request"):
        step(decodes._scheduler, expected=4)


def test_json_has_a_row_for_each_policy_and_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_cost, "LONG_PROMPT", 64)
    scheduler_cost.main(["--json", "--running", "2,3", "--rounds", "2", "--policies", "preemption,retract"])
    rows = json.loads(capsys.readouterr().out)
    assert [(one["policy"], one["case"], one["running"]) for one in rows] == [
        *((policy, "decode", running) for running in (2, 3) for policy in ("preemption", "retract")),
        *((policy, case, 16) for policy in ("preemption", "retract") for case in ("prefill", "prefill, cached")),
    ]
    for one in rows:
        assert one["min"] <= one["us_per_step"] <= one["max"] and one["rounds"] == 2
        steps = 1 if one["case"] == "decode" else one["running"]
        assert one["us_per_request"] == pytest.approx(one["us_per_step"] * steps / one["running"], rel=0.01, abs=0.01)


def test_an_unknown_policy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        scheduler_cost.main(["--policies", "preemption,fair"])
    assert "fair is not known; choose among preemption, retract, static" in capsys.readouterr().err


def row(engine: str, running: int, us_per_step: float) -> Row:
    return Row(engine, "p", "decode", running, us_per_step, us_per_step / running, 0.0, 0.0, 0.0, 0.0, 1)


def test_growth_and_ratios_compare_like_with_like() -> None:
    rows = [row("sluice", 10, 10.0), row("vllm", 10, 50.0), row("sluice", 40, 80.0), row("vllm", 40, 400.0)]
    assert list(linearity(rows)) == [
        "sluice p: a request among 40 costs 2.00 times one among 10",
        "vllm p: a request among 40 costs 2.00 times one among 10",
    ]
    assert [line.split("takes ")[1].split()[0] for line in ratios(rows)] == ["5.0", "5.0"]
    assert set(by(rows, lambda one: one.running)) == {10, 40}
