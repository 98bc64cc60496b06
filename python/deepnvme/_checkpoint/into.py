"""Filling tensors that are there already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._checkpoint.arena import allocate
from deepnvme._checkpoint.devices import is_reached
from deepnvme._checkpoint.names import tensors_of

if TYPE_CHECKING:
    from deepnvme._checkpoint.reading import Request

# Tensors that cannot be filled directly go through memory of that size, one group after the other.
_GROUP_BYTES = 64 << 20


def fill(request: Request, into: Mapping[str, Any], cast: bool) -> Mapping[str, Any]:
    """Fill each tensor of ``into`` with the one of its name."""
    targets = dict(tensors_of(into))
    # The file names a tensor of a flat state dict as its key, also where that has dots.
    missing = set(targets)
    for path, names in request.files():
        reader = request.open(path, exact=True)
        storages = reader.storages()
        direct: list[Any] = []
        copied: list[tuple[torch.Tensor, Any]] = []
        for name, dtype_name, shape, strides, offset, index in reader.tensors():
            if name not in missing or (names is not None and name not in names):
                continue
            missing.discard(name)
            target, dtype = targets[name], getattr(torch, dtype_name)
            _check(f"{request.name}: {name}", target, dtype, shape, cast)
            described = (dtype, shape, strides, offset, index)
            if _is_direct(target, described, storages[index][1]):
                if target.numel():
                    direct.append(((storages[index][3], target.nbytes, [(index, 0)]), target.detach()))
            else:
                copied.append((target, described))
        if direct:
            reader.start(direct).finish(request.verify, request.tell)
        _copy(request, reader, copied, storages)
    if missing:
        shown = ", ".join(sorted(missing)[:5])
        msg = f"{request.name}: the file does not have {shown}; leave them out of into, or check the names"
        raise KeyError(msg)
    return into


def _check(what: str, target: torch.Tensor, dtype: torch.dtype, shape: list[int], cast: bool) -> None:
    if list(target.shape) != shape:
        msg = f"{what} has the shape {shape} in the file, and {list(target.shape)} in into"
        raise ValueError(msg)
    if target.dtype != dtype and not cast:
        msg = f"{what} is {dtype} in the file, and {target.dtype} in into; allow that with cast=True"
        raise TypeError(msg)


def _is_direct(target: torch.Tensor, described: Any, storage_bytes: int) -> bool:
    """Whether the file has the tensor's bytes as the target wants them, and nothing else in that storage."""
    dtype, shape, strides, offset, _ = described
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    is_plain = (
        target.layout is torch.strided
        and target.is_contiguous()
        and is_reached(target.device)
        and not (target.is_conj() or target.is_neg())
    )
    return is_plain and target.dtype == dtype and offset == 0 and target.nbytes == storage_bytes


def _copy(request: Request, reader: Any, copied: list[tuple[torch.Tensor, Any]], storages: Any) -> None:
    """Read whole storages into passing memory, group by group, and copy from there."""
    while copied:
        group: list[tuple[torch.Tensor, Any]] = []
        group_bytes = 0
        while copied and (not group or group_bytes + storages[copied[-1][1][4]][1] <= _GROUP_BYTES):
            group.append(copied.pop())
            group_bytes += storages[group[-1][1][4]][1]
        flats: dict[int, Any] = {}
        arenas = []
        for _, (*_, index) in group:
            _, nbytes, _, place = storages[index]
            if nbytes and index not in flats:
                memory, start = allocate(nbytes)
                view = memoryview(memory)[start : start + nbytes]
                flats[index] = torch.frombuffer(view, dtype=torch.uint8)
                arenas.append(((place, nbytes, [(index, 0)]), view))
        if arenas:
            reader.start(arenas).finish(request.verify, request.tell)
        for target, (dtype, shape, strides, offset, index) in group:
            if target.numel():
                storage = flats[index].untyped_storage()
                source = torch.empty(0, dtype=dtype).set_(storage, offset, shape, strides)
                with torch.no_grad():
                    target.copy_(source)
