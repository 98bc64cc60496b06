"""The weights of a model, one after the other, at the speed of the disk: for whoever fills a model that has its memory.

A model server builds the modules first, then copies every weight of the files into them, or the part of it that its
rank has. It needs each tensor for a moment only, so nobody needs room for all of them.

Example::

    from deepnvme.integrations.weights import iterate_weights

    for name, tensor in iterate_weights("path/to/model", ahead="1GB"):
        parameters[name].copy_(tensor)
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deepnvme._checkpoint.writing import check_torch
from deepnvme._deepnvme import _CheckpointReader, _locate
from deepnvme._sizes import parse_bytes

if TYPE_CHECKING:
    import torch

    from deepnvme._checkpoint.arena import Arenas
    from deepnvme._deepnvme import Engine

# What is read ahead unless something else is asked for: a tenth of a second of a fast disk.
AHEAD_BYTES = 512 << 20
# Neighbours in a file travel together up to this size: large enough for the disk, small enough to free memory soon.
_CHUNK_BYTES = 64 << 20
# A tensor smaller than this part of its chunk is copied out of it: whoever keeps a scale must not keep its neighbours.
_SMALL = 64


def iterate_weights(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    ahead: int | str = AHEAD_BYTES,
    wanted: Callable[[str], bool] | None = None,
    verify: Literal["off", "sample", "full"] = "sample",
    engine: Engine | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every tensor of a model's safetensors files once, in the order of the files, while the next ones are read.

    The memory in use is what ``ahead`` allows, and beyond it at most one tensor or 64 MiB, whichever is larger, for
    what the caller still holds. A tensor belongs to the caller, who may change it and should let go of it. All files
    are opened, and their headers compared with their lengths, before the first tensor is given.

    Args:
        source: a folder as Hugging Face lays it out, an index (``*.index.json``), a file, or several files.
        ahead: how much is in memory at once, given or on its way: bytes, or a text such as ``"1GB"``. A tensor that is
            larger is read all the same, alone. Default 512 MiB.
        wanted: says by name which tensors are needed; others are not read. Default: all.
        verify: how much is compared with the checksums of files that have them, as for ``deepnvme.load``.
        engine: which engine moves the bytes. Default: the default engine.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.errors.CorruptFileError: a file is cut or damaged; the message names it and the place.
        deepnvme.errors.ChecksumError: the bytes are not those that were saved.
        ValueError: a file is not a safetensors file, or ``ahead`` is no size.
    """
    check_torch("iterate_weights")
    request = _Request(parse_bytes(ahead, "ahead"), wanted, verify, engine)
    if isinstance(source, str | os.PathLike):
        files: list[tuple[Any, set[str] | None]]
        files = [(path, None if names is None else set(names)) for path, names in _locate(source)]
    else:
        files = [(path, None) for path in source]
    for path, _ in files:
        request.open(path)
    return request.tensors(files)


@dataclass(frozen=True)
class Chunk:
    """Neighbours in a file that are read together."""

    tensors: list[Any]
    nbytes: int


def cut(tensors: list[Any], sizes: list[int], chunk_bytes: int) -> Iterator[Chunk]:
    """Cut a file's tensors, in their order, into chunks of at most so many bytes; a larger one is a chunk by itself."""
    begun: list[Any] = []
    nbytes = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if begun and nbytes + size > chunk_bytes:
            yield Chunk(begun, nbytes)
            begun, nbytes = [], 0
        begun.append(tensor)
        nbytes += size
    if begun:
        yield Chunk(begun, nbytes)


@dataclass(frozen=True)
class _Request:
    ahead: int
    wanted: Callable[[str], bool] | None
    verify: str
    engine: Engine | None

    def open(self, path: Any) -> _CheckpointReader:
        reader = _CheckpointReader(path, self.engine, False)
        if reader.format != "safetensors":
            msg = f"{path}: this is a {reader.format} file; a model server reads safetensors, see deepnvme convert"
            raise ValueError(msg)
        return reader

    def tensors(self, files: list[tuple[Any, set[str] | None]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield while reading ahead: what has been started and not been let go of stays within the bound."""
        chunks = self._chunks(files)
        flying: deque[_Flight] = deque()
        held = 0
        following = next(chunks, None)
        while following is not None or flying:
            while following is not None and (not flying or held + following[1].nbytes <= self.ahead):
                flying.append(_Flight(*following))
                held += following[1].nbytes
                following = next(chunks, None)
            nbytes = flying[0].chunk.nbytes
            yield from flying.popleft().land(self.verify)
            held -= nbytes

    def _chunks(self, files: list[tuple[Any, set[str] | None]]) -> Iterator[tuple[_CheckpointReader, Chunk]]:
        limit = max(1, min(_CHUNK_BYTES, self.ahead // 4))
        for path, names in files:
            # Opened again, for a model may have more files than a process may have open.
            reader = self.open(path)
            storages = reader.storages()
            tensors = [tensor for tensor in reader.tensors() if self._is_wanted(tensor[0], names)]
            tensors.sort(key=lambda tensor: storages[tensor[5]][3])
            for chunk in cut(tensors, [storages[tensor[5]][1] for tensor in tensors], limit):
                yield reader, chunk

    def _is_wanted(self, name: str, names: set[str] | None) -> bool:
        return (names is None or name in names) and (self.wanted is None or self.wanted(name))


class _Flight:
    """A chunk on its way into memory of its own."""

    def __init__(self, reader: _CheckpointReader, chunk: Chunk) -> None:
        import torch  # noqa: PLC0415

        from deepnvme._checkpoint.arena import Arenas  # noqa: PLC0415

        self.chunk = chunk
        wanted = [tensor[5] for tensor in chunk.tensors]
        self._arenas: Arenas = Arenas(reader, wanted, torch.device("cpu"))

    def land(self, verify: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the bytes, then give the tensors; this object and the iterator keep none of them."""
        import torch  # noqa: PLC0415

        self._arenas.finish(verify, None)
        for name, dtype, shape, _, _, index in self.chunk.tensors:
            tensor = self._arenas.flat(index, getattr(torch, dtype)).view(shape)
            if tensor.nbytes * _SMALL < self.chunk.nbytes:
                tensor = tensor.clone()
            yield name, tensor
            del tensor
