"""A state in several safetensors files and an index, as Hugging Face writes them.

Each save uses new file names, and replacing the index switches to the new state. Afterwards the old shards are removed
if the old index recorded them as deepnvme's. The remains of killed saves are removed as well, and no other file.
"""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._deepnvme import _find_set, _remove_leftovers, _retire_set, _SetReplacement
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.metadata_file import warn_of_kept
from deepnvme._utils.public import warn_caller

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deepnvme._checkpoint.save import NamedTensor
    from deepnvme._deepnvme import _SavePlan

    _Report = Callable[[int, int], object] | None

_INDEX = ".index.json"
_SUFFIX = ".safetensors"
# Keys of the record in an index that lists the index's own files.
_RECORD = ("metadata", "deepnvme.owned")


def save_shards(
    path: Path,
    tensors: list[NamedTensor],
    max_shard_bytes: int,
    plan: Callable[[Path, list[NamedTensor]], _SavePlan],
    report: _Report,
) -> int:
    """Write the shards, then replace the index. Returns the bytes of all shards. ``plan`` plans one shard."""
    shards = _cut(tensors, max_shard_bytes)
    if len(shards) <= 1:
        nbytes = plan(path, tensors).start().wait(report, True)[0]
        retire_shards(path)
        return nbytes
    stem = path.name.removesuffix(_SUFFIX)
    stems = [f"{stem}-{number:05}-of-{len(shards):05}-" for number in range(1, len(shards) + 1)]
    index = _index_of(path)
    # Remains of a killed save of one file. They are next to the target of a symbolic link.
    _remove_leftovers(os.path.realpath(path))
    new = _SetReplacement(index, [(path.with_name(name), _SUFFIX) for name in stems], _RECORD)
    try:
        written = {}
        for private_path, final_path, shard in zip(new.members, new.names, shards, strict=True):
            nbytes, _, _, index_crc64 = plan(final_path, shard).start_into(private_path).wait(report, True)
            written[final_path.name] = nbytes, index_crc64
        metadata = {
            "total_size": sum(tensor.nbytes for *_, tensor in tensors),
            **fingerprints(written),
            **_replaced(path),
        }
        placed = zip(new.names, shards, strict=True)
        weight_map = {name: final_path.name for final_path, shard in placed for name, *_ in shard}
        foreign = new.commit(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    except BaseException:
        new.discard()
        raise
    warn_of_kept(index, foreign)
    if "deepnvme.replaces" in metadata:
        msg = f"{path}: this file is kept, since it may not be deepnvme's. deepnvme loads the new shards instead"
        warn_caller(f"{msg}; other programs prefer the file: remove or move it")
    return sum(nbytes for nbytes, _ in written.values())


def retire_shards(path: Path) -> None:
    """Remove the index and the shards of an earlier save that the file ``path`` replaces."""
    index = _index_of(path)
    try:
        kept = _retire_set(index, _RECORD)
    except OSError as error:
        if is_of_handler(error):
            raise
        if error.errno == errno.ENAMETOOLONG:
            return  # no index can have that name
        # The new file is complete and counts, so this is no error.
        warn_caller(f"{index}: the files of an earlier save could not be removed ({error}); remove them")
        return
    warn_of_kept(index, kept or [])
    if kept is None:
        if _is_loaded(path):
            warn_caller(f"{index}: this index may not be deepnvme's, and is kept. Loaders prefer the new {path.name}")
        else:
            warn_caller(
                f"{index}: this index is damaged, and is kept. Remove it: until then deepnvme loads neither file"
            )


def _is_loaded(path: Path) -> bool:
    """Whether a load of ``path`` reads that file, and not the files of an index of its name."""
    try:
        return [names for _, names, _ in _find_set(path, False)] == [None]
    except (OSError, ValueError) as error:
        if is_of_handler(error):
            raise
        return False


def fingerprints(files: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Return the index entry with the fingerprint of each file."""
    records = {name: {"bytes": nbytes, "index_crc64": f"{crc64:016x}"} for name, (nbytes, crc64) in files.items()}
    return {"deepnvme.files": records}


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + _INDEX)


def _replaced(path: Path) -> dict[str, Any]:
    """Return size and time of a file of the same name. It is not removed, and other loaders would prefer it."""
    try:
        stat = path.stat()
    except OSError as error:
        if is_of_handler(error):
            raise
        return {}
    return {"deepnvme.replaces": {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}}


def _cut(tensors: list[NamedTensor], max_shard_bytes: int) -> list[list[NamedTensor]]:
    shards: list[list[NamedTensor]] = []
    bytes_left = -math.inf
    for name, tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes > bytes_left:
            shards.append([])
            bytes_left = max_shard_bytes
        shards[-1].append((name, tensor))
        bytes_left -= nbytes
    return shards
