"""One file of a distributed checkpoint: reads the requested parts, and compares them with its checksums."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme._checkpoint.source_files import storage_entries, tensor_entries
from deepnvme._deepnvme import _CheckpointReader, _crc64
from deepnvme.errors import ChecksumError, CorruptFileError

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._deepnvme import Engine, _Loading

# The fraction of checksum chunks that a sample compares, as in a load of the whole file.
_SAMPLED_FRACTION = 1 / 32
# A shard and its index come from the same save, or one of them was changed later.
_REMEDY = "restore the whole folder from a copy, or load another checkpoint"


class Shard:
    """Collects requests. Whole tensors are compared in memory; for parts, the checksum chunks of the file are read."""

    def __init__(
        self, path: Path, engine: Engine | None, verify: str, fingerprint: tuple[int, int] | None = None
    ) -> None:
        self.path = path
        self._verify = verify
        self._reader = _CheckpointReader(path, engine, False)
        if verify != "off":
            self._reader.check(fingerprint)
        if verify == "full" and not self._reader.has_checksums:
            msg = (
                f"{path}: the file has no checksums (DeepnvmeWriter writes them by default), so nothing can be "
                "compared; use verify='off'"
            )
            raise ValueError(msg)
        self._storages = storage_entries(self._reader)
        self._tensors = {entry.name: entry for entry in tensor_entries(self._reader)}
        self._whole: list[Any] = []
        self._ranges: list[tuple[str, int, int]] = []
        self._loading: _Loading | None = None
        self.parts: list[tuple[Path, int, torch.Tensor]] = []
        """Reads of parts of tensors: file, offset and memory. They go into one batch with those of other files."""

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, list[int]]:
        """Return the dtype and sizes of a tensor in the file."""
        if name not in self._tensors:
            raise CorruptFileError(
                f"{self.path}: the file does not contain {name!r}, which deepnvme.json lists; {_REMEDY}"
            )
        entry = self._tensors[name]
        return getattr(torch, entry.dtype), entry.shape

    def raise_mismatch(self, name: str, what: str) -> NoReturn:
        """Report a tensor that contradicts the index."""
        raise CorruptFileError(f"{self.path}: {name!r} {what}; {_REMEDY}")

    def request(self, name: str, start: int, memory: torch.Tensor) -> None:
        """Request the bytes of a tensor from ``start`` on."""
        index = self._tensors[name].storage
        storage = self._storages[index]
        if start + memory.nbytes > storage.nbytes:
            self.raise_mismatch(name, f"has {storage.nbytes} bytes, which is smaller than deepnvme.json says")
        if memory.nbytes == 0:
            return
        if memory.nbytes == storage.nbytes and memory.is_contiguous():
            self._whole.append(((storage.offset, storage.nbytes, [(index, 0)]), memory))
        else:
            self.parts.append((self.path, storage.offset + start, memory))
            self._ranges.append((name, start, memory.nbytes))

    def start(self) -> None:
        """Start to read whole tensors."""
        if self._whole:
            self._loading = self._reader.start(self._whole)

    def finish(self) -> None:
        """Wait for whole tensors, and compare all with checksums. The caller has read the parts.

        More requests may follow.
        """
        if self._loading is not None:
            self._loading.finish(self._verify, None)
        ranges = self._ranges
        self._whole, self.parts, self._ranges, self._loading = [], [], [], None
        if ranges and self._verify != "off" and self._reader.has_checksums:
            self._compare_parts(ranges)

    def _compare_parts(self, ranges: list[tuple[str, int, int]]) -> None:
        texts = dict(self._reader.metadata)
        checksums = json.loads(texts["deepnvme.checksums"])
        cell_bytes = int(checksums["cell_bytes"])
        chunks = sorted(
            {
                (name, chunk)
                for name, start, nbytes in ranges
                for chunk in range(start // cell_bytes, -(-(start + nbytes) // cell_bytes))
            }
        )
        if self._verify != "full":
            chunks = random.sample(chunks, math.ceil(len(chunks) * _SAMPLED_FRACTION))
        for name, chunk in chunks:
            storage = self._storages[self._tensors[name].storage]
            start = chunk * cell_bytes
            offset, length = storage.offset + start, min(cell_bytes, storage.nbytes - start)
            if f"{_crc64(self.path, offset, length):016x}" != checksums["records"][name][chunk * 16 :][:16]:
                msg = (
                    f"{self.path}: {name}: {length} bytes from {offset} on differ from those that were saved "
                    "(CRC-64); verify='off' reads them anyway"
                )
                error = ChecksumError(msg)
                error.offset = offset
                raise error
