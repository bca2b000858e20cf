"""Weight sources: what is asked for comes out exactly or an error names file and tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ConfigError
from engine.weights import DummySource, SafetensorsSource, WeightSource

CPU = torch.device("cpu")
TENSORS = {f"layer.{i}.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) + i / 3 for i in range(4)}


def source(folder: Path, dtype: torch.dtype = torch.float32) -> SafetensorsSource:
    return SafetensorsSource(folder, dtype=dtype, device=CPU)


def dummy(**options: Any) -> DummySource:
    return DummySource(**{"dtype": torch.float32, "device": CPU, **options})


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files of two tensors each, and their index."""
    names = list(TENSORS)
    placed = {name: f"model-0000{1 + i // 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: TENSORS[name] for name in names if placed[name] == file}, tmp_path / file)
    write_index(tmp_path, placed)
    return tmp_path


def write_index(folder: Path, placed: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def refusal(folder: Path, name: str = "layer.0.weight", shape: tuple[int, ...] = (2, 3)) -> str:
    with pytest.raises(ConfigError) as caught:
        source(folder).get(name, shape)
    assert caught.value.param == "model"
    return caught.value.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("files", ["single", "sharded"])
def test_every_tensor_comes_in_the_dtype_asked_for(
    files: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    weights: WeightSource = source(request.getfixturevalue(files), dtype)
    for name, tensor in TENSORS.items():
        found = weights.get(name, (2, 3))
        assert found.dtype == dtype and torch.equal(found, tensor.to(dtype))


def test_a_tensor_belongs_to_the_caller(single: Path) -> None:
    weights = source(single)
    weights.get("layer.1.weight", (2, 3)).zero_()
    assert torch.equal(weights.get("layer.1.weight", (2, 3)), TENSORS["layer.1.weight"])


def test_optional_tensors_can_be_asked_after_and_unused_ones_listed(sharded: Path) -> None:
    weights = source(sharded)
    assert weights.has("layer.2.weight") and not weights.has("layer.2.bias")
    weights.get("layer.2.weight", (2, 3))
    weights.get("layer.0.weight", (2, 3))
    assert weights.has("layer.2.weight")
    assert weights.unused() == ["layer.1.weight", "layer.3.weight"]


def test_a_second_set_of_weights_under_other_names_is_left_alone(single: Path) -> None:
    save_file({"layers.0.wq": torch.zeros(2)}, single / "consolidated.safetensors")
    assert source(single).unused() == sorted(TENSORS)


def test_files_without_an_index_are_one_set(tmp_path: Path) -> None:
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, tmp_path / f"part-{name}.safetensors")
    assert source(tmp_path).unused() == sorted(TENSORS)


def test_a_missing_tensor_is_named(single: Path) -> None:
    assert f"the weights in {single} lack the tensor layer.9.weight" in refusal(single, "layer.9.weight")


def test_a_wrong_shape_is_named_with_the_right_one(single: Path) -> None:
    message = refusal(single, shape=(3, 2))
    assert f"layer.0.weight in {single / 'model.safetensors'} has shape [2, 3]" in message and "[3, 2]" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    save_file({"layer.0.weight": torch.ones(2, 3).to(dtype)}, tmp_path / "model.safetensors")
    assert "supported are F64, F32, F16, BF16" in refusal(tmp_path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (missing := sharded / "model-00002-of-00002.safetensors").unlink()
    assert f"the weight file {missing} is missing" in refusal(sharded)


def test_an_index_that_misplaces_a_tensor_is_refused(sharded: Path) -> None:
    write_index(sharded, dict.fromkeys(TENSORS, "model-00001-of-00002.safetensors"))
    assert "says that layer.2.weight is in model-00001-of-00002.safetensors, but it is not" in refusal(sharded)


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', "{}"])
def test_an_unreadable_index_is_refused(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json cannot be read" in refusal(sharded)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} holds no .safetensors files" in refusal(tmp_path)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(share: float, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(TENSORS, file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert f"{file} is not a whole safetensors file" in refusal(tmp_path)


def test_many_files_show_progress_and_one_small_file_does_not(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown() -> str:
        weights = source(single)
        for name in TENSORS:
            weights.get(name, (2, 3))
        return capsys.readouterr().err

    assert shown() == ""
    (single / "model.safetensors").rename(single / "a.safetensors")
    save_file({"other": torch.zeros(1)}, single / "b.safetensors")
    assert "Loading weights" in shown()


def test_dummy_weights_depend_on_seed_and_name_but_not_on_order() -> None:
    def drawn(seed: int, *names: str) -> list[Tensor]:
        weights: WeightSource = dummy(seed=seed)
        return [weights.get(name, (4, 5)) for name in names]

    (a, b), (b_again, a_again) = drawn(1, "a", "b"), drawn(1, "b", "a")
    assert torch.equal(a, a_again) and torch.equal(b, b_again)
    assert not torch.equal(a, b) and not torch.equal(a, drawn(2, "a")[0])


def test_dummy_weights_are_small_and_dummy_norms_do_nothing() -> None:
    weights = dummy(dtype=torch.bfloat16)
    drawn = weights.get("up_proj.weight", (300, 300)).float()
    assert drawn.std().item() == pytest.approx(0.02, rel=0.05) and abs(drawn.mean().item()) < 1e-3
    assert torch.equal(weights.get("model.norm.weight", (3,)), torch.ones(3, dtype=torch.bfloat16))


def test_dummy_weights_offer_nothing_optional() -> None:
    assert not dummy().has("lm_head.weight") and dummy().unused() == []
