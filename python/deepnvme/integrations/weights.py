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
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deepnvme._checkpoint.load import retry_if_replaced
from deepnvme._checkpoint.save import require_torch
from deepnvme._deepnvme import _CheckpointReader, _find_set
from deepnvme._utils.arguments import parse_bytes
from deepnvme.errors import ChangedFileError

if TYPE_CHECKING:
    import torch

    from deepnvme._checkpoint.buffer_pool import BufferPool, PoolBuffer
    from deepnvme._checkpoint.load_buffer import LoadBuffers
    from deepnvme._deepnvme import Engine

    _ListedFile = tuple[Any, list[str] | None, tuple[int, int] | None]
    _NextChunk = tuple[_CheckpointReader, "Chunk"] | None

# What is read ahead unless something else is asked for: a tenth of a second of a fast disk.
AHEAD_BYTES = 512 << 20
# Neighbours in a file travel together up to this size: large enough for the disk, small enough to be used again soon.
_CHUNK_BYTES = 16 << 20
# So much keeps a disk at work. More is read in advance only where the caller is slower than the disk: memory that is
# used again costs nothing, and memory that nobody has used yet as much as reading does.
_IN_FLIGHT_BYTES_MIN = 32 << 20
# What a chunk reaches into the pages in front of it and behind it.
_EDGES_BYTES = 2 << 12
# Of the descriptors that a process may have, one in so many is for files that stay open from the beginning.
_DESCRIPTOR_SHARE = 8
# A tensor smaller than this part of its chunk is copied out of it: whoever keeps a scale must not keep its neighbours.
_COPY_BELOW = 64


def iterate_weights(
    source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    ahead: int | str = AHEAD_BYTES,
    wanted: Callable[[str], bool] | None = None,
    verify: Literal["auto", "off", "sample", "full"] = "auto",
    engine: Engine | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give every tensor of a model's safetensors files once, in the order of the files, while the next ones are read.

    The memory in use is what ``ahead`` allows, and beyond it at most one tensor or 16 MiB, whichever is larger, for
    what the caller still holds. A tensor belongs to the caller, who may change it and should let go of it. All files
    are opened, and compared with what their index says of them, before the first tensor is given. A model that is
    replaced by then is read as it is afterwards; one that is replaced later is read as it was.

    Args:
        source: a folder as Hugging Face lays it out, an index (``*.index.json``), a file, or several files.
        ahead: how much is in memory at once, given or on its way: bytes, or a text such as ``"1GB"``. A tensor that is
            larger is read all the same, alone. Default 512 MiB.
        wanted: says by name which tensors are needed; others are not read. Default: all.
        verify: how much is compared with the checksums of files that have them, as for ``deepnvme.load``.
        engine: which engine moves the bytes. Default: the default engine.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.errors.CorruptFileError: a file is split_chunks or damaged; the message names it and the place.
        deepnvme.errors.ChecksumError: the bytes are not those that were saved.
        deepnvme.errors.ChangedFileError: a file was replaced, of a model with more files than can stay open.
        ValueError: a file is not a safetensors file, two files have a tensor of one name, or ``ahead`` is no size.
    """
    require_torch("iterate_weights")
    request = _Request(parse_bytes(ahead, "ahead"), wanted, verify, engine)
    if isinstance(source, str | os.PathLike):
        files = retry_if_replaced(source, lambda: _find_set(source, verify != "off"), request.open_all)
    else:
        files = request.open_all([(path, None, None) for path in source])
    return request.tensors(files)


@dataclass(frozen=True)
class Chunk:
    """Neighbours in a file that are read together."""

    tensors: list[Any]
    nbytes: int


def split_chunks(tensors: list[Any], sizes: list[int], chunk_bytes: int) -> Iterator[Chunk]:
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
class _File:
    path: Any
    names: set[str] | None
    reader: _CheckpointReader | None
    """``None`` where there are more files than can stay open."""
    identity: tuple[int, int] | None
    """Bytes, and the checksum of the index, of one that is opened again."""


@dataclass(frozen=True)
class _Request:
    ahead: int
    wanted: Callable[[str], bool] | None
    verify: str
    engine: Engine | None

    @property
    def _chunk_bytes(self) -> int:
        return max(1, min(_CHUNK_BYTES, self.ahead // 4 - _EDGES_BYTES))

    def open_all(self, found: list[_ListedFile]) -> list[_File]:
        """Open all files, so that all are of one save, and have them stay open as far as that goes."""
        left = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _DESCRIPTOR_SHARE)
        files = []
        owners: dict[str, Any] = {}
        for path, names, listed in found:
            reader = self._open(path, names)
            if names is None and len(found) > 1:
                _check_unique(owners, path, reader)
            if self.verify != "off":
                reader.check(listed)
            left -= 1
            is_kept = left >= 0
            identity = None if is_kept else (reader.nbytes, reader.index_crc64())
            files.append(_File(path, None if names is None else set(names), reader if is_kept else None, identity))
        return files

    def _reader(self, file: _File) -> _CheckpointReader:
        if file.reader is not None:
            return file.reader
        try:
            reader = self._open(file.path, None)
            is_same = (reader.nbytes, reader.index_crc64()) == file.identity
        except FileNotFoundError:
            is_same = False
        if not is_same:
            error = ChangedFileError(
                f"{file.path}: this file was replaced while the weights were read; read them again"
            )
            error.filename = os.fspath(file.path)
            raise error
        return reader

    def _open(self, path: Any, names: list[str] | None) -> _CheckpointReader:
        reader = _CheckpointReader(path, self.engine, False, names)
        if reader.format != "safetensors":
            msg = f"{path}: this is a {reader.format} file; a model server reads safetensors, see deepnvme convert"
            raise ValueError(msg)
        return reader

    def tensors(self, files: list[_File]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield while reading ahead: what has been started and not been let go of stays within the bound."""
        from deepnvme._checkpoint.buffer_pool import BufferPool  # noqa: PLC0415

        memory = BufferPool(self.ahead)
        chunks = self._chunks(files)
        in_flight: deque[_ChunkRead] = deque()
        upcoming = next(chunks, None)
        while upcoming is not None or in_flight:
            upcoming = self._start(upcoming, chunks, in_flight, memory, _IN_FLIGHT_BYTES_MIN)
            chunk_read = in_flight.popleft()
            for given in chunk_read.finish(self.verify):
                # At each tensor, for the memory of those before comes back when the caller lets go of the last of them;
                # and as much as the caller is about to copy, for until then nothing more is started.
                upcoming = self._start(upcoming, chunks, in_flight, memory, max(_IN_FLIGHT_BYTES_MIN, given[1].nbytes))
                yield given
                del given
            memory.release(chunk_read.nbytes)

    def _start(
        self,
        upcoming: _NextChunk,
        chunks: Iterator[_NextChunk],
        in_flight: deque[_ChunkRead],
        memory: BufferPool,
        busy_bytes: int,
    ) -> _NextChunk:
        """Start what may be started, until the disk has so much to do, and give what comes then."""
        while upcoming is not None:
            # All but those of large tensors are of one size, and so any of them can be used again.
            nbytes = max(self._chunk_bytes, upcoming[1].nbytes) + _EDGES_BYTES
            is_due = memory.has_idle(nbytes) or _pending_bytes(in_flight) < busy_bytes
            if memory.acquired_bytes and not (is_due and memory.can_acquire(nbytes)):
                break
            in_flight.append(_ChunkRead(*upcoming, memory.acquire(nbytes)))
            upcoming = next(chunks, None)
        return upcoming

    def _chunks(self, files: list[_File]) -> Iterator[tuple[_CheckpointReader, Chunk]]:
        files.reverse()
        while files:
            # What has been read of a file stays open no longer than its last chunk is on its way.
            file = files.pop()
            reader, names = self._reader(file), file.names
            del file
            storages = reader.storages()
            tensors = [tensor for tensor in reader.tensors() if self._is_wanted(tensor[0], names)]
            tensors.sort(key=lambda tensor: storages[tensor[5]][3])
            for chunk in split_chunks(tensors, [storages[tensor[5]][1] for tensor in tensors], self._chunk_bytes):
                yield reader, chunk

    def _is_wanted(self, name: str, names: set[str] | None) -> bool:
        return (names is None or name in names) and (self.wanted is None or self.wanted(name))


def _check_unique(owners: dict[str, Any], path: Any, reader: _CheckpointReader) -> None:
    """Refuse a tensor that two files have: the caller would get whichever comes last."""
    for name, *_ in reader.tensors():
        if (owner := owners.setdefault(name, path)) is not path:
            msg = f"{path}: the tensor {name!r} is in {owner} as well; give one of the files, or the index of the model"
            raise ValueError(msg)


class _ChunkRead:
    """A chunk on its way into memory that is its own until the caller has let go of the tensors."""

    def __init__(self, reader: _CheckpointReader, chunk: Chunk, block: PoolBuffer) -> None:
        import torch  # noqa: PLC0415

        from deepnvme._checkpoint.load_buffer import LoadBuffers  # noqa: PLC0415

        self.chunk = chunk
        self.nbytes = block.nbytes
        wanted = [tensor[5] for tensor in chunk.tensors]
        self._buffers: LoadBuffers | None = LoadBuffers(reader, wanted, torch.device("cpu"), pool_buffer=block)

    @property
    def is_done(self) -> bool:
        return self._buffers is None or self._buffers.is_done

    def finish(self, verify: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the bytes, then give the tensors; this object and the iterator keep none of them."""
        import torch  # noqa: PLC0415

        buffers, self._buffers = self._buffers, None
        if buffers is None:
            return
        buffers.finish(verify, None)
        for name, dtype, shape, _, _, index in self.chunk.tensors:
            tensor = buffers.flat(index, getattr(torch, dtype)).view(shape)
            if tensor.nbytes * _COPY_BELOW < self.chunk.nbytes:
                tensor = tensor.clone()
            yield name, tensor
            del tensor


def _pending_bytes(in_flight: deque[_ChunkRead]) -> int:
    return sum(chunk_read.nbytes for chunk_read in in_flight if not chunk_read.is_done)
