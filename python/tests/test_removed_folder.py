"""A current folder that was removed: relative paths get an error that says so or names the path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import deepnvme
from deepnvme.errors import NotFoundError

torch = pytest.importorskip("torch")

TENSOR = torch.ones(10)
CALLS: dict[str, Callable[[], object]] = {
    "read": lambda: deepnvme.read(TENSOR, "x"),
    "write": lambda: deepnvme.write(TENSOR, "x"),
    "stripes": lambda: deepnvme.write(TENSOR, deepnvme.StripeSet(["a", "b"])),
    "open": lambda: deepnvme.open("x", "wb"),
    "save": lambda: deepnvme.save({"a": TENSOR}, "x.pt"),
    "shards": lambda: deepnvme.save({"a": TENSOR}, "x.safetensors", max_shard_bytes=16),
    "load": lambda: deepnvme.load("x.pt"),
    "checkpointer": lambda: deepnvme.Checkpointer("c"),
    "swapper": lambda: deepnvme.Swapper("s", memory="1MB").put("a", TENSOR),
    "trace": lambda: deepnvme.trace("t.json").__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_relative_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(NotFoundError, match=r"'.+'|current folder was removed"):
        CALLS[name]()
    # Absolute paths work.
    assert deepnvme.write(TENSOR, tmp_path / "x") == TENSOR.nbytes
    os.chdir(tmp_path)
    deepnvme.save({"a": TENSOR}, "x.pt")
