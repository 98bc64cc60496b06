"""Refuses targets of a load that share memory."""

from __future__ import annotations

from typing import Any

import torch

from deepnvme._deepnvme import _PlainTargets
from deepnvme._utils.capture import relaxed_capture_for
from deepnvme._utils.tensors import copy_exactly
from deepnvme.errors import InvalidArgumentError


class TargetOverlaps:
    """The targets of a load. Call ``check`` once all are known, before the first byte changes."""

    def __init__(self, plain: _PlainTargets | None = None) -> None:
        self._plain = _PlainTargets({}) if plain is None else plain
        self._sources: dict[Any, Any] = {}
        self._views: list[tuple[str, int, list[int], list[int], int]] = []

    def add(self, name: str, target: torch.Tensor, source: Any) -> Any:
        """Add a target. Returns the source of an earlier target that is the same view, or ``None``."""
        view = (target.device, target.data_ptr(), target.dtype, target.shape, target.stride())
        if (earlier := self._sources.setdefault(view, source)) is not source:
            return earlier
        itemsize = target.element_size()
        strides = [stride * itemsize for stride in target.stride()]
        self._views.append((name, target.data_ptr(), list(target.shape), strides, itemsize))
        return None

    def check(self, file: str) -> None:
        """Refuse targets that share a part of their memory: one would overwrite what another was filled with."""
        shared = self._plain.first_shared(self._views) if self._views else None
        if shared is None:
            return
        one, other = sorted(shared)
        if one == other:
            msg = f"{file}: {one} has elements that share their memory (expand() and as_strided() make such tensors)"
            raise InvalidArgumentError(f"{msg}; fill a tensor of its own, such as {one}.contiguous()")
        msg = f"{file}: {one} and {other} share a part of their memory, and cannot both be filled"
        raise InvalidArgumentError(f"{msg}; give each a tensor of its own")


def compare(what: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Refuse a source that differs from the bytes that an earlier source has put into the same target.

    NaN equals itself.
    """
    target = target.detach()
    with relaxed_capture_for(target.device):
        expected, found = copy_exactly(torch.empty_like(target, device="cpu"), source), target.cpu()
    first, second = (
        tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in (found, expected)
    )
    if not torch.equal(first, second):
        msg = f"{what} shares its memory with another tensor, and the file has different values for the two; give each"
        raise InvalidArgumentError(f"{msg} a tensor of its own (the memory now holds the other tensor's values)")
