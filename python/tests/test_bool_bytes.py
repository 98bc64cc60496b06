"""Bools keep their bytes, also those other than 0 and 1, which torch's own copies turn into 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import deepnvme

RAW = torch.arange(256, dtype=torch.uint8).view(16, 16)
BOOLS = RAW.view(torch.bool)
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(16, 16, dtype=torch.bool),
    "transposed": lambda: torch.zeros(16, 16, dtype=torch.bool).t(),
    "strided": lambda: torch.zeros(16, 32, dtype=torch.bool)[:, ::2],
}


def same_bytes(found: torch.Tensor) -> bool:
    return bool(torch.equal(found.view(torch.uint8), RAW))


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_checkpoints(tmp_path: Path, source: str, target: str, suffix: str) -> None:
    saved = LAYOUTS[source]()
    saved.view(torch.uint8).copy_(RAW)
    path = tmp_path / f"x.{suffix}"
    deepnvme.save({"a": saved}, path)
    assert same_bytes(deepnvme.load(path)["a"])
    into = LAYOUTS[target]()
    deepnvme.load(path, into={"a": into})
    assert same_bytes(into)
    with deepnvme.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"a": saved})
        assert same_bytes(checkpointer.restore()["a"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_swapped_tensors(tmp_path: Path, layout: str) -> None:
    source = LAYOUTS[layout]()
    source.view(torch.uint8).copy_(RAW)
    # An odd offset, so that the part is no multiple of a larger type.
    with deepnvme.Swapper(tmp_path, memory="8KiB") as swapper:
        swapper.put("a", source)
        swapper.put("b", torch.zeros(300, dtype=torch.uint8))
        for _ in range(2):
            with swapper.borrow("a", shared=True) as found:
                assert same_bytes(found)
            swapper.write("b", 3, source)
            out = LAYOUTS[layout]()
            assert same_bytes(swapper.read("b", 3, out))
            # Once more from disk.
            swapper.flush()
            for index in range(8):
                swapper.put(f"more{index}", torch.zeros(2048, dtype=torch.uint8))


def test_iterated_weights(tmp_path: Path) -> None:
    from deepnvme.integrations.weights import iterate_weights

    deepnvme.save({"a": BOOLS, "b": torch.zeros(300, 300)}, tmp_path / "x.safetensors")
    assert same_bytes(dict(iterate_weights(tmp_path / "x.safetensors"))["a"])
