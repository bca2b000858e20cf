"""The replay of recorded schedules: what is equal, what is explained by the step itself, and what is neither."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtests.conformance import SCHEDULES, Difference, Replay, main
from loadtests.explanations import Before, Outcome, explain
from tests.record_schedules import BY_HAND, FILE, recorded, scenario, text


def difference(made: dict[str, Any]) -> Difference | None:
    return Replay(SCHEDULES.validate_python([made])[0]).first_difference()


def by_hand(name: str) -> dict[str, Any]:
    return copy.deepcopy(next(made for made in BY_HAND if made["name"] == name))


def saved(folder: Path, *scenarios: dict[str, Any]) -> str:
    file = folder / "schedules.json"
    file.write_text(json.dumps(scenarios))
    return str(file)


@pytest.mark.parametrize("made", [made for made in BY_HAND if not made["name"].startswith("theirs")])
def test_the_policy_does_what_was_worked_out_by_hand(made: dict[str, Any]) -> None:
    assert difference(made) is None


def test_recorded_schedules_change_only_on_purpose() -> None:
    """If this is on purpose: python -m tests.record_schedules."""
    assert FILE.read_text() == text()


def test_the_sample_is_counted_and_nothing_in_it_is_unexplained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(FILE), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {kind: result[kind] for kind in ("scenarios", "equal", "explained", "different")} == {
        "scenarios": 15,
        "equal": 12,
        "explained": 3,
        "different": 0,
    }
    assert [(found["scenario"], found["step"]) for found in result["differences"]] == [
        ("theirs: a self-eviction ends the pass", 2),
        ("theirs: all are evicted in vain", 2),
        ("theirs: a block is found that was never computed", 3),
    ]


@pytest.mark.parametrize(
    ("name", "ours", "reason"),
    [
        ("theirs: a self-eviction ends the pass", {"a": 1, "b": 1}, "x evicts itself.*goes on with b"),
        ("theirs: all are evicted in vain", {"a": 1, "small": 1}, "evicting small makes no room for long"),
        ("theirs: a block is found that was never computed", {"low": 48}, "112 tokens of low.*96 were ever computed"),
    ],
)
def test_a_difference_on_purpose_is_explained_by_its_step(name: str, ours: dict[str, int], reason: str) -> None:
    found = difference(by_hand(name))
    assert found is not None and found.reason is not None
    assert found.ours.scheduled == ours
    assert re.search(reason, found.reason)


@pytest.mark.parametrize("made", [by_hand("the newest is evicted"), recorded(1)], ids=["by hand", "recorded"])
def test_every_tampered_step_is_found_at_its_place_and_unexplained(made: dict[str, Any]) -> None:
    for number in range(len(made["steps"])):
        tampered = copy.deepcopy(made)
        scheduled = tampered["steps"][number]["scheduled"]
        first = next(iter(scheduled))
        scheduled[first] += 1
        found = difference(tampered)
        assert found is not None
        assert (found.step, found.reason) == (number, None)


def test_a_missing_eviction_is_a_difference() -> None:
    made = by_hand("the newest is evicted")
    made["steps"][1]["evicted"] = []
    found = difference(made)
    assert found is not None and (found.step, found.ours.evicted, found.reason) == (1, ["b"], None)


def test_a_schedule_that_ends_too_early_is_a_difference() -> None:
    made = by_hand("the newest is evicted")
    made["steps"].pop()
    found = difference(made)
    assert found is not None
    assert (found.step, found.ours.scheduled, found.reason) == (6, {"b": 1}, None)


def test_a_schedule_that_ends_too_late_is_a_difference() -> None:
    made = by_hand("the newest is evicted")
    made["steps"].append({"scheduled": {"b": 1}, "evicted": []})
    found = difference(made)
    assert found is not None
    assert (found.step, found.ours.scheduled, found.reason) == (7, {}, None)


BEFORE = Before(
    block_size=16,
    budget=64,
    running=["a", "x", "b"],
    lengths={"a": 20, "x": 33, "b": 20},
    since_admission={},
    planned={},
    reached={},
)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(Outcome({"a": 1}, []), Outcome({"a": 1, "b": 1}, []), id="nobody was evicted"),
        pytest.param(Outcome({"a": 1}, ["b"]), Outcome({"a": 1, "x": 1}, ["b"]), id="x does not stand behind b"),
        pytest.param(Outcome({"a": 1}, ["x"]), Outcome({"a": 2, "b": 1}, ["x"]), id="a differs before x"),
        pytest.param(Outcome({"a": 1}, ["x"]), Outcome({"a": 1, "b": 1}, []), id="ours does not evict x"),
        pytest.param(Outcome({"a": 64}, ["x"]), Outcome({"a": 64, "b": 1}, ["x"]), id="their budget was spent"),
        pytest.param(Outcome({"a": 1, "b": 1}, ["x"]), Outcome({"a": 1, "b": 2}, ["x"]), id="their pass went on"),
    ],
)
def test_what_only_looks_like_the_end_of_a_pass_is_not_explained(theirs: Outcome, ours: Outcome) -> None:
    assert explain(BEFORE, Outcome({"a": 1}, ["x"]), Outcome({"a": 1, "b": 1}, ["x"]))
    assert explain(BEFORE, theirs, ours) is None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        pytest.param(Outcome({"a": 1}, ["b"]), Outcome({"a": 1, "b": 1}, []), id="nobody asked"),
        pytest.param(Outcome({"a": 1}, ["b", "x"]), Outcome({"a": 1, "b": 1, "x": 1}, []), id="ours has room for x"),
        pytest.param(Outcome({"a": 1, "x": 1}, ["b", "x"]), Outcome({"a": 1}, []), id="theirs has room for x"),
        pytest.param(Outcome({"a": 1}, ["b", "x"]), Outcome({"a": 64}, []), id="our budget was spent"),
        pytest.param(Outcome({"a": 1}, ["b", "new"]), Outcome({"a": 1}, []), id="who asked did not run"),
    ],
)
def test_what_only_looks_like_an_eviction_in_vain_is_not_explained(theirs: Outcome, ours: Outcome) -> None:
    assert explain(BEFORE, Outcome({"a": 1}, ["b", "x"]), Outcome({"a": 1, "b": 1}, []))
    assert explain(BEFORE, theirs, ours) is None


@pytest.mark.parametrize(
    ("planned", "reached", "theirs", "ours"),
    [
        pytest.param(128, 112, 32, 48, id="all that they found was computed"),
        pytest.param(96, 96, 32, 48, id="no chunk was undone"),
        pytest.param(128, 96, 31, 48, id="not whole blocks"),
        pytest.param(128, 96, 48, 32, id="ours finds more"),
    ],
)
def test_what_only_looks_like_an_uncomputed_block_is_not_explained(
    planned: int, reached: int, theirs: int, ours: int
) -> None:
    before = replace(BEFORE, lengths={"a": 144}, planned={"a": 128}, reached={"a": 96})
    assert explain(before, Outcome({"a": 32}, []), Outcome({"a": 48}, []))
    before = replace(before, planned={"a": planned}, reached={"a": reached})
    assert explain(before, Outcome({"a": theirs}, []), Outcome({"a": ours}, [])) is None


def test_an_unexplained_difference_is_printed_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = by_hand("long prompts share")
    made["steps"][1]["scheduled"]["b"] = 399
    assert main([saved(tmp_path, made, by_hand("one budget for all"))]) == 1
    shown = capsys.readouterr().out
    assert "DIFFERENT, step 1: theirs ran {'a': 400, 'b': 399, 'c': 224}" in shown
    assert shown.endswith("2 scenarios: 1 equal, 0 explained, 1 different\n")


@pytest.mark.parametrize("content", ["", "{}", '[{"name": "x"}]', json.dumps([scenario("x", [], [], order="lifo")])])
def test_a_file_of_another_kind_is_refused_by_name(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main([str(file)])
    assert stopped.value.code == 2
    assert f"file {file} holds no recorded schedules" in capsys.readouterr().err
