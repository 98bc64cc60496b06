"""An empty path is refused: it names no file, and must not mean the current folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

CALLS: dict[str, Callable[[Any], Any]] = {
    "read": lambda path: deepnvme.read(torch.empty(1), path),
    "write": lambda path: deepnvme.write(torch.empty(1), path),
    "read_batch": lambda path: deepnvme.read_batch([(path, 0, torch.empty(1))]),
    "open": deepnvme.open,
    "open to write": lambda path: deepnvme.open(path, "wb"),
    "save": lambda path: deepnvme.save({"a": torch.ones(1)}, path),
    "load": deepnvme.load,
    "lazy": lambda path: deepnvme.load(path, lazy=True),
    "Checkpointer": deepnvme.Checkpointer,
    "Swapper": lambda path: deepnvme.Swapper(path, memory="1MB"),
    "StripeSet": lambda path: deepnvme.StripeSet([path, "b"]),
    "stream": lambda path: deepnvme.stream(path, memory="1MB"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", ["", b""])
def test_an_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, path: str | bytes) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="path is empty"):
        CALLS[call](path)
    assert not [*tmp_path.iterdir()]
