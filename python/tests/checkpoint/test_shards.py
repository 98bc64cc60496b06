"""States in several safetensors files: what is removed when another one takes their place, and what never is."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
import deepnvme._file as file

from .programs import run


def state_of(seed: int, count: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{index}.weight": torch.randn(1000, generator=generator) for index in range(count)}


def save(seed: int, path: Path, count: int = 10) -> None:
    deepnvme.save(state_of(seed, count), path, max_shard_bytes=12_000)


def is_state(folder: Path, seed: int) -> bool:
    loaded, expected = deepnvme.load(folder, verify="full"), state_of(seed)
    return set(loaded) == set(expected) and all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("count", [1, 10])
def test_what_an_index_names_is_not_removed_for_that(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    mine = ["../other.safetensors", "notes.txt", "other-00001-of-00002.safetensors", "model-1-of-2.safetensors",
            "model-00001-of-00002.safetensors.bak", "xmodel-00001-of-00002.safetensors",
            "model-00001-of-00002-zz345678.safetensors"]  # fmt: skip
    mine.append(str(tmp_path / "model-00001-of-00002.safetensors"))
    for name in mine:
        (folder / name).write_text("mine")
        index = {"weight_map": {"a": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        save(1, folder / "model.safetensors", count)
    assert all((folder / name).read_text() == "mine" for name in mine)


@pytest.mark.parametrize("name", ["model.safetensors", "m[o]d.*el.safetensors"])
@pytest.mark.parametrize("count", [1, 10])
def test_what_killed_saves_left_goes(tmp_path: Path, name: str, count: int) -> None:
    stem = name.removesuffix(".safetensors")
    for left in ("-00002-of-00003", "-00001-of-00004", "-00001-of-00009-0123abcd", "-00001-of-100000"):
        (tmp_path / f"{stem}{left}.safetensors").write_bytes(b"left")
    (tmp_path / f".{stem}-00001-of-00003.safetensors.deepnvme-tmp-1-0").write_bytes(b"left")
    save(1, tmp_path / name, count)
    assert len(list(tmp_path.iterdir())) == (1 if count == 1 else 5)
    assert len(deepnvme.load(tmp_path / (name if count == 1 else f"{name}.index.json"))) == count


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, path in enumerate(["model.safetensors", "./model.safetensors", str(tmp_path / "model.safetensors")]):
        deepnvme.save(state_of(seed), path, max_shard_bytes=12_000)
        assert is_state(tmp_path, seed)
        assert len(list(tmp_path.iterdir())) == 5


def test_one_file_saved_over_several_is_what_a_folder_means(tmp_path: Path) -> None:
    save(1, tmp_path / "model.safetensors")
    deepnvme.save(state_of(2), tmp_path / "model.safetensors")
    assert is_state(tmp_path, 2)
    save(3, tmp_path / "model.safetensors")
    assert is_state(tmp_path, 3)


def test_a_failure_after_the_index_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save(1, path)
    opened = file.open

    class Failing:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.file = opened(*arguments, **options)

        def __enter__(self) -> Any:
            return self.file

        def __exit__(self, *_: object) -> None:
            self.file.close()
            raise OSError("the folder cannot be synced")

    with monkeypatch.context() as patched:
        patched.setattr(file, "open", Failing)
        with pytest.raises(OSError, match="synced"):
            save(2, path)
    assert is_state(tmp_path, 2)
    save(3, path)
    assert is_state(tmp_path, 3)
    assert len(list(tmp_path.iterdir())) == 5


KILLED = """
import os, signal, sys, torch, deepnvme
from pathlib import Path
import deepnvme._file as file
left = int(sys.argv[2])
def die(work):
    def counted(*arguments, **options):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*arguments, **options)
    return counted
file.open, Path.unlink = die(file.open), die(Path.unlink)
generator = torch.Generator().manual_seed(2)
state = {f"layers.{index}.weight": torch.randn(1000, generator=generator) for index in range(10)}
deepnvme.save(state, sys.argv[1], max_shard_bytes=12_000)
"""


def test_killed_at_each_instant(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    seen = set()
    # The index, four old shards; then there is nothing more to be killed at.
    for instant in itertools.count(1):
        save(1, path)
        status = run(KILLED, path, instant)
        assert status in {0, -signal.SIGKILL}
        seen.add(is_old := is_state(tmp_path, 1))
        assert is_old or is_state(tmp_path, 2)
        save(3, path)
        assert is_state(tmp_path, 3)
        assert len(list(tmp_path.iterdir())) == 5
        if status == 0:
            break
    assert instant == 6
    assert seen == {True, False}
