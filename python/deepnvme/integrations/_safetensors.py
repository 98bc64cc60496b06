"""``safetensors.safe_open`` through the engine, with the same methods, for libraries that call it."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._checkpoint.load_memory import LoadBuffers
from deepnvme._checkpoint.load_request import TensorEntry, storage_entries, tensor_entries
from deepnvme._deepnvme import _CheckpointReader
from deepnvme._utils.devices import checked_device
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing_extensions import Self

# Dtypes as safetensors spells them.
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "float4_e2m1fn_x2": "F4",
}  # fmt: skip


class TensorFile:
    """A safetensors file whose tensors are read on request, even by several threads at once."""

    def __init__(
        self, filename: str | os.PathLike[str], framework: str = "pt", device: Any = "cpu", **_backend: Any
    ) -> None:
        if framework not in ("pt", "torch", "pytorch"):
            msg = f"framework is {framework!r}; deepnvme makes torch tensors, use framework='pt'"
            raise InvalidArgumentError(msg)
        self._path = filename
        self._device = checked_device(device)
        self._reader = _CheckpointReader(filename, None, False)
        self._reader.check(None)
        if self._reader.format != "safetensors":
            msg = f"{os.fsdecode(filename)}: this is a torch archive, not safetensors; read it with deepnvme.load"
            raise InvalidArgumentError(msg)
        self._storages = storage_entries(self._reader)
        self._tensors = {entry.name: entry for entry in tensor_entries(self._reader)}

    def keys(self) -> list[str]:
        """Return the names of the tensors, in alphabetical order."""
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of the file."""
        return sorted(self._tensors, key=lambda name: self._storages[self._tensors[name].storage].offset)

    def metadata(self) -> dict[str, str]:
        """Return the metadata of the file."""
        return dict(self._reader.metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        entry = self._find(name)
        buffers = LoadBuffers(self._reader, [entry.storage], self._device)
        buffers.finish("auto", None)
        return buffers.flat(entry.storage, getattr(torch, entry.dtype)).view(entry.shape).to(self._device)

    def get_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read some rows of a tensor, which are contiguous in the file."""
        entry = self._find(name)
        rows = torch.empty([max(0, stop - start), *entry.shape[1:]], dtype=getattr(torch, entry.dtype))
        if rows.numel():
            self._reader.read_range(entry.storage, start * math.prod(entry.shape[1:]) * rows.itemsize, rows)
        return rows.to(self._device)

    def get_slice(self, name: str) -> TensorSlice:
        """Return an object that reads when it is indexed."""
        entry = self._find(name)
        return TensorSlice(self, name, _NAMES.get(entry.dtype, entry.dtype), entry.shape)

    def _find(self, name: str) -> TensorEntry:
        if name not in self._tensors:
            msg = f"{self._path}: the file does not contain the tensor {name!r}"
            raise KeyError(msg)
        return self._tensors[name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the file stays open while anyone may read it."""


class TensorSlice:
    """A tensor that is read when indexed: ``[...]`` reads all of it, ``[3:5]`` reads two rows."""

    def __init__(self, file: TensorFile, name: str, dtype: str, shape: list[int]) -> None:
        self._file = file
        self._name = name
        self._dtype = dtype
        self._shape = shape

    def get_shape(self) -> list[int]:
        """Return the sizes."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the dtype, as safetensors spells it."""
        return self._dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, slice) and self._shape:
            start, stop, step = first.indices(self._shape[0])
            if step == 1:
                rows = self._file.get_rows(self._name, start, stop)
                # A copy, so that the result does not keep the other columns in memory.
                cut = (slice(None), *rest)
                return rows[cut].contiguous()
        tensor = self._file.get_tensor(self._name)
        return tensor if index is Ellipsis else tensor[index].clone()
