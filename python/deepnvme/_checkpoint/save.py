"""``deepnvme.save``: write a whole state to files that replace the old ones atomically.

A large state may become several safetensors files and an index, as Hugging Face writes them. Each save uses new file
names, and replacing the index switches to the new state. Afterwards the old shards are removed if the old index
recorded them as deepnvme's. The remains of killed saves are removed as well, and no other file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._deepnvme import (
    StripeSet,
    _find_set,
    _not_plain,
    _plan_archive,
    _plan_safetensors,
    _refuse_list_name,
    _remove_leftovers,
    _retire_set,
    _SetReplacement,
)
from deepnvme._utils.devices import engine_reaches
from deepnvme._utils.gc_pause import gc_paused
from deepnvme._utils.interpreter import check_interpreter
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.metadata_file import parts_listed, warn_of_kept, warn_of_kept_parts
from deepnvme._utils.public import (
    DURABILITIES,
    check_choice,
    check_engine,
    check_file_path,
    check_flag,
    parse_bytes,
    public,
    to_path,
    warn_caller,
)
from deepnvme._utils.tensors import refuse_fake_tensors, require_torch
from deepnvme._utils.terminal import ProgressArgument, progress_callback
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Literal, TypeAlias

    import torch

    from deepnvme._deepnvme import Engine, _SavePlan, _SaveStaging, _Saving

    _Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | StripeSet
    _Report: TypeAlias = Callable[[int, int], object] | None

SAFETENSORS_SUFFIX = ".safetensors"
_NUMPY_REMEDY = "convert it: torch.from_numpy(array) of an array, torch.tensor(number) of a number"
_METADATA_REFUSED = "metadata belongs to safetensors; for a .pt file, put it into the dict that you save"
_SHARDS_REFUSED = "max_shard_bytes splits safetensors files only; name the file .safetensors, or leave it out"
# Metadata about the file itself: its checksums, and how its weights are packed.
_RESERVED_PREFIX = "deepnvme."
# How Hugging Face's loaders call tensors of torch.
_FORMAT = "pt"
_INDEX = ".index.json"
# Keys of the record in an index that lists the index's own files.
_RECORD = ("metadata", "deepnvme.owned")


@public
def save(
    obj: object,
    path: _Path,
    *,
    engine: Engine | None = None,
    durability: Literal["none", "data", "full"] = "full",
    checksums: bool = True,
    metadata: Mapping[str, str] | None = None,
    max_shard_bytes: int | str | None = None,
    progress: ProgressArgument = None,
) -> int:
    """Save a state dict, or any object, and return the size of the file in bytes.

    The file is replaced atomically: a crash, a full disk or an exception leaves the old file or the new one, never a
    mixture. ``*.safetensors`` makes a safetensors file. Any other name makes a torch archive, which ``torch.load``
    reads like one of ``torch.save`` (including ``weights_only=True`` and ``mmap=True``). Tensors that share memory
    also share it after loading. The tensors must not change during the save.

    An archive may contain objects of any class. If ``load`` would refuse one, a warning names its key, and the call
    that allows it.

    Args:
        obj: for safetensors, a dict of names to tensors; for an archive, anything that ``torch.save`` accepts.
        path: ``str``, ``bytes``, ``os.PathLike``, or a ``StripeSet`` to write to several disks at once.
        engine: the engine that transfers the bytes. Default: the default engine.
        durability: the data that survives a power cut once this returns: ``"none"`` none, ``"data"`` the bytes and the
            size, ``"full"`` (default) also the file's name in its folder.
        checksums: keep a checksum of each MiB for ``load(verify=...)`` and ``deepnvme verify``. They take 16 bytes
            for each MiB, and other readers ignore them. Default True.
        metadata: a dict of str to add to a safetensors file. Keys that begin with ``deepnvme.`` are omitted: they
            describe the file that they came from. ``format`` is ``"pt"`` in every file.
        max_shard_bytes: the most bytes of tensors in one safetensors file, or text such as ``"5GB"``; a larger tensor
            gets a file of its own. Larger states become several files and an index, ``PATH.index.json``, as Hugging
            Face writes them. Replacing the index switches to the new state. Each save uses new file names, and removes
            the old files that the old index recorded as deepnvme's. ``load`` of the path returns the state that was
            saved last. ``load`` of the folder finds it only under the name ``model.safetensors``. Default: one file.
        progress: ``True`` for a bar, ``False`` for none, or a function of bytes done and bytes in total. Default: a
            bar on a terminal, after one second.

    Returns:
        The size of the file in bytes; with ``max_shard_bytes``, of all files.

    Raises:
        deepnvme.Error: the disk or the file system failed. For a full disk, ``errno`` is ``errno.ENOSPC`` and the
            message says how much space was needed.
        TypeError, ValueError: the format cannot store the object; the message names it. Or an argument is invalid.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> deepnvme.save(model.state_dict(), "model.pt") > 0
        True
        >>> sorted(torch.load("model.pt", weights_only=True))
        ['bias', 'weight']
    """
    check_interpreter()
    check_file_path(path, "save", 'use `with deepnvme.open(path, "wb") as file: torch.save(obj, file)`')
    options = SaveOptions(engine, durability, checksums)
    report = progress_callback(progress, "saving", path)
    shard_bytes_max = None if max_shard_bytes is None else parse_bytes(max_shard_bytes, "max_shard_bytes")
    if isinstance(path, StripeSet):
        if shard_bytes_max is not None:
            msg = "a stripe set is one file on several disks already; leave max_shard_bytes out"
            raise InvalidArgumentError(msg)
        before = parts_listed(path)
        nbytes = _save_file(obj, path, options, metadata, report)
        warn_of_kept_parts(path, before)
        return nbytes
    _refuse_list_name(path)
    if not is_safetensors(path):
        if shard_bytes_max is not None:
            raise InvalidArgumentError(_SHARDS_REFUSED)
        return _save_file(obj, path, options, metadata, report)
    name = to_path(path)
    if shard_bytes_max is None:
        nbytes = _save_file(obj, path, options, metadata, report)
        retire_shards(name)
        return nbytes
    require_torch("save")
    refuse_fake_tensors("save")
    tensors = checked_tensors(obj)
    texts = _metadata_entries(metadata)

    def plan(shard: Path, part: list[NamedTensor]) -> _SavePlan:
        return plan_safetensors(shard, part, options, texts)

    return save_shards(name, tensors, shard_bytes_max, plan, report)


def save_without_warnings(obj: object, path: str | os.PathLike[str]) -> None:
    """Save a file for a library that loads it itself, even if it has values that ``load`` refuses."""
    _save_file(obj, path, SaveOptions(), None, None, warns=False)


def _save_file(
    obj: object,
    path: _Path,
    options: SaveOptions,
    metadata: Mapping[str, str] | None,
    report: _Report,
    *,
    warns: bool = True,
) -> int:
    """Save one file, in the format of its name."""
    require_torch("save")
    refuse_fake_tensors("save")
    if is_safetensors(path):
        saving = start_safetensors(path, checked_tensors(obj), options, _metadata_entries(metadata))
    elif metadata is not None:
        raise InvalidArgumentError(_METADATA_REFUSED)
    else:
        saving = start_archive(obj, path, options, warns=warns)
    return saving.wait(report, True)[0]


@dataclass
class SaveOptions:
    """How to write a file."""

    engine: Engine | None = None
    durability: Literal["none", "data", "full"] = "full"
    checksums: bool = True
    staging: _SaveStaging | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine)
        check_choice(self.durability, "durability", DURABILITIES)
        check_flag(self.checksums, "checksums")


def start_archive(
    obj: object, path: _Path, options: SaveOptions, *, is_private: bool = False, warns: bool = False
) -> _Saving:
    """Start to write a torch archive.

    Args:
        obj: the object.
        path: the file.
        options: how to write it.
        is_private: whether it keeps a private name.
        warns: whether to warn of objects that ``load`` would refuse.
    """
    from deepnvme._checkpoint.pickler import pickle_with_storages  # noqa: PLC0415

    return plan_archive(*pickle_with_storages(obj, warns=warns), path, options).start(is_private)


def plan_archive(pickle: bytes, storages: list[torch.UntypedStorage], path: _Path, options: SaveOptions) -> _SavePlan:
    """Plan a torch archive of a pickled object and its storages."""
    before: list[tuple[str, object]] = [
        ("data.pkl", pickle),
        (".format_version", b"1"),
        (".storage_alignment", b"64"),
        ("byteorder", sys.byteorder.encode()),
    ]
    # torch gives each archive an identity of forty digits. Here equal objects get equal ones.
    identity = int.from_bytes(hashlib.sha256(pickle).digest(), "little") % 10**40
    after: list[tuple[str, object]] = [
        ("version", b"3\n"),
        (".data/serialization_id", f"{identity:040}".encode()),
    ]
    # The engine copies from devices that it reaches. Storages on other devices are copied to host memory first.
    reached = [storage if engine_reaches(storage.device) else storage.cpu() for storage in storages]  # type: ignore[no-untyped-call]
    return _plan_archive(path, before, reached, after, vars(options))


def start_safetensors(
    path: _Path,
    tensors: list[NamedTensor],
    options: SaveOptions,
    metadata: list[tuple[str, str]] | None = None,
    *,
    is_private: bool = False,
) -> _Saving:
    """Start to write a safetensors file. It keeps a private name if ``is_private``."""
    return plan_safetensors(path, tensors, options, metadata).start(is_private)


def plan_safetensors(
    path: _Path, tensors: list[NamedTensor], options: SaveOptions, metadata: list[tuple[str, str]] | None = None
) -> _SavePlan:
    """Plan a safetensors file."""
    return _plan_safetensors(path, tensors, _metadata_entries(None) if metadata is None else metadata, vars(options))


def _metadata_entries(metadata: Mapping[str, str] | None) -> list[tuple[str, str]]:
    """Return the entry that Hugging Face's loaders expect, and those of the caller."""
    more = []
    for key, value in (metadata or {}).items():
        pair: tuple[object, object] = (key, value)
        for text in pair:
            if not isinstance(text, str):
                msg = f"metadata must map str to str, but has {text!r} ({type(text).__name__}); convert it with str"
                raise TypeError(msg)
            _check_utf8(text, "metadata")
        if key == "format" and value != _FORMAT:
            msg = f"metadata: 'format' is {_FORMAT!r} in every file of deepnvme, not {value!r}; leave it out"
            raise InvalidArgumentError(msg)
        if key != "format" and not key.startswith(_RESERVED_PREFIX):
            more.append((key, value))
    return [("format", _FORMAT), *more]


NamedTensor = tuple[str, "torch.Tensor"]


@gc_paused
def checked_tensors(obj: object) -> list[NamedTensor]:
    """Return the tensors of a flat dict as the engine can write them.

    Raises:
        TypeError: a safetensors file cannot hold one of them; the message names it.
    """
    if not isinstance(obj, Mapping):
        msg = f"a safetensors file holds a dict of names and tensors, not {type(obj).__name__}; save it as a .pt file"
        raise TypeError(msg)
    named = [*obj.items()]
    # To look at each of ten thousand plain tensors from Python takes a tenth of their save.
    for index in _not_plain(named):
        named[index] = _checked(*named[index])
    return named


def _checked(name: Any, tensor: Any) -> NamedTensor:
    """Refuse a tensor without memory that the engine can read, and copy it if it is out of reach."""
    import torch  # noqa: PLC0415

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        what = f"{name!r}: {type(tensor).__name__}"
        remedy = (
            _NUMPY_REMEDY
            if type(tensor).__module__ == "numpy"
            else "leave it out, or save a .pt file (a Checkpointer: format='pt')"
        )
        msg = f"a safetensors file holds names and tensors, and this has {what}; {remedy}"
        raise TypeError(msg)
    _check_utf8(name, "a tensor's name")
    if torch.nn.parameter.is_lazy(tensor):
        msg = f"{name!r}: this parameter has no shape yet; run the model once, which initialises it"
        raise TypeError(msg)
    if tensor.is_nested:
        msg = f"{name!r}: this tensor is nested; save the tensors of tensor.unbind()"
        raise TypeError(msg)
    if tensor.layout is not torch.strided:
        msg = f"{name!r}: this tensor has the layout {tensor.layout}, which is not one block of memory"
        raise TypeError(f"{msg}; save tensor.to_dense(), or the tensors that it is made of, or save a .pt file")
    if tensor.is_meta:
        # Of a placeholder for a weight on disk, this raises an error that says more.
        tensor.untyped_storage()
        msg = f"{name!r}: this tensor is on the meta device and has no values"
        raise TypeError(f"{msg}; initialise or load it first, or leave it out")
    if tensor._is_zerotensor():  # noqa: SLF001
        msg = f"{name!r}: this is one of torch's zero tensors, which have no memory; save tensor.clone()"
        raise TypeError(msg)
    if not tensor.is_cpu and not engine_reaches(tensor.device):
        tensor = tensor.cpu()
    return name, tensor.detach()


def _check_utf8(text: str, what: str) -> None:
    """Reject text that UTF-8 cannot encode."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        msg = f"{what} is {text!r}, which contains a lone surrogate and cannot be UTF-8; rename it, or save a .pt file"
        raise InvalidArgumentError(msg)


def is_safetensors(path: _Path) -> bool:
    """Whether the name means a safetensors file."""
    if isinstance(path, StripeSet):
        return path.paths[0].endswith(SAFETENSORS_SUFFIX)
    return os.fsdecode(path).endswith(SAFETENSORS_SUFFIX)


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
    stem = path.name.removesuffix(SAFETENSORS_SUFFIX)
    stems = [f"{stem}-{number:05}-of-{len(shards):05}-" for number in range(1, len(shards) + 1)]
    index = _index_of(path)
    # Remains of a killed save of one file. They are next to the target of a symbolic link.
    _remove_leftovers(os.path.realpath(path))
    new = _SetReplacement(index, [(path.with_name(name), SAFETENSORS_SUFFIX) for name in stems], _RECORD)
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
