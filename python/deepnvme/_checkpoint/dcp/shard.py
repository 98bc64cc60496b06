"""One file of a distributed checkpoint: reads the requested parts, and compares them with its checksums."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from deepnvme._deepnvme import _CheckpointReader, _crc64
from deepnvme.errors import ChecksumError, CorruptFileError

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._deepnvme import Engine, _Loading

# One checksum chunk in 32 is compared in a sample, as in a load of the whole file.
_SAMPLED_SHARE = 32


class Shard:
    """Collects requests. Whole tensors are compared in memory; for parts, the checksum chunks of the file are read."""

    def __init__(self, path: Path, engine: Engine | None, verify: str, identity: tuple[int, int] | None = None) -> None:
        self.path = path
        self._verify = verify
        self._reader = _CheckpointReader(path, engine, False)
        if verify != "off":
            self._reader.check(identity)
        if verify == "full" and not self._reader.has_checksums:
            msg = f"{path}: the file has no checksums (DeepnvmeWriter writes them by default); use verify='sample'"
            raise ValueError(msg)
        storages = self._reader.storages()
        # By name: dtype, sizes, number of the storage, its bytes, and its offset.
        self._tensors = {
            name: (getattr(torch, dtype), shape, index, storages[index][1], storages[index][3])
            for name, dtype, shape, _, _, index in self._reader.tensors()
        }
        self._whole: list[Any] = []
        self._ranges: list[tuple[str, int, int]] = []
        self._loading: _Loading | None = None
        self.parts: list[tuple[Path, int, torch.Tensor]] = []
        """Reads for one batch with the parts of other files."""

    def dtype_and_shape(self, name: str) -> tuple[torch.dtype, list[int]]:
        """Return the dtype and sizes of a tensor in the file."""
        if name not in self._tensors:
            raise CorruptFileError(f"{self.path}: the file does not contain {name!r}, which deepnvme.json lists")
        return self._tensors[name][:2]

    def raise_mismatch(self, name: str, what: str) -> NoReturn:
        """Report a tensor that contradicts the index."""
        raise CorruptFileError(f"{self.path}: {name!r} {what}")

    def request(self, name: str, start: int, memory: torch.Tensor) -> None:
        """Request the bytes of a tensor from ``start`` on."""
        _, _, index, nbytes, offset = self._tensors[name]
        if start + memory.nbytes > nbytes:
            raise CorruptFileError(f"{self.path}: {name!r} is smaller than deepnvme.json says")
        if memory.nbytes == 0:
            return
        if memory.nbytes == nbytes and memory.is_contiguous():
            self._whole.append(((offset, nbytes, [(index, 0)]), memory))
        else:
            self.parts.append((self.path, offset + start, memory))
            self._ranges.append((name, start, memory.nbytes))

    def start(self) -> None:
        """Start to read whole tensors."""
        if self._whole:
            self._loading = self._reader.start(self._whole)

    def finish(self) -> None:
        """Wait for whole tensors, and compare all. The parts were read before."""
        if self._loading is not None:
            self._loading.finish(self._verify, None)
        if self._ranges and self._verify != "off" and self._reader.has_checksums:
            self._compare_parts()

    def _compare_parts(self) -> None:
        texts = dict(self._reader.metadata)
        checksums = json.loads(texts["deepnvme.checksums"])
        cell_bytes = int(checksums["cell_bytes"])
        chunks = sorted(
            {
                (name, chunk)
                for name, start, nbytes in self._ranges
                for chunk in range(start // cell_bytes, -(-(start + nbytes) // cell_bytes))
            }
        )
        if self._verify != "full":
            chunks = random.sample(chunks, -(-len(chunks) // _SAMPLED_SHARE))
        for name, chunk in chunks:
            _, _, _, nbytes, offset = self._tensors[name]
            start = chunk * cell_bytes
            length = min(cell_bytes, nbytes - start)
            if f"{_crc64(self.path, offset + start, length):016x}" != checksums["records"][name][chunk * 16 :][:16]:
                msg = (
                    f"{self.path}: {name}: {length} bytes from {offset + start} on differ from those that were saved "
                    "(CRC-64); verify='off' reads them anyway"
                )
                error = ChecksumError(msg)
                error.offset = offset + start
                raise error
