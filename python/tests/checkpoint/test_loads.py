"""Loads leave nothing open, select what was asked for, and cost no more for many tensors."""

from __future__ import annotations

import gc
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import deepnvme
from deepnvme import errors
from deepnvme._checkpoint.nested_states import NamePatterns

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = ("x.pt", "x.safetensors", "several.safetensors")


@pytest.fixture
def state(tmp_path: Path) -> dict[str, torch.Tensor]:
    state = {f"layers.{index}.w": torch.randn(100) for index in range(12)}
    for name in NAMES:
        options: Any = {"max_shard_bytes": 1500} if name.startswith("several") else {}
        deepnvme.save(state, tmp_path / name, **options)
    return state


@pytest.fixture
def without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_files(folder: Path) -> list[str]:
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this listing
            targets.append(str(link.readlink()))
    return [target for target in targets if target.startswith(str(folder))]


@pytest.mark.usefixtures("state", "without_collections")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lazy": True},
        {"only": "layers.1"},
        {"only": "layers.1", "lazy": True},
        {"verify": "full"},
        {"device": "meta"},
    ],
    ids=str,
)
def test_a_load_leaves_no_file_open(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    loaded = deepnvme.load(tmp_path / name, **options)
    assert all((tensor + 1).shape == (100,) for tensor in loaded.values())
    del loaded
    assert open_files(tmp_path) == []


@pytest.mark.usefixtures("without_collections")
def test_a_refused_load_leaves_no_file_open(tmp_path: Path) -> None:
    deepnvme.save({"w": torch.randn(3), "code": Path("x")}, tmp_path / "x.pt")
    for lazy in (False, True):
        with pytest.raises(errors.UnsafeFileError):
            deepnvme.load(tmp_path / "x.pt", lazy=lazy)
    assert open_files(tmp_path) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    "only", [["layers.1.w", "nope"], ["*.w", "*.bias"], ["layers.1.w.x"], "layers.1.", [], "layer"]
)
def test_each_name_must_match(
    tmp_path: Path, state: dict[str, torch.Tensor], name: str, lazy: bool, only: str | list[str]
) -> None:
    with pytest.raises(KeyError, match=r"no tensor matches .*; its tensors are: 'layers\.0\.w', "):
        deepnvme.load(tmp_path / name, only=only, lazy=lazy)
    assert deepnvme.load(tmp_path / name, only=[*state], lazy=lazy).keys() == state.keys()


def test_patterns() -> None:
    patterns = NamePatterns(["a", "b.*.w", "c[0]", "", "d.?"])
    names = ["a", "a.b", "ab", "b.x.w", "b.w", "b.x.w.y", "c[0]", "c0", "c[0].x", ".x", "d.1", "d.12", "d.1.e"]
    chosen = [name for name in names if patterns.matches(name)]
    assert chosen == ["a", "a.b", "b.x.w", "b.x.w.y", "c[0]", "c[0].x", ".x", "d.1", "d.1.e"]
    assert patterns.unmatched == []
    others = NamePatterns(["a", "z", "y*"])
    assert others.matches("a.b")
    assert others.unmatched == ["z", "y*"]


def test_fake_tensors_are_refused(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    with FakeTensorMode() as mode:
        for name in NAMES:
            with pytest.raises(errors.UnsupportedError, match="FakeTensorMode"):
                deepnvme.load(tmp_path / name)
            with pytest.raises(errors.UnsupportedError, match="FakeTensorMode"):
                deepnvme.save(state, tmp_path / f"new-{name}")
        fake = mode.from_tensor(torch.zeros(3))
    with pytest.raises(errors.InvalidArgumentError, match=r"\['w'\].*FakeTensor"):
        deepnvme.save({"w": fake}, tmp_path / "new.pt")
    with pytest.raises(ValueError, match="FakeTensor"):
        deepnvme.save({"w": fake}, tmp_path / "new.safetensors")
    assert not [*tmp_path.glob("new*")]
