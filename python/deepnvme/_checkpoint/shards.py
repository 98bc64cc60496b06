"""A state in several safetensors files and an index, as Hugging Face lays it out."""

from __future__ import annotations

import json
import math
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepnvme._file as file
from deepnvme._checkpoint.leftovers import remove, remove_stale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Tensor = tuple[str, str, Sequence[int], Any]

_INDEX = ".index.json"
_SUFFIX = ".safetensors"


def save_shards(
    path: Path,
    tensors: list[_Tensor],
    max_shard_bytes: int,
    durability: Any,
    write: Callable[[Path, list[_Tensor]], int],
) -> int:
    """Write the shards, then the index, which is the one moment of change; then remove shards that it does not name."""
    if max_shard_bytes <= 0:
        msg = f"max_shard_bytes is {max_shard_bytes}; it must be positive"
        raise ValueError(msg)
    shards = _cut(tensors, max_shard_bytes)
    index = path.with_name(path.name + _INDEX)
    if len(shards) <= 1:
        total = write(path, tensors)
        index.unlink(missing_ok=True)
        _remove_others(path, [])
        return total
    files = _new_files(path, len(shards))
    weight_map = {tensor[0]: name.name for name, shard in zip(files, shards, strict=True) for tensor in shard}
    size = sum(tensor[3].nbytes for tensor in tensors)
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    try:
        total = sum(write(name, shard) for name, shard in zip(files, shards, strict=True))
        with file.open(index, "wb", durability=durability) as out:
            out.write(text.encode())
    except BaseException:
        # What fails after the index has its name must not take the files from it.
        if not _is(index, text):
            for name in files:
                remove(name)
        raise
    # A single file of the same name would be an older state, which loaders may prefer.
    remove(path)
    _remove_others(path, files)
    return total


def _new_files(path: Path, count: int) -> list[Path]:
    """Name the shards as no file is called: those of the old state stay what they are until the new index is there."""
    stem = path.name.removesuffix(_SUFFIX)
    names = [f"{stem}-{number:05}-of-{count:05}" for number in range(1, count + 1)]
    files = [path.with_name(name + _SUFFIX) for name in names]
    if any(name.exists() for name in files):
        mark = secrets.token_hex(4)
        files = [path.with_name(f"{name}-{mark}{_SUFFIX}") for name in names]
    return files


def _remove_others(path: Path, kept: list[Path]) -> None:
    """Remove shards of older states, and what killed saves left; what an index names may be anybody's file."""
    stem = re.escape(path.name.removesuffix(_SUFFIX))
    shards = re.compile(rf"{stem}-[0-9]{{5,}}-of-[0-9]{{5,}}(-[0-9a-f]{{8}})?{re.escape(_SUFFIX)}")
    for name in list(path.parent.iterdir()):
        if shards.fullmatch(name.name) and name not in kept:
            remove(name)
    remove_stale(path.parent, shards)


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


def _is(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False
