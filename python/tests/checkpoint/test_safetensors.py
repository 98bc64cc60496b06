"""safetensors files: safetensors loads what deepnvme saves, and the reverse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import deepnvme
from deepnvme.errors import ChecksumError
from deepnvme.integrations._safetensors import TensorFile

from .states import DTYPES, assert_same_tensor, random

SAFE = [dtype for dtype in DTYPES if dtype != torch.complex128]


def assert_same_dict(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert_same_tensor(actual[name].contiguous(), tensor.contiguous(), name)


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)
TENSORS = st.builds(
    random, st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from(SAFE), st.integers(0, 9)
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.dictionaries(NAMES, TENSORS, max_size=8))
def test_any_dict_is_read_by_safetensors_and_read_from_it(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    deepnvme.save(state, ours, durability="none")
    save_file(state, theirs)
    assert_same_dict(load_file(ours), state)
    assert_same_dict(deepnvme.load(ours, verify="full"), state)
    assert_same_dict(deepnvme.load(theirs), state)


def test_views_are_saved_as_they_look(tmp_path: Path) -> None:
    base = torch.randn(40, 30)
    state = {"t": base.t(), "s": base[::2, 3:9], "e": torch.randn(3, 1).expand(3, 7), "p": torch.nn.Parameter(base)}
    deepnvme.save(state, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("metadata", "error"), [({"format": "np"}, ValueError), ({"epoch": 3}, TypeError), ({3: "epoch"}, TypeError)]
)
def test_metadata_that_would_be_changed_is_refused(
    tmp_path: Path, metadata: dict[Any, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match="metadata"):
        deepnvme.save({"a": torch.ones(3)}, tmp_path / "a.safetensors", metadata=metadata)
    assert not [*tmp_path.iterdir()]


def test_metadata_and_lazy_readers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    deepnvme.save({"a": torch.randn(300, 300)}, path, metadata={"epoch": "3"})
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        assert metadata["epoch"] == "3"
        assert metadata["format"] == "pt"
        assert "crc-64" in metadata["deepnvme.checksums"]
        assert file.get_slice("a")[3:5].shape == (2, 300)
    deepnvme.save({"a": torch.randn(3)}, path, checksums=False)
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ([1], "dict"),
        ({"a": 1}, "int"),
        ({"a": np.ones(3)}, r"convert it: torch\.from_numpy"),
        ({1: torch.ones(1)}, "1"),
        ({"a": torch.ones(1, dtype=torch.complex128)}, "complex128"),
    ],
)
def test_unsupported_objects_are_named(tmp_path: Path, state: Any, word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word):
        deepnvme.save(state, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


def state_of(count: int = 10) -> dict[str, torch.Tensor]:
    return {f"layers.{index}.weight": torch.randn(1000) for index in range(count)}


def test_shards_are_as_hugging_face_has_them(tmp_path: Path) -> None:
    state = state_of()
    path = tmp_path / "model.safetensors"
    deepnvme.save(state, path, max_shard_bytes=12_000)
    names = sorted(entry.name for entry in tmp_path.iterdir())
    # All names of one save contain the same random digits.
    (token,) = {name.removesuffix(".safetensors")[-32:] for name in names[:4]}
    assert names == [
        *(f"model-{number:05}-of-00004-{token}.safetensors" for number in range(1, 5)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 40_000
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], state[name])
    assert_same_dict(deepnvme.load(tmp_path), state)
    assert_same_dict(
        deepnvme.load(tmp_path / "model.safetensors.index.json", only="layers.3"),
        {"layers.3.weight": state["layers.3.weight"]},
    )


def test_new_shards_replace_old_ones_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for seed in range(3):
        torch.manual_seed(seed)
        state = state_of()
        deepnvme.save(state, path, max_shard_bytes=12_000)
        assert_same_dict(deepnvme.load(tmp_path), state)
        assert len(list(tmp_path.iterdir())) == 5
    small = state_of(1)
    deepnvme.save(small, path, max_shard_bytes=12_000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    assert_same_dict(deepnvme.load(tmp_path), small)


def test_a_failing_shard_leaves_the_old_state(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    state = state_of()
    deepnvme.save(state, path, max_shard_bytes=12_000)
    before = sorted(entry.name for entry in tmp_path.iterdir())
    with pytest.raises(ValueError, match="complex128"):
        deepnvme.save(state | {"z": torch.ones(2, dtype=torch.complex128)}, path, max_shard_bytes=12_000)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before
    assert_same_dict(deepnvme.load(tmp_path), state)


def test_tensors_without_a_shape_or_of_few_bits_are_named(tmp_path: Path) -> None:
    dtypes = vars(torch)
    for tensor, words in (
        (torch.nn.parameter.UninitializedParameter(), "'a': this parameter has no shape yet"),
        (torch.nn.parameter.UninitializedBuffer(), "'a': this parameter has no shape yet"),
        (torch.empty(5, dtype=dtypes["int4"]), r'"a": safetensors has no torch.int4; save tensor.view\(torch.int8\)'),
        (
            torch.empty(5, dtype=dtypes["uint3"]),
            r'"a": safetensors has no torch.uint3; save tensor.view\(torch.uint8\)',
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            deepnvme.save({"a": tensor}, tmp_path / "x.safetensors")
        assert list(tmp_path.iterdir()) == []


def test_options_of_the_other_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="safetensors"):
        deepnvme.save({}, tmp_path / "x.pt", max_shard_bytes=5)
    with pytest.raises(ValueError, match="between 1 and"):
        deepnvme.save({}, tmp_path / "x.safetensors", max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


def test_tensors_that_claim_more_than_any_header_has_sums_for(tmp_path: Path) -> None:
    for power in (45, 55, 60):
        with pytest.raises(ValueError, match=r"the header has|exceeds the maximum size"):
            deepnvme.save({"a": torch.zeros(1).expand(1 << power)}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.safetensors", "a.pt"])
def test_empty_tensors_have_storages_of_their_own(tmp_path: Path, name: str) -> None:
    deepnvme.save({"a": torch.empty(0), "b": torch.empty(0, 3)}, tmp_path / name)
    loaded = deepnvme.load(tmp_path / name)
    loaded["a"].resize_(4).fill_(1)
    loaded["b"].resize_(4).fill_(2)
    assert loaded["a"].tolist() == [1] * 4


def test_a_slice_is_of_the_file_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    deepnvme.save({"w": torch.full((8, 4), 1.0), "b": torch.zeros(16)}, path)
    with TensorFile(path) as file:
        part = file.get_slice("w")
        deepnvme.save({"a": torch.full((999,), 7.0), "w": torch.full((8, 4), 2.0)}, path)
        assert torch.equal(part[2:6], torch.full((4, 4), 1.0))
        assert torch.equal(part[3:4], file.get_tensor("w")[3:4])


@pytest.mark.parametrize("rows", [slice(0, 1000), slice(999, 1000), slice(300, 1000)])
def test_damage_is_noticed_in_a_slice(tmp_path: Path, rows: slice) -> None:
    path = tmp_path / "m.safetensors"
    weights = torch.randn(1000, 700)
    deepnvme.save({"w": weights}, path)
    with TensorFile(path) as file:
        assert torch.equal(file.get_slice("w")[rows], weights[rows])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with TensorFile(path) as file:
        assert torch.equal(file.get_slice("w")[0:10], weights[0:10])
        with pytest.raises(ChecksumError):
            file.get_slice("w")[rows]
