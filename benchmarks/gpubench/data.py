"""Random tensors and models to transfer, and comparisons with the result."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpubench.tool import Setup

_PAGE_BYTES = 4096
_PAGES_COMPARED = 256
_CHUNK_BYTES = 64 << 20
_STAMP_BYTES = 1 << 20
#: The tensors of a model are like those of a transformer: seven matrices and two norms in each layer.
_LAYERS = 16


class Mismatch(Exception):
    """Bytes that were read or written differ from the expected ones."""


def compare_state(setup: Setup, state: Any, model: dict[str, torch.Tensor], *, whole: bool) -> None:
    """Compare all tensors, or each seventh."""
    if set(state) != set(model):
        raise Mismatch(f"{len(state)} tensors instead of {len(model)}")
    for index, (name, tensor) in enumerate(model.items()):
        if (whole or index % 7 == 0) and not setup.gpu.same(state[name], tensor):
            raise Mismatch(f"{name} is not what was saved")


def compare_file(path: Path, host: torch.Tensor, *, whole: bool) -> None:
    """Compare all bytes of a file with those of a tensor, or pages at random and its length."""
    expected: memoryview = memoryview(host.numpy())  # type: ignore[arg-type] # numpy's arrays have the protocol
    if path.stat().st_size != len(expected):
        raise Mismatch(f"the file has {path.stat().st_size} bytes instead of {len(expected)}")
    with path.open("rb") as file:
        for start, count in _pieces(len(expected), whole=whole):
            file.seek(start)
            if file.read(count) != expected[start : start + count]:
                raise Mismatch(f"the file differs within {count} bytes at {start}")


def _pieces(nbytes: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    if whole:
        yield from ((start, min(_CHUNK_BYTES, nbytes - start)) for start in range(0, nbytes, _CHUNK_BYTES))
        return
    for page in torch.randint(0, -(-nbytes // _PAGE_BYTES), (_PAGES_COMPARED,)).tolist():
        start = page * _PAGE_BYTES
        yield start, min(_PAGE_BYTES, nbytes - start)


def random_bytes(nbytes: int) -> torch.Tensor:
    """Return random bytes, new in each run: one part, repeated, each MiB XORed with its number modulo 256."""
    part = torch.frombuffer(bytearray(os.urandom(min(nbytes, _CHUNK_BYTES))), dtype=torch.uint8)
    whole = part.repeat(-(-nbytes // part.numel()))[:nbytes]
    stamps = torch.arange(-(-nbytes // _STAMP_BYTES)).to(torch.uint8)
    return whole.bitwise_xor_(stamps.repeat_interleave(_STAMP_BYTES)[:nbytes])


def random_model(nbytes: int) -> dict[str, torch.Tensor]:
    """Return bf16 weights of ``nbytes`` bytes: layers of seven matrices and two norms each."""
    data = random_bytes(nbytes // 2 * 2)
    width = max(8, int((nbytes / 2 / _LAYERS / 12) ** 0.5) // 8 * 8)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(_LAYERS):
        for name in ("q", "k", "v", "o"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (width, width)
        for name in ("up", "gate", "down"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (width, width * 8 // 3)
        for name in ("norm1", "norm2"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (width,)
    model, at = {}, 0
    for name, shape in shapes.items():
        count = 2 * torch.Size(shape).numel()
        if at + count > data.numel():
            break
        model[name] = data[at : at + count].view(torch.bfloat16).view(shape)
        at += count
    model["model.embed_tokens.weight"] = data[at:].view(torch.bfloat16)
    return model


def size_text(nbytes: int) -> str:
    """Write a size in the largest unit that leaves no fraction."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} bytes"
