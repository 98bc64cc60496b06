"""Memory that a load fills. Tensors that are read at once must not share any."""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, Any

import torch

from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from deepnvme._deepnvme import _PlainTargets


class FilledMemory:
    """The targets so far. None of the plain ones shares memory with another plain one."""

    def __init__(self, plain: _PlainTargets | None = None) -> None:
        self._plain = plain
        self._sources: dict[Any, Any] = {}
        self._ranges: list[tuple[int, int, str]] = []

    def add(self, file: str, name: str, target: torch.Tensor, source: Any) -> Any:
        """Add a target. Returns the source of an earlier target that is the same view. Refuses a partial overlap."""
        view = (target.device, target.data_ptr(), target.dtype, target.shape, target.stride())
        if (earlier := self._sources.setdefault(view, source)) is not source:
            return earlier
        # Other views may share a range without sharing an element, as the columns of a matrix do.
        if target.is_contiguous():
            begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
            if self._plain is not None and target.device.type == "cpu":
                other = self._plain.overlapping(begin, target.nbytes)
                # A plain target that the file cannot fill as it is comes here itself.
                if other is not None and other != name:
                    raise _sharing(file, other, name)
            at = bisect(self._ranges, (begin, end, name))
            for other_begin, other_end, other in self._ranges[max(at - 1, 0) : at + 1]:
                if begin < other_end and other_begin < end:
                    raise _sharing(file, other, name)
            self._ranges.insert(at, (begin, end, name))
        return None


def _sharing(file: str, one: str, other: str) -> InvalidArgumentError:
    msg = f"{file}: {one} and {other} share a part of their memory, and cannot both be filled"
    return InvalidArgumentError(f"{msg}; give each a tensor of its own")


def compare(what: str, target: torch.Tensor, source: torch.Tensor) -> None:
    """Refuse a source that differs from what the target holds. Bytes are compared: NaN equals itself."""
    target = target.detach()
    expected, found = torch.empty_like(target, device="cpu").copy_(source), target.cpu()
    first, second = (
        tensor.contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for tensor in (found, expected)
    )
    if not torch.equal(first, second):
        msg = f"{what} shares its memory with another tensor, and the file has different values for the two"
        raise InvalidArgumentError(f"{msg}; give each a tensor of its own (they hold the values of the other now)")
