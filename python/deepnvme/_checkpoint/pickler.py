"""Pickles an object for a torch archive, and collects its storages."""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

# The names of these functions are part of the file format: archives describe tensors by them.
from torch._utils import _rebuild_parameter, _rebuild_tensor_v2, _rebuild_tensor_v3, get_tensor_metadata
from torch.nn import Parameter

from deepnvme._checkpoint.nested_states import DEPTH_MAX, each_with_keys, expression, find_keys
from deepnvme._checkpoint.safe_unpickler import ALLOWING_CALL, advice_to_allow, loadable_globals
from deepnvme._deepnvme import _check_pickle, _pickle_plain
from deepnvme._utils.gc_pause import gc_paused
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.public import first_of, warn_caller
from deepnvme._utils.tensors import storage_shortage
from deepnvme.errors import InvalidArgumentError

# Objects that a warning names.
_REFUSED_MAX = 3
# The protocol of torch.save, which every reader of archives supports.
PROTOCOL = 2

_CLASSES: dict[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
    torch.quint8: torch.QUInt8Storage,
    torch.qint8: torch.QInt8Storage,
    torch.qint32: torch.QInt32Storage,
}


class _Reference:
    """Placeholder for a storage in a pickle."""

    __slots__ = ("persistent",)

    def __init__(self, persistent: tuple[object, ...]) -> None:
        self.persistent = persistent


class _NoHooks:
    """Placeholder for an empty dict of hooks. Each tensor has its own, and pickling them takes long."""


class Pickler(pickle.Pickler):
    """Collects the storages of all tensors into ``storages``, in the order of their keys."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[tuple[str, int, int], tuple[str, torch.dtype]] = {}
        # Classes and functions that `load` refuses, each with the object that needs it.
        self.refused: list[tuple[Any, Any]] = []
        self.has_meta_tensors = False
        # Arrays and numbers of numpy: pickle asks for their functions once, and not again for each.
        self.of_numpy: list[Any] = []
        self._loadable = loadable_globals()
        self._current: Any = None

    def persistent_id(self, obj: Any) -> tuple[object, ...] | None:
        """Replace storages by their keys. Everything else is pickled."""
        if type(obj) is _Reference:
            return obj.persistent
        if isinstance(obj, torch.TypedStorage):
            # The public accessor warns that typed storages are deprecated. Archives will always contain them.
            return self._refer(obj._untyped_storage, obj.dtype)[0]  # noqa: SLF001
        if isinstance(obj, torch.UntypedStorage):
            return self._untyped(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Describe ordinary tensors the shortest way: for ten thousand, the default takes as long as the disk."""
        kind = type(obj)
        if kind is _NoHooks:
            return OrderedDict, ()
        if isinstance(obj, Tensor) and obj.is_meta:
            self.has_meta_tensors = True
        if kind is Parameter and not obj.__dict__ and not obj._backward_hooks:  # noqa: SLF001
            return _rebuild_parameter, (obj.data, obj.requires_grad, _NoHooks())
        if kind is not Tensor or not _is_ordinary(obj):
            if isinstance(obj, Tensor):
                _check_has_storage(obj)
            self._note(obj)
            return NotImplemented
        if (shortage := storage_shortage(obj)) is not None:
            raise _RefusedError(obj, shortage)
        persistent, is_first_type = self._refer(obj.untyped_storage(), obj.dtype)
        view = (obj.storage_offset(), tuple(obj.shape), obj.stride(), obj.requires_grad, _NoHooks())
        # torch omits the types of this function.
        signs = (get_tensor_metadata(obj),) if obj.is_conj() or obj.is_neg() else ()  # type: ignore[no-untyped-call]
        if is_first_type:
            return _rebuild_tensor_v2, (_Reference(persistent), *view, *signs)
        # An archive has one dtype for each storage. Views with another dtype state their own.
        return _rebuild_tensor_v3, (_Reference(self._untyped(obj.untyped_storage())), *view, obj.dtype, *signs)

    def _note(self, obj: Any) -> None:
        """Note classes and functions that `load` refuses. They follow the object that is described by them."""
        if not isinstance(obj, type | FunctionType | BuiltinFunctionType):
            self._current = obj
            if type(obj).__module__ == "numpy" and hasattr(obj, "__array_interface__"):
                self.of_numpy.append(obj)
        elif id(obj) not in self._loadable:
            self.refused.append((obj, self._current))

    def _refer(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> tuple[tuple[object, ...], bool]:
        """Describe a storage. Returns the description, and whether the archive has ``dtype`` for it."""
        key, known = self._key(storage, dtype)
        if dtype not in _CLASSES:
            return self._untyped(storage), known == dtype
        return (
            "storage",
            _CLASSES[dtype],
            key,
            str(storage.device),
            storage.nbytes() // dtype.itemsize,
        ), known == dtype

    def _untyped(self, storage: torch.UntypedStorage) -> tuple[object, ...]:
        key, _ = self._key(storage, torch.uint8)
        return ("storage", torch.UntypedStorage, key, str(storage.device), storage.nbytes())

    def _key(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> tuple[str, torch.dtype]:
        nbytes = storage.nbytes()
        key = str(len(self.storages))
        # Empty storages have no address to identify them.
        place = (str(storage.device), storage.data_ptr(), nbytes) if nbytes else ("", len(self.storages), 0)
        known = self._keys.setdefault(place, (key, dtype))
        if known[0] == key:
            self.storages.append(storage)
        return known


class _RefusedError(Exception):
    """A tensor that cannot be rebuilt from storages."""

    def __init__(self, tensor: Tensor, reason: str) -> None:
        super().__init__(reason)
        self.tensor = tensor


def _check_has_storage(tensor: Tensor) -> None:
    if tensor.is_nested:
        reason = "this tensor is nested, and `load` cannot build it; save the tensors of tensor.unbind()"
        raise _RefusedError(tensor, reason)
    if tensor.dtype in (torch.quint4x2, torch.quint2x4):
        reason = f"elements of {tensor.dtype} share bytes, and `load` cannot build this tensor"
        raise _RefusedError(tensor, f"{reason}; save tensor.dequantize(), or tensor.view(torch.uint8)")
    if type(tensor).__name__ == "FakeTensor":
        raise _RefusedError(tensor, "this is a FakeTensor, which has no bytes; save the real tensor")
    if tensor.is_mkldnn:
        reason = "this tensor has oneDNN's own layout, whose bytes are not accessible; save tensor.to_dense()"
        raise _RefusedError(tensor, reason)


def _where(state: object, wanted: object) -> str | None:
    """Return the expression of keys that lead to an object of a state."""
    keys = find_keys(state, wanted)
    return None if keys is None else expression(keys)


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether storage, offset, sizes, strides and signs describe the tensor completely."""
    return (
        tensor.layout is torch.strided
        and tensor.dtype in _CLASSES
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_nested)
        and not tensor.__dict__
        and not tensor._backward_hooks  # noqa: SLF001
    )


@gc_paused
def pickle_with_storages(obj: object, *, warns: bool = False) -> tuple[bytes, list[torch.UntypedStorage]]:
    """Pickle an object. Returns the pickle, and its storages in the order of their keys.

    Args:
        obj: the object.
        warns: whether to warn of objects that ``load`` would refuse.
    """
    plain = _pickle_plain(obj)
    if plain is not None:
        return plain
    file = io.BytesIO()
    pickler = Pickler(file)
    try:
        pickler.dump(obj)
    except _RefusedError as refused:
        msg = f"{_where(obj, refused.tensor) or 'the state'}: {refused}"
        raise InvalidArgumentError(msg) from None
    except RecursionError as error:
        msg = "the objects of the state are nested too deeply to be saved and loaded again"
        limits = f"files have at most {DEPTH_MAX} levels, and Python's recursion limit is {sys.getrecursionlimit()}"
        raise InvalidArgumentError(f"{msg}; {limits}") from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        # Of a class of one's own, it comes from the object's own code.
        if type(error) not in (pickle.PicklingError, TypeError, AttributeError) or is_of_handler(error):
            raise
        msg = f"{_unpicklable(obj) or 'the state'}: this object cannot be pickled ({error})"
        raise TypeError(f"{msg}; save plain values in its place") from error
    _check_pickle(file.getvalue())
    if warns and pickler.has_meta_tensors:
        _warn_of_missing_values(obj)
    if warns and pickler.refused:
        _warn_of_refused(obj, pickler)
    return file.getvalue(), pickler.storages


def _unpicklable(state: object) -> str | None:
    """Return the expression of keys that lead to the first object that cannot be pickled."""
    for keys, found in each_with_keys(state):
        if isinstance(found, Tensor | Mapping | list | tuple):
            continue
        try:
            Pickler(io.BytesIO()).dump(found)
        except Exception as error:  # which one is known to the caller
            if is_of_handler(error):
                raise
            return expression(keys)
    return None


def warn_of_refused_values(state: object) -> None:
    """Warn of values that a load will refuse, in a state that torch's planners pickle value by value."""
    try:
        values = _without_tensors(state)
    except RecursionError:
        msg = "the state cannot be saved so that it could be loaded: its values are nested too deep"
        raise InvalidArgumentError(msg) from None
    pickler = Pickler(io.BytesIO())
    try:
        pickler.dump(values)
    except Exception as error:  # the save itself pickles them next, and raises
        if is_of_handler(error):
            raise
        return
    if pickler.refused:
        _warn_of_refused(values, pickler)


def _without_tensors(state: object) -> object:
    if isinstance(state, Mapping):
        return {key: _without_tensors(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return [_without_tensors(value) for value in state]  # type: ignore[attr-defined]
    return None if isinstance(state, Tensor) else state


def _warn_of_missing_values(state: object) -> None:
    """Name the tensors on the meta device."""
    found = (keys for keys, tensor in each_with_keys(state) if isinstance(tensor, Tensor) and tensor.is_meta)
    places = [expression(keys) for keys in found] or ["the state"]
    warn_caller(
        f"these tensors are on the meta device, so the file has their shapes and no values: {first_of(places)}; "
        "initialise or load the model first"
    )


def _warn_of_refused(state: object, pickler: Pickler) -> None:
    """Name the values of a state that ``load`` will refuse, and the call that allows them."""
    # An array needs several of numpy's internal functions and classes, which tell the user nothing.
    others = [(thing, owner) for thing, owner in pickler.refused if not _is_of_numpy(thing)]
    arrays = pickler.of_numpy if len(others) < len(pickler.refused) else []
    if not arrays:
        others = pickler.refused
    places = [f"{_where(state, array) or 'the state'} is {_numpy_advice(array)}" for array in arrays[:_REFUSED_MAX]]
    can_be_allowed = False
    for thing, owner in others[: _REFUSED_MAX - len(places)]:
        # A class may be the value itself, or that of an object inside of the value.
        found = [keys for keys in (_where(state, thing), _where(state, owner)) if keys is not None]
        advice = advice_to_allow(thing)
        can_be_allowed |= ALLOWING_CALL in advice
        places.append(f"{found[0] if found and found[0] else 'the state'} needs {advice}")
    left = len(arrays) + len(others) - len(places)
    more = f"; and {left} more" if left else ""
    warn_caller(
        "deepnvme.load and torch.load(weights_only=True) will refuse this file, because it asks for code that is not "
        f"known to be safe: {'; '.join(places)}{more}. Save plain values and tensors instead"
        f"{', or make that call before loading' if can_be_allowed else ''}"
    )


def _is_of_numpy(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "").partition(".")[0] == "numpy"


def _numpy_advice(value: Any) -> str:
    if type(value).__name__ == "ndarray":
        return "a numpy array: save torch.from_numpy(array)"
    return f"a numpy {type(value).__name__}: save value.item()"
