"""A newcomer's mistakes: each answer names the argument and the remedy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme.errors import InvalidArgumentError, NotFolderError, NotFoundError

torch = pytest.importorskip("torch")


def file_for_folder(folder: Path) -> object:
    (folder / "model.pt").write_bytes(b"x")
    return deepnvme.Checkpointer(folder / "model.pt").save(1, {})


def borrowed(folder: Path) -> object:
    with deepnvme.Swapper(folder, memory="1MB") as swapper:
        swapper.put("a", torch.ones(3))
        return swapper.borrow("a").add_(1)


def overlapped(folder: Path) -> object:
    with deepnvme.Checkpointer(folder).overlap(torch.nn.Linear(2, 2)):
        return None


Call = Callable[[Path], Any]
MISTAKES: dict[str, tuple[Call, type[Exception], str]] = {
    "unknown direction": (
        lambda folder: deepnvme.bench("reads", folder),  # type: ignore[arg-type]
        InvalidArgumentError,
        "direction is 'reads'; it must be 'read' or 'write'",
    ),
    "number out of range": (
        lambda folder: deepnvme.bench("read", folder, loops=0),
        InvalidArgumentError,
        "loops is 0; it must be between 1 and 1000",
    ),
    "bench without a folder": (
        lambda _: deepnvme.bench("read"),
        TypeError,
        'deepnvme.bench needs at least one folder: deepnvme.bench("read", "/mnt/nvme")',
    ),
    "tune without a folder": (
        lambda _: deepnvme.tune(),
        TypeError,
        'deepnvme.tune needs at least one folder: deepnvme.tune("/mnt/nvme")',
    ),
    "state before step": (
        lambda folder: deepnvme.Checkpointer(folder).save({"a": torch.ones(3)}, 1),  # type: ignore[arg-type]
        TypeError,
        "step is a dict; the step comes first: save(step, state)",
    ),
    "file for a folder": (file_for_folder, NotFolderError, "make folder: Not a directory"),
    "model for an optimizer": (overlapped, TypeError, "overlap takes optimizers of torch, not Linear"),
    "borrow without a block": (borrowed, AttributeError, "in a block: with swapper.borrow('a') as tensor:"),
    "tensor before path": (
        lambda folder: deepnvme.read_batch([(torch.ones(3), folder / "x", 0)]),  # type: ignore[list-item]
        TypeError,
        "item 0: an item is a tuple (path, offset, tensor); the first element is a tensor",
    ),
    "one path for several": (
        lambda folder: deepnvme.StripeSet(str(folder / "abc")),
        TypeError,
        "paths is one path; it must be a list of them",
    ),
    "clipping to less than nothing": (
        lambda _: deepnvme.optim.AdamW([torch.nn.Parameter(torch.ones(3))], max_norm=-1),
        InvalidArgumentError,
        "max_norm is -1; it must be at least 0",
    ),
    "little memory": (
        lambda folder: deepnvme.Swapper(folder, memory="1KB"),
        InvalidArgumentError,
        "memory is 1000 bytes; it must be at least",
    ),
    "shards of an archive": (
        lambda folder: deepnvme.save({}, folder / "x.pt", max_shard_bytes="1MB"),
        InvalidArgumentError,
        "max_shard_bytes splits safetensors files only",
    ),
    "metadata of an archive": (
        lambda folder: deepnvme.save({}, folder / "x.pt", metadata={"a": "b"}),
        InvalidArgumentError,
        "metadata belongs to safetensors; for a .pt file, put it into the dict that you save",
    ),
    "no settings": (
        lambda folder: deepnvme.Engine.from_file(folder / "deepnvme.toml"),
        NotFoundError,
        "make the file with `deepnvme tune`",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_answer_names_the_remedy(tmp_path: Path, name: str) -> None:
    call, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=re.escape(text)):
        call(tmp_path)


def test_a_whole_module_is_answered_with_its_state_dict(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        deepnvme.save(torch.nn.Linear(2, 2), tmp_path / "m.pt")
    assert any("save module.state_dict() instead" in str(warning.message) for warning in said)
