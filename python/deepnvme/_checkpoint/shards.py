"""A state in several safetensors files and an index, as Hugging Face lays it out."""

from __future__ import annotations

import json
import math
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepnvme._file as file
from deepnvme._deepnvme import _locate

if TYPE_CHECKING:
    from collections.abc import Callable

    _Tensor = tuple[str, str, list[int], Any]

_INDEX = ".index.json"


def save_shards(
    path: str,
    tensors: list[_Tensor],
    max_shard_bytes: int,
    durability: Any,
    write: Callable[[str, list[_Tensor]], int],
) -> int:
    """Write the shards, then the index, which is the one moment of change; then remove what the old index had."""
    if max_shard_bytes <= 0:
        msg = f"max_shard_bytes is {max_shard_bytes}; it must be positive"
        raise ValueError(msg)
    shards = _cut(tensors, max_shard_bytes)
    index = path + _INDEX
    old = _files_of(index)
    if len(shards) <= 1:
        total = write(path, tensors)
        _remove([index, *old])
        return total
    stem = path.removesuffix(".safetensors")
    names = [f"{stem}-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    if any(Path(name).exists() for name in names):
        # The files of the old state stay what they are until the new index is there.
        mark = secrets.token_hex(4)
        names = [name.removesuffix(".safetensors") + f"-{mark}.safetensors" for name in names]
    written: list[str] = []
    try:
        total = 0
        for name, shard in zip(names, shards, strict=True):
            total += write(name, shard)
            written.append(name)
        weight_map = {tensor[0]: Path(name).name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor[3].nbytes for tensor in tensors)
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
        with file.open(index, "wb", durability=durability) as out:
            out.write(text.encode())
    except BaseException:
        _remove(written)
        raise
    # A single file of the same name would be an older state, which loaders may prefer.
    _remove([name for name in [*old, path] if name not in names])
    return total


def _cut(tensors: list[_Tensor], max_shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = []
    room = -math.inf
    for tensor in tensors:
        nbytes = tensor[3].nbytes
        if nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(tensor)
        room -= nbytes
    return shards


def _files_of(index: str) -> list[str]:
    try:
        return [os.fspath(path) for path, _ in _locate(index)]
    except (OSError, ValueError):
        return []


def _remove(paths: list[str]) -> None:
    for path in paths:
        Path(path).unlink(missing_ok=True)
