"""Limits on the objects of a pickle: nothing that a file creates is much larger than the file.

Most objects are as large as their bytes in the file. The functions checked here can make more: they take a size as a
number, copy earlier objects, or iterate over a view that repeats one element.
"""

from __future__ import annotations

import _codecs
import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import _utils

from deepnvme._deepnvme import _HashCosts
from deepnvme.errors import UnsafeFileError

if TYPE_CHECKING:
    from deepnvme._deepnvme import _CheckpointReader

# Functions that copy their argument, and the types it may have. Subclasses are excluded: they can iterate as they like.
_COPIERS = (set, frozenset, bytes, bytearray, collections.Counter, collections.OrderedDict, torch.Size)
_PLAIN = (list, tuple, dict, set, frozenset, str, bytes, bytearray, *_COPIERS)
# Functions that hash the elements of their argument.
_HASHERS = (set, frozenset, collections.Counter, collections.OrderedDict)
# Attributes that Python looks up to copy, pickle or restore an object.
_PROTOCOL_NAMES = frozenset(
    ("__class__", "__dict__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__")
)
# Encodings of bytes in protocol 2. Others can grow, or take long.
_ENCODINGS = ("latin1", "latin-1")
_WITH_STORAGE = (_utils._rebuild_tensor, _utils._rebuild_tensor_v2, _utils._rebuild_tensor_v3, _utils._rebuild_qtensor)  # noqa: SLF001
# Elements that may be copied, and bytes of views that may be read, whatever the size of the file: they are harmless.
_SLACK = 1 << 16
_WALK_SLACK_BYTES = 16 << 20


class SizeLimits:
    """Rejects objects that would be much larger than the file."""

    def __init__(self, path: object, reader: _CheckpointReader) -> None:
        self._path = path
        self._reader = reader
        self._copied = 0
        self._copied_max: int | None = None
        self._walked_bytes = 0
        self.hash_costs = _HashCosts(reader)

    def check(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Check the arguments of an allowed function or class."""
        rule = _RULES.get(id(function))
        if rule is not None:
            rule(self, function, arguments)
        elif isinstance(function, type) and issubclass(function, torch.TypedStorage | torch.UntypedStorage):
            self._refuse("makes a storage that is not in it")

    def check_state(self, state: Any) -> None:
        """Check the state of a tensor: storage, offset, sizes, strides."""
        if not (isinstance(state, tuple) and len(state) == 4):  # noqa: PLR2004
            self._refuse("sets a tensor to something other than a part of a storage")
        self._check_view(_utils._rebuild_tensor, state)  # noqa: SLF001

    def check_attributes(self, state: Any, *, is_known: bool = False) -> None:
        """Check the attributes of an object: a dict, or a pair of dicts for the object and its slots.

        They are copied for each object. Names that Python and pickle look up by themselves are rejected: their values
        would be called.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)  # noqa: PLR2004
        for part in parts:
            if part is None:
                continue
            if type(part) is not dict:
                self._refuse("gives an object attributes that are not a dict of names")
            for name in part:
                if type(name) is not str or name in _PROTOCOL_NAMES or (not is_known and _is_special(name)):
                    self._refuse(f"gives an object the attribute {name!r}, which is not allowed")
            self._count(part)
            self.hash_costs.charge(part, False)

    def _check_parameter(self, _: Any, arguments: tuple[Any, ...]) -> None:
        if len(arguments) != 4:  # noqa: PLR2004
            self._refuse("makes a parameter in a way that torch.save does not")
        self.check_attributes(arguments[3])

    def _check_copy(self, function: Any, arguments: tuple[Any, ...]) -> None:
        if function is bytearray and len(arguments) == 2 and type(arguments[0]) is str:  # noqa: PLR2004
            self._check_encode(_codecs.encode, arguments)
            return
        if len(arguments) > 1 or any(type(argument) not in _PLAIN for argument in arguments):
            what = "a size" if any(isinstance(argument, int) for argument in arguments) else "something"
            self._refuse(f"makes {function.__name__} of {what} without contents")
        for argument in arguments:
            self._count(argument)
            if function in _HASHERS:
                keys = argument
                if function is collections.OrderedDict and not isinstance(argument, dict):
                    if any(type(pair) not in (list, tuple) or len(pair) != 2 for pair in argument):  # noqa: PLR2004
                        self._refuse("makes a dict of items that are not pairs")
                    keys = [pair[0] for pair in argument]
                self.hash_costs.charge(keys, function in (set, frozenset))

    def _check_encode(self, _: Any, arguments: tuple[Any, ...]) -> None:
        if [type(argument) for argument in arguments] != [str, str] or arguments[1] not in _ENCODINGS:
            self._refuse("encodes text in a way that torch.save does not")
        self._count(arguments[0])

    def _count(self, argument: Any) -> None:
        self._copied += len(argument)
        if self._copied <= _SLACK:
            return
        if self._copied_max is None:
            # In the pickle, each element takes at least one byte.
            self._copied_max = self._reader.described_nbytes + _SLACK
        if self._copied > self._copied_max:
            self._refuse("copies the same objects again and again")

    def _check_view(self, function: Any, arguments: tuple[Any, ...]) -> None:
        storage, offset, size, stride = arguments[:4] if len(arguments) >= 4 else (None,) * 4  # noqa: PLR2004
        if not isinstance(storage, torch.TypedStorage):
            self._refuse("makes a tensor without a storage")
        is_v3 = function is _utils._rebuild_tensor_v3 and len(arguments) > 6  # noqa: PLR2004, SLF001
        dtype = arguments[6] if is_v3 else storage.dtype
        is_described = isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride)
        if not (isinstance(dtype, torch.dtype) and is_described) or not _are_counts((offset, *size, *stride)):
            self._refuse("describes a tensor with values that are not numbers")
        storage_items = storage._untyped_storage.nbytes() // dtype.itemsize  # noqa: SLF001
        if (
            0 not in size
            and offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) >= storage_items
        ):
            self._refuse("makes a tensor that extends beyond its storage")
        if function is _utils._rebuild_qtensor:  # noqa: SLF001
            # torch allocates its memory before it becomes a view.
            if _product(size) > storage_items:
                self._refuse("makes a tensor that is larger than its storage")
            _check_quantizer(self, size, arguments[4])

    def _check_sparse(self, _: Any, arguments: tuple[Any, ...]) -> None:
        layout, parts = arguments
        # torch reads each index, however often a view repeats it.
        for part in parts[: 1 if layout is torch.sparse_coo else 2]:
            self._walk(part, torch.int64)

    def _check_conversion(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self._walk(*arguments[:2])

    def _check_tensor(self, _: Any, arguments: tuple[Any, ...]) -> None:
        if arguments:
            self._refuse("makes a tensor of a size without contents")

    def _walk(self, tensor: Any, dtype: Any) -> None:
        if not (isinstance(tensor, torch.Tensor) and isinstance(dtype, torch.dtype)):
            self._refuse("makes a tensor of an object that is not a tensor")
        self._walked_bytes += tensor.numel() * dtype.itemsize
        # The narrowest elements take one byte, and the widest 16.
        if self._walked_bytes > 16 * self._reader.nbytes + _WALK_SLACK_BYTES:
            self._refuse("makes tensors of views that are larger than the file")

    def _refuse(self, what: str) -> Any:
        raise UnsafeFileError(f"{self._path}: the file {what}: it is damaged, or was made to exhaust memory")


# The check of each function, by its identity: an object can claim to equal anything. A table of bound methods in the
# object would be a reference cycle, which keeps the file open until the next collection.
_Rule = Callable[[SizeLimits, Any, tuple[Any, ...]], None]
_BY_FUNCTION: dict[Any, _Rule] = {
    **dict.fromkeys(_COPIERS, SizeLimits._check_copy),  # noqa: SLF001
    **dict.fromkeys(_WITH_STORAGE, SizeLimits._check_view),  # noqa: SLF001
    _codecs.encode: SizeLimits._check_encode,  # noqa: SLF001
    _utils._rebuild_sparse_tensor: SizeLimits._check_sparse,  # noqa: SLF001
    _utils._rebuild_device_tensor_from_cpu_tensor: SizeLimits._check_conversion,  # noqa: SLF001
    torch.Tensor: SizeLimits._check_tensor,  # noqa: SLF001
    _utils._rebuild_parameter_with_state: SizeLimits._check_parameter,  # noqa: SLF001
}
_RULES = {id(function): rule for function, rule in _BY_FUNCTION.items()}


def _check_quantizer(limits: SizeLimits, size: tuple[int, ...], quantizer: Any) -> None:
    """Check the scales and zero points of channels: not all torch versions compare their number with the tensor's."""
    if not isinstance(quantizer, tuple) or len(quantizer) < 4:  # noqa: PLR2004
        return
    _, scales, zero_points, axis = quantizer[:4]
    counts = [
        len(part) if isinstance(part, list | torch.Tensor) and _is_row(part) else -1 for part in (scales, zero_points)
    ]
    if not isinstance(axis, int) or not 0 <= axis < len(size) or counts != [size[axis]] * 2:
        limits._refuse("has a quantised tensor whose numbers of channels and scales differ")  # noqa: SLF001


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_row(part: list[Any] | torch.Tensor) -> bool:
    return isinstance(part, list) or part.dim() == 1


def _are_counts(numbers: tuple[Any, ...]) -> bool:
    return all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product
