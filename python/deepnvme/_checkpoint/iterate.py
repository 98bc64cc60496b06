"""``iterate_weights``: yield the weights of a model while the next ones are read, in bounded memory."""

from __future__ import annotations

import os
import resource
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from deepnvme._checkpoint.load_request import SourceFile, TensorEntry, for_files, storage_entries, tensor_entries
from deepnvme._deepnvme import StripeSet, _CheckpointReader
from deepnvme._utils.public import parse_bytes
from deepnvme._utils.tensors import copy_exactly, require_torch
from deepnvme.errors import ChangedFileError, InvalidArgumentError

if TYPE_CHECKING:
    import torch

    from deepnvme._checkpoint.load_memory import BufferPool, LoadBuffers, PoolBuffer
    from deepnvme._deepnvme import Engine

    _NextChunk = tuple[_CheckpointReader, "Chunk"] | None

# Default read-ahead: what a fast disk reads in a tenth of a second.
PREFETCH_BYTES = 512 << 20
# Neighbouring tensors are read together up to this size: large enough for the disk, small enough to be reused soon.
_CHUNK_BYTES = 16 << 20
# Enough to keep a disk busy. More is read ahead only if the caller is slower than the disk: reused memory costs
# nothing, but fresh memory costs as much as reading into it.
_IN_FLIGHT_BYTES_MIN = 32 << 20
# Bytes of a chunk's first and last page that belong to its neighbours.
_EDGES_BYTES = 2 << 12
# Files stay open from the start until they use this fraction of the descriptors of the process.
_DESCRIPTOR_FRACTION = 1 / 8
# Tensors below this fraction of their chunk are copied, so that a kept scale does not keep the whole chunk.
_COPY_BELOW_FRACTION = 1 / 64


def iterate_weights(
    source: str | bytes | os.PathLike[str] | StripeSet | Iterable[str | os.PathLike[str]],
    *,
    prefetch_bytes: int | str = PREFETCH_BYTES,
    wanted: Callable[[str], bool] | None = None,
    verify: Literal["auto", "off", "sample", "full"] = "auto",
    engine: Engine | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a model's safetensors files once, in file order, while the next ones are read.

    Memory in use is at most ``prefetch_bytes``, plus one tensor or 16 MiB, whichever is larger, for tensors that the
    caller still holds. A tensor belongs to the caller, who may change it and should release it. All files are opened
    and compared with their index before the first tensor is yielded. A model that is replaced before then is read in
    its new state; one that is replaced later, in its old state.

    Args:
        source: a folder in Hugging Face's layout, an index (``*.index.json``), a file, a stripe set, or several files.
        prefetch_bytes: memory for tensors that are being read or wait for the caller: bytes, or text such as
            ``"1GB"``. A larger tensor is read alone. Default 512 MiB.
        wanted: returns whether the tensor of a name is needed; others are not read. Default: all.
        verify: how much to compare with the files' checksums, if they have any, as for ``deepnvme.load``. Default
            ``"auto"``.
        engine: the engine that transfers the bytes. Default: the default engine.

    Yields:
        The name of a tensor and the tensor, in host memory.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.errors.CorruptFileError: a file is truncated or damaged; the message says which, and where.
        deepnvme.errors.ChecksumError: the bytes are not those that were saved.
        deepnvme.errors.UnsupportedError: the model is packed; only ``deepnvme.stream`` decodes it.
        deepnvme.errors.ChangedFileError: a file was written to in place, or replaced in a model with more files than
            can stay open.
        ValueError: a file is not a safetensors file, two files contain tensors of the same name, or
            ``prefetch_bytes`` is not a size.

    Example:
        >>> from deepnvme.integrations.weights import iterate_weights
        >>> size = deepnvme.save({"weight": torch.ones(2, 3)}, "model.safetensors")
        >>> [(name, tuple(tensor.shape)) for name, tensor in iterate_weights("model.safetensors", prefetch_bytes="1GB")]
        [('weight', (2, 3))]
    """
    require_torch("iterate_weights")
    request = _Request(parse_bytes(prefetch_bytes, "prefetch_bytes"), wanted, verify, engine)
    if isinstance(source, StripeSet):
        source = source.manifest_path
    if isinstance(source, str | bytes | os.PathLike):
        files = for_files(source, verify, request.open_all)
    else:
        files = request.open_all([SourceFile(path) for path in source])
    return request.tensors(files)


@dataclass(frozen=True)
class Chunk:
    """Neighbouring tensors of a file that are read together."""

    tensors: list[TensorEntry]
    nbytes: int


def split_chunks(tensors: list[TensorEntry], sizes: list[int], chunk_bytes: int) -> Iterator[Chunk]:
    """Split a file's tensors, in order, into chunks of at most ``chunk_bytes``. A larger tensor is its own chunk."""
    chunk: list[TensorEntry] = []
    nbytes = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        if chunk and nbytes + size > chunk_bytes:
            yield Chunk(chunk, nbytes)
            chunk, nbytes = [], 0
        chunk.append(tensor)
        nbytes += size
    if chunk:
        yield Chunk(chunk, nbytes)


@dataclass(frozen=True)
class _SourceFile:
    path: Any
    names: set[str] | None
    reader: _CheckpointReader | None
    """``None`` if more files exist than can stay open."""
    fingerprint: tuple[int, int] | None
    """Size, and checksum of the index, of a file that is opened again."""


@dataclass(frozen=True)
class _Request:
    prefetch_bytes: int
    wanted: Callable[[str], bool] | None
    verify: str
    engine: Engine | None

    @property
    def _chunk_bytes(self) -> int:
        return max(1, min(_CHUNK_BYTES, self.prefetch_bytes // 4 - _EDGES_BYTES))

    def open_all(self, found: list[SourceFile]) -> list[_SourceFile]:
        """Open all files, so that all belong to one save. Keep as many of them open as the limits allow."""
        descriptors_left = max(1, int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * _DESCRIPTOR_FRACTION))
        files = []
        owners: dict[str, Any] = {}
        for path, names, listed in found:
            reader = self._open(path, names)
            if names is None and len(found) > 1:
                _check_unique(owners, path, reader)
            if self.verify != "off":
                reader.check(listed)
            descriptors_left -= 1
            stays_open = descriptors_left >= 0
            fingerprint = None if stays_open else (reader.nbytes, reader.index_crc64())
            files.append(
                _SourceFile(path, None if names is None else set(names), reader if stays_open else None, fingerprint)
            )
        return files

    def _reader(self, file: _SourceFile) -> _CheckpointReader:
        if file.reader is not None:
            return file.reader
        try:
            reader = self._open(file.path, None)
            is_same = (reader.nbytes, reader.index_crc64()) == file.fingerprint
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
            msg = f"{path}: this is a {reader.format} file, not safetensors; convert it with `deepnvme convert`"
            raise InvalidArgumentError(msg)
        reader.refuse_packed()
        return reader

    def tensors(self, files: list[_SourceFile]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors while reading ahead, within the memory limit."""
        from deepnvme._checkpoint.load_memory import BufferPool  # noqa: PLC0415

        pool = BufferPool(self.prefetch_bytes)
        chunks = self._chunks(files)
        in_flight: deque[_ChunkRead] = deque()
        upcoming = next(chunks, None)
        while upcoming is not None or in_flight:
            upcoming = self._start(upcoming, chunks, in_flight, pool, _IN_FLIGHT_BYTES_MIN)
            chunk_read = in_flight.popleft()
            for item in chunk_read.finish(self.verify):
                # For each tensor, since memory comes back when the caller releases the last tensor of a chunk. At least
                # as much as the caller is about to copy: nothing more is started until then.
                upcoming = self._start(upcoming, chunks, in_flight, pool, max(_IN_FLIGHT_BYTES_MIN, item[1].nbytes))
                yield item
                del item
            pool.release(chunk_read.nbytes)

    def _start(
        self,
        upcoming: _NextChunk,
        chunks: Iterator[_NextChunk],
        in_flight: deque[_ChunkRead],
        pool: BufferPool,
        busy_bytes: int,
    ) -> _NextChunk:
        """Start reads until the disk has ``busy_bytes`` to do. Returns the next chunk."""
        while upcoming is not None:
            # All chunks except those of large tensors use one buffer size, so any buffer can be reused.
            nbytes = max(self._chunk_bytes, upcoming[1].nbytes) + _EDGES_BYTES
            is_due = pool.has_idle(nbytes) or _pending_bytes(in_flight) < busy_bytes
            if pool.acquired_bytes and not (is_due and pool.can_acquire(nbytes)):
                break
            in_flight.append(_ChunkRead(*upcoming, pool.acquire(nbytes)))
            upcoming = next(chunks, None)
        return upcoming

    def _chunks(self, files: list[_SourceFile]) -> Iterator[tuple[_CheckpointReader, Chunk]]:
        files.reverse()
        while files:
            # A file is closed once its last chunk is being read.
            file = files.pop()
            reader, names = self._reader(file), file.names
            del file
            storages = storage_entries(reader)
            tensors = [entry for entry in tensor_entries(reader) if self._is_wanted(entry.name, names)]
            tensors.sort(key=lambda entry: storages[entry.storage].offset)
            sizes = [storages[entry.storage].nbytes for entry in tensors]
            for chunk in split_chunks(tensors, sizes, self._chunk_bytes):
                yield reader, chunk

    def _is_wanted(self, name: str, names: set[str] | None) -> bool:
        return (names is None or name in names) and (self.wanted is None or self.wanted(name))


def _check_unique(owners: dict[str, Any], path: Any, reader: _CheckpointReader) -> None:
    """Reject tensors that two files contain: the caller would get the last one."""
    for name, *_ in reader.tensors():
        if (owner := owners.setdefault(name, path)) is not path:
            msg = f"{path}: the tensor {name!r} is in {owner} as well; give one of the files, or the index of the model"
            raise InvalidArgumentError(msg)


class _ChunkRead:
    """A chunk that is being read into a buffer of its own."""

    def __init__(self, reader: _CheckpointReader, chunk: Chunk, buffer: PoolBuffer) -> None:
        import torch  # noqa: PLC0415

        from deepnvme._checkpoint.load_memory import LoadBuffers  # noqa: PLC0415

        self.chunk = chunk
        self.nbytes = buffer.nbytes
        wanted = [entry.storage for entry in chunk.tensors]
        self._buffers: LoadBuffers | None = LoadBuffers(reader, wanted, torch.device("cpu"), pool_buffer=buffer)

    @property
    def is_done(self) -> bool:
        return self._buffers is None or self._buffers.is_done

    def finish(self, verify: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Wait for the bytes, then yield the tensors without keeping them."""
        import torch  # noqa: PLC0415

        buffers, self._buffers = self._buffers, None
        if buffers is None:
            return
        buffers.finish(verify, None)
        for entry in self.chunk.tensors:
            tensor = buffers.flat(entry.storage, getattr(torch, entry.dtype)).view(entry.shape)
            if tensor.nbytes < self.chunk.nbytes * _COPY_BELOW_FRACTION:
                tensor = copy_exactly(torch.empty_like(tensor), tensor)
            yield entry.name, tensor
            del tensor


def _pending_bytes(in_flight: deque[_ChunkRead]) -> int:
    return sum(chunk_read.nbytes for chunk_read in in_flight if not chunk_read.is_done)
