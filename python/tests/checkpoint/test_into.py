"""``load(into=)``: all or nothing, and never a silent nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme._deepnvme import _run_command
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def saved(folder: Path, suffix: str, **options: Any) -> Path:
    path = folder / f"model{suffix}"
    deepnvme.save({"a": torch.ones(400), "b": torch.full((400,), 2.0)}, path, **options)
    return path


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(400, device="meta"), "b is on the meta device"),
    "sparse": (lambda: torch.ones(400).to_sparse(), "b is not a dense tensor"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.ones(400), 0.1, 0, torch.qint8), "b is quantised"),
    "expanded": (lambda: torch.ones(1).expand(400), "b has elements that share their memory"),
    "another shape": (lambda: torch.ones(7), r"b has the shape \[400\]"),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_target_that_cannot_be_filled_is_named_before_anything_changes(
    tmp_path: Path, suffix: str, kind: str
) -> None:
    path = saved(tmp_path, suffix)
    make, text = REFUSED[kind]
    into = {"a": torch.zeros(400), "b": make()}
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        deepnvme.load(path, into=into)
    assert str(path) in str(caught.value)
    assert not into["a"].any()


@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": 2000}], ids=["one file", "shards"])
def test_a_name_or_a_shape_that_does_not_fit_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    path = saved(tmp_path, ".safetensors", **options)
    into = {"a": torch.zeros(400), "typo": torch.zeros(400)}
    with pytest.raises(KeyError, match="typo"):
        deepnvme.load(path, into=into)
    with pytest.raises(InvalidArgumentError, match="shape"):
        deepnvme.load(path, into={"a": into["a"], "b": torch.zeros(3)})
    assert not into["a"].any()


def test_nothing_to_fill_is_an_error(tmp_path: Path) -> None:
    path = saved(tmp_path, ".safetensors")
    with pytest.raises(InvalidArgumentError, match=r"model\.safetensors: into has no tensor to fill"):
        deepnvme.load(path, into={"a": "typo", "b": None})
    with pytest.raises(InvalidArgumentError, match="into is empty"):
        deepnvme.load(path, into={})


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_autograd_notices_that_weights_were_loaded(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, suffix)
    weight = torch.nn.Parameter(torch.full((400,), 3.0))
    loss = (weight * weight).sum()
    deepnvme.load(path, into={"a": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


SHARDS: list[Any] = [(".pt", {}), (".safetensors", {}), (".safetensors", {"max_shard_bytes": 2000})]


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize(("suffix", "options"), SHARDS)
def test_targets_that_share_memory_need_the_same_values(
    tmp_path: Path, suffix: str, options: dict[str, Any], verify: Any
) -> None:
    path, memory = saved(tmp_path, suffix, **options), torch.zeros(800)
    with pytest.raises(InvalidArgumentError, match=r"a and b share a part of their memory"):
        deepnvme.load(path, into={"a": memory[:400], "b": memory[300:700]}, verify=verify)
    assert not memory.any()
    for cast, dtype in ((False, torch.float32), (True, torch.bfloat16)):
        one = torch.zeros(400, dtype=dtype)
        with pytest.raises(InvalidArgumentError, match="b shares its memory with another tensor"):
            deepnvme.load(path, into={"a": one, "b": one}, cast=cast, verify=verify)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("is_tied", [False, True], ids=["copies", "tied"])
@pytest.mark.parametrize(("suffix", "options"), SHARDS)
def test_tied_weights_are_filled(
    tmp_path: Path, suffix: str, options: dict[str, Any], is_tied: bool, cast: bool
) -> None:
    weight = torch.randn(400)
    weight[7] = torch.nan
    path = tmp_path / f"model{suffix}"
    deepnvme.save({"a": weight, "b": weight if is_tied else weight.clone()}, path, **options)
    one = torch.zeros(400, dtype=torch.bfloat16 if cast else torch.float32)
    deepnvme.load(path, into={"a": one, "b": one}, cast=cast, verify="full")
    assert torch.equal(one.view(torch.uint8), weight.to(one.dtype).view(torch.uint8))


def _column_of_it() -> dict[str, torch.Tensor]:
    matrix = torch.zeros(100, 20)
    return {"a": matrix, "b": matrix.t()[0, :50]}


def _interleaved() -> dict[str, torch.Tensor]:
    matrix = torch.zeros(100, 40)
    return {"a": matrix[:, ::2], "b": matrix[:50, 2]}


def _flipped() -> dict[str, torch.Tensor]:
    matrix = torch.zeros(100, 40)
    return {"a": matrix.t()[::2].t(), "b": matrix.view(-1)[3 * 40 :: 2][:50]}


def _overlaps_itself() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(119).as_strided((100, 20), (1, 1)), "b": torch.zeros(50)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["same", "cast"])
@pytest.mark.parametrize("make", [_column_of_it, _interleaved, _flipped, _overlaps_itself])
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_strided_targets_that_share_memory_are_refused(
    tmp_path: Path, suffix: str, make: Callable[[], dict[str, torch.Tensor]], dtype: torch.dtype
) -> None:
    path, into = tmp_path / f"model{suffix}", make()
    deepnvme.save({"a": torch.randn(100, 20, dtype=dtype), "b": torch.randn(50, dtype=dtype)}, path)
    with pytest.raises(InvalidArgumentError, match=r"a and b share a part|a has elements that share"):
        deepnvme.load(path, into=into, cast=True, verify="full")
    assert not any(tensor.any() for tensor in into.values())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_empty_target_shares_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    deepnvme.save({"a": torch.zeros(0, 3)}, path)
    empty = torch.from_numpy(np.zeros((0, 3), np.float32))
    assert 0 in empty.stride()
    assert deepnvme.load(path, into={"a": empty})["a"] is empty


def test_interleaved_targets_are_filled(tmp_path: Path) -> None:
    state = {"a": torch.randn(100, 20), "b": torch.randn(100, 20), "c": torch.randn(30)}
    deepnvme.save(state, tmp_path / "model.pt")
    matrix = torch.zeros(101, 40)
    deepnvme.load(tmp_path / "model.pt", into={"a": matrix[:100, ::2], "b": matrix[:100, 1::2], "c": matrix[100, :30]})
    assert torch.equal(matrix[:100, ::2], state["a"]) and torch.equal(matrix[:100, 1::2], state["b"])
    assert torch.equal(matrix[100, :30], state["c"])


def test_columns_of_one_matrix_are_filled(tmp_path: Path) -> None:
    path, matrix = saved(tmp_path, ".pt"), torch.zeros(400, 2)
    deepnvme.load(path, into={"a": matrix[:, 0], "b": matrix[:, 1]})
    assert torch.equal(matrix, torch.tensor([1.0, 2.0]).expand(400, 2))


UNNAMED: list[Any] = [1.0, (0, 1), b"x", frozenset({1}), 1 << 70, torch.float32]


@pytest.mark.parametrize("key", UNNAMED, ids=str)
def test_a_key_without_a_name_fills_nothing(tmp_path: Path, key: Any) -> None:
    path = tmp_path / "a.pt"
    deepnvme.save({key: torch.ones(3), str(key): torch.full((3,), 2.0)}, path)
    target = torch.zeros(3)
    with pytest.raises(InvalidArgumentError, match="has no name in a file"):
        deepnvme.load(path, into={key: target})
    assert not target.any()
    deepnvme.load(path, into={str(key): target}, verify="full")
    assert torch.equal(target, torch.full((3,), 2.0))
    with pytest.raises(KeyError, match="<key>"):
        deepnvme.load(path, into={"<key>": target})
    assert _run_command(["convert", str(path), str(tmp_path / "a.safetensors")]) == 1
    assert not (tmp_path / "a.safetensors").exists()


def test_views_of_one_storage_are_filled_by_one_read(tmp_path: Path) -> None:
    # More than a group of temporary buffers has.
    flat = torch.randn(24 << 20)
    state = {f"w{index}": flat[index << 20 : (index + 1) << 20] for index in range(24)}
    deepnvme.save(state, tmp_path / "x.pt")
    targets = {name: torch.zeros(1 << 20) for name in state}
    with deepnvme.Engine() as engine:
        deepnvme.load(tmp_path / "x.pt", into=targets, engine=engine)
        assert engine.stats().bytes_read < flat.nbytes * 1.1
    assert all(torch.equal(targets[name], tensor) for name, tensor in state.items())
