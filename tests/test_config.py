"""The Serve config file: what is wrong is shown with its line and what to write there."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.config import parse
from deployments.config_file import load
from engine.errors import ConfigError

DEFAULT = Path(__file__).parents[1] / "cluster" / "config.yaml"
GOOD = """\
http_options:
  host: 127.0.0.1
  port: 8123
applications:
- name: sluice
  import_path: deployments.app:build
  args:
    model: smollm2-135m-instruct
    engine:
      dtype: float32
      cache: {num_blocks: 64}
    pools:
    - name: first
    - name: second
      engine:
        cache: {block_size: 32}
  deployments:
  - name: Ingress
  - name: first
    max_ongoing_requests: 10
    user_config:
      policy: {kind: preemption, max_num_seqs: 8}
  - name: second
    user_config:
      policy: {kind: preemption}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    return path


def mistake(file: Path, old: str, new: str) -> str:
    """What `load` says about the good file in which `old` was replaced."""
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        load(file)
    return caught.value.message


def line_of(text: str) -> int:
    return GOOD[: GOOD.index(text)].count("\n") + 1


def test_the_default_file_is_right() -> None:
    config = load(DEFAULT)
    assert [pool.name for pool in config.app.pools] == ["preemption", "retract"]
    assert (config.http_host, config.http_port) == ("127.0.0.1", 8000)


def test_a_good_file_gives_each_pool_its_engine(file: Path) -> None:
    config = load(file)
    first, second = (config.app.engine_config(pool) for pool in config.app.pools)
    assert config.http_port == 8123
    assert (first.cache.block_size, first.cache.num_blocks) == (16, 64)
    assert (second.cache.block_size, second.cache.num_blocks) == (32, 64)
    assert config.app.served_name == "smollm2-135m-instruct"


@pytest.mark.parametrize(
    ("old", "new", "place", "fix"),
    [
        ("http_options:", "http_option:", "http_option is unknown", "http_options:"),
        ("port: 8123", "prot: 8123", "http_options.prot is unknown", "port: 8123"),
        ("dtype: float32", "dtyp: float32", "engine.dtyp is unknown", "dtype: float32"),
        ("dtype: float32", "dtype: float3", "engine.dtype is 'float3'", "dtype: float32"),
        ("num_blocks: 64", "num_blocks: 1", "engine.cache.num_blocks is 1", "num_blocks: 2"),
        ("block_size: 32", "block_size: 33", "pools[1].engine.cache.block_size is 33", "block_size: 16"),
        ("block_size: 32", "block_size: big", "pools[1].engine.cache.block_size is 'big'", "block_size: 16"),
        ("max_num_seqs: 8", "max_num_sequences: 8", "policy.max_num_sequences is unknown", "max_num_seqs: 8"),
        ("max_num_seqs: 8", "max_num_seqs: 0", "policy.max_num_seqs is 0", "max_num_seqs: 1"),
        ("kind: preemption", "kind: premption", "policy.kind is 'premption'", "kind: preemption"),
        ("kind: preemption", "kin: preemption", "policy.kind is missing", "kind: preemption"),
        ("kind: preemption", "kind: retract, chunked_prefill_size: 0", "policy.chunked_prefill_size is 0", ": 1"),
        ("max_ongoing_requests: 10", "max_ongoing_request: 10", "max_ongoing_request is", "max_ongoing_requests: 10"),
        ("max_ongoing_requests: 10", "max_ongoing_requests: ten", "max_ongoing_requests is 'ten'", "a whole number"),
    ],
)
def test_a_mistake_is_shown_with_its_line_and_the_line_to_write(
    file: Path, old: str, new: str, place: str, fix: str
) -> None:
    said = mistake(file, old, new)
    assert f"{file}, line {line_of(old)}: " in said
    assert place in said
    assert fix in said


def test_all_mistakes_are_told_at_once(file: Path) -> None:
    file.write_text(GOOD.replace("float32", "float8").replace("num_blocks", "num_block"))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "engine.dtype is 'float8'" in caught.value.message
    assert "engine.cache.num_block is unknown" in caught.value.message


def test_a_mistake_in_the_shared_engine_fields_is_told_once(file: Path) -> None:
    assert mistake(file, "dtype: float32", "dtype: float3").count("engine.dtype") == 1


def test_a_policy_under_engine_is_sent_to_user_config(file: Path) -> None:
    said = mistake(file, "dtype: float32", "policy: {kind: preemption}")
    assert "engine.policy does not go here but to user_config.policy" in said


def test_policy_limits_that_contradict_each_other_are_told(file: Path) -> None:
    said = mistake(file, "max_num_seqs: 8", "max_num_seqs: 9999")
    assert "max_num_batched_tokens" in said
    assert f"line {line_of('policy: {kind: preemption, max_num_seqs')}" in said


def test_a_pool_without_a_deployment_is_told(file: Path) -> None:
    said = mistake(file, "  - name: second\n    user_config:\n      policy: {kind: preemption}\n", "")
    assert "no entry for the pool 'second'" in said
    assert "- {name: second, user_config: {policy: {kind: preemption}}}" in said


def test_a_deployment_that_is_no_pool_is_told_with_the_close_name(file: Path) -> None:
    said = mistake(file, "- name: first\n    max", "- name: fist\n    max")
    assert "is 'fist', which is no pool of args.pools" in said
    assert "write:   - name: first" in said


def test_two_pools_of_one_name_are_refused(file: Path) -> None:
    assert "args.pools[1].name is 'first', which is taken" in mistake(file, "- name: second", "- name: first")


def test_a_pool_must_say_its_policy(file: Path) -> None:
    said = mistake(file, "    user_config:\n      policy: {kind: preemption}\n", "")
    assert "user_config is missing" in said
    assert "write:   user_config: {policy: {kind: preemption}}" in said


def test_a_key_that_is_set_twice_is_told(file: Path) -> None:
    said = mistake(file, "  port: 8123", "  port: 8123\n  port: 8124")
    assert f"line {line_of('port: 8123') + 1}: port is set twice" in said


def test_what_is_not_yaml_is_told_with_its_line(file: Path) -> None:
    assert f"line {line_of('applications')}: this is not YAML" in mistake(file, "  port: 8123\n", "  port: [8123\n")


@pytest.mark.parametrize("text", ["", "[]", "just words", "applications: []"])
def test_a_file_without_our_application_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match="line 1"):
        load(file)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        load(tmp_path / "nowhere.yaml")


def test_a_gpu_is_reserved_only_for_engines_that_use_one() -> None:
    app = parse(yaml.safe_load(GOOD)["applications"][0]["args"] | {"engine_gpus": 0.5})
    config = app.engine_config(app.pools[0])
    assert app.actor_options(config)["num_gpus"] == 0
    assert app.actor_options(config.model_copy(update={"device": "cuda"}))["num_gpus"] == 0.5


def test_the_builder_refuses_wrong_args_too() -> None:
    args = yaml.safe_load(GOOD)["applications"][0]["args"]
    assert parse(args).model == "smollm2-135m-instruct"
    with pytest.raises(ConfigError, match="dtype"):
        parse(args | {"engine": {"dtype": "float3"}})


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_the_file_it_is_right_or_explained(file: Path, data: st.DataObject) -> None:
    document = yaml.safe_load(GOOD)
    container, key = data.draw(st.sampled_from(_places(document)))
    container[key] = data.draw(JUNK)
    file.write_text(yaml.safe_dump(document, allow_unicode=True))
    try:
        load(file)
    except ConfigError as error:
        assert f"{file}, line " in error.message
