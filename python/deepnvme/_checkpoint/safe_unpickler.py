"""Builds the objects of a pickle, and refuses all but tensors, containers and classes that the user allowed.

A pickle names functions and classes, and says which to call. This module calls only those in its table: the list of
``torch.load(weights_only=True)``, ``bytes`` and ``frozenset``, and the user's ``torch.serialization.add_safe_globals``.
For ``getattr`` it has a function that only finds members of allowed enumerations. ``size_limits`` checks arguments.
"""

from __future__ import annotations

import _compat_pickle
import collections
import enum
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import CorruptFileError, Error, OutOfMemoryError, UnsafeFileError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deepnvme._checkpoint.size_limits import SizeLimits

_DEFAULT_NAMES: dict[str, list[str]] = {
    "collections": ["OrderedDict", "Counter"],
    "torch": ["Size", "Tensor", "device", "per_tensor_affine", "per_tensor_symmetric", "per_channel_affine",
              "per_channel_symmetric", "per_channel_affine_float_qparams"],
    "torch.nn.parameter": ["Parameter"],
    "torch.serialization": ["_get_layout"],
    "torch.storage": ["UntypedStorage", "TypedStorage"],
    "torch._tensor": ["_rebuild_from_type_v2"],
    "torch._utils": ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter",
                     "_rebuild_parameter_with_state", "_rebuild_qtensor", "_rebuild_sparse_tensor",
                     "_rebuild_meta_tensor_no_storage", "_rebuild_wrapper_subclass",
                     "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor"],
    "_codecs": ["encode"],
    "builtins": ["bytes", "bytearray", "set", "complex", "frozenset"],
}  # fmt: skip
# The call that allows classes and functions.
ALLOWING_CALL = "torch.serialization.add_safe_globals"
# Characters of the dtypes of numpy that a file may need: those without objects.
_NUMPY_DTYPES = "?bhilqBHILQefdgFDGSUMm"
# Modules that are never allowed, even if the user asks for them.
_NEVER_ALLOWED = ("os", "posix", "nt", "sys", "subprocess")


def _default_globals() -> dict[str, Any]:
    table: dict[str, Any] = {}
    for module_name, names in _DEFAULT_NAMES.items():
        module = importlib.import_module(module_name)
        table |= {f"{module_name}.{name}": getattr(module, name) for name in names if hasattr(module, name)}
    for name, value in vars(torch).items():
        is_storage_class = name.endswith("Storage") and isinstance(value, type)
        if isinstance(value, torch.dtype) or is_storage_class:
            table[f"torch.{name}"] = value
    return table


def _user_globals() -> dict[str, Any]:
    table: dict[str, Any] = {}
    for entry in torch.serialization.get_safe_globals() if hasattr(torch.serialization, "get_safe_globals") else []:
        value, name = entry if isinstance(entry, tuple) else (entry, f"{entry.__module__}.{entry.__qualname__}")
        table[name] = value
    return table


def loadable_globals() -> set[int]:
    """Return the identities of all classes and functions that a pickle may use, including those that the user allowed.

    ``getattr`` counts: enumerations need it in some releases of Python.
    """
    allowed = {id(value) for table in (_default_globals(), _user_globals()) for value in table.values()}
    return allowed | {id(getattr)}


def advice_to_allow(thing: Any) -> str:
    """Name a class or function, and the call that allows it."""
    module, name = getattr(thing, "__module__", None) or "builtins", getattr(thing, "__qualname__", repr(thing))
    root = module.split(".", maxsplit=1)[0]
    if root in _NEVER_ALLOWED:
        return f"{module}.{name}, which cannot be allowed"
    if isinstance(thing, type) and issubclass(thing, torch.nn.Module):
        return f"{module}.{name} (save module.state_dict() instead)"
    if root == "numpy":
        return f"{module}.{name} (save value.item() or torch.from_numpy(array) instead)"
    return f"{module}.{name}: {ALLOWING_CALL}([{name}])"


def _python3_name(module: str, name: str) -> tuple[str, str]:
    """Return the current name of a global: protocol 2 uses the names of Python 2."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _sparse(path: object, layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """Make a sparse tensor and check its indices: wrong ones would reach beyond its values."""
    if any(isinstance(part, torch.Tensor) and part.is_meta for part in parts):
        text = "the indices of a sparse tensor must be checked, and the meta device has none; use another device"
        raise UnsupportedError(f"{path}: {text}, or select other tensors with only=")
    if layout is torch.sparse_coo:
        indices, values, size = parts[:3]
        is_coalesced = parts[3] if len(parts) > 3 else None  # noqa: PLR2004
        return torch.sparse_coo_tensor(indices, values, size, check_invariants=True, is_coalesced=is_coalesced)
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(compressed, plain, values, size, layout=layout, check_invariants=True)


def _refusal(path: object, full: str) -> str:
    if full.split(".", maxsplit=1)[0] in _NEVER_ALLOWED:
        return (
            f"{path}: the file asks for {full}, which no checkpoint needs: it was made to run code on the machine that "
            "loads it. None of it was run; do not use the file"
        )
    if full.split(".", maxsplit=1)[0] == "numpy":
        return _numpy_refusal(path, full)
    if full.startswith("torch.nn.modules."):
        # Each class would need the next: a module consists of many.
        return (
            f"{path}: this is a pickled module (the file asks for {full}); load it with torch.load(path, "
            "weights_only=False) if you trust its author, and save its state_dict()"
        )
    short = full.removeprefix("builtins.").removeprefix("__main__.")
    return (
        f"{path}: the file asks for {full}, which is not known to be safe, and was not loaded. If you trust the author "
        f"of the file and know what {short} does, allow it: torch.serialization.add_safe_globals([{short}])"
    )


def _numpy_refusal(path: object, full: str) -> str:
    """Return advice for numbers and arrays of numpy, which need several of its internal globals."""
    # Its name before numpy 2.
    core = "numpy.core" if full.startswith("numpy.core.") else "numpy._core"
    return (
        f"{path}: the file asks for {full}, which is not known to be safe, and was not loaded. Save numpy's numbers as "
        "Python's (value.item()), its arrays as tensors (torch.from_numpy) or lists (tolist). To load this file, if "
        f"you trust its author, allow what it needs: import numpy, torch; core = {core}.multiarray; {ALLOWING_CALL}(["
        f"(core.scalar, '{core}.multiarray.scalar'), (core._reconstruct, '{core}.multiarray._reconstruct'), "
        f"numpy.ndarray, numpy.dtype, *(type(numpy.dtype(each)) for each in '{_NUMPY_DTYPES}')])"
    )


class _EnumMember:
    """Returns a member of an allowed enumeration: Python 3.11.0 to 3.11.3 pickle them as a ``getattr``."""

    def __init__(self, path: object) -> None:
        self._path = path

    def __call__(self, kind: Any, name: Any) -> Any:
        if isinstance(kind, enum.EnumMeta) and type(name) is str and name in kind.__members__:
            return kind.__members__[name]
        raise UnsafeFileError(_refusal(self._path, "builtins.getattr"))


class SafeUnpickler:
    """Builds what a pickle describes, or raises ``UnsafeFileError``."""

    def __init__(self, path: object, limits: SizeLimits) -> None:
        self._path = path
        self._limits = limits
        self._allowed = _user_globals()
        self._default_globals = _default_globals()
        # Compared by identity: an object can claim to equal anything.
        self._callable = {id(value) for table in (self._default_globals, self._allowed) for value in table.values()}
        self._getattr = _EnumMember(path)
        self._callable.add(id(self._getattr))
        self._stateful = {id(value) for value in self._allowed.values()}
        self._empty: dict[str, torch.Tensor] = {}
        self.hash_costs = limits.hash_costs

    def resolve(self, module: str, name: str) -> Any:
        """Return the global of this name, if it is allowed."""
        module, name = _python3_name(module, name)
        full = f"{module}.{name}"
        if module.split(".", maxsplit=1)[0] not in _NEVER_ALLOWED:
            if full in self._allowed:
                return self._allowed[full]
            if full in self._default_globals:
                return self._default_globals[full]
            if full == "builtins.getattr":
                return self._getattr
        raise UnsafeFileError(_refusal(self._path, full))

    def tensor(  # noqa: PLR0917 (Rust calls it)
        self,
        storage: torch.UntypedStorage,
        dtype: str,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        requires_grad: bool,
    ) -> torch.Tensor:
        empty = self._empty.get(dtype)
        if empty is None or empty.device != storage.device:
            empty = self._empty[dtype] = torch.empty(0, dtype=getattr(torch, dtype), device=storage.device)
        tensor = empty.new_empty(0).set_(storage, offset, shape, strides)
        return tensor.requires_grad_() if requires_grad else tensor

    def storage(self, storage: torch.UntypedStorage | None, dtype: str) -> torch.TypedStorage | None:
        """Wrap a storage as torch's functions expect it."""
        if storage is None:
            return None
        return torch.TypedStorage(wrap_storage=storage, dtype=getattr(torch, dtype), _internal=True)  # type: ignore[no-untyped-call]

    def own_storage(self, storage: torch.UntypedStorage | None, dtype: str) -> Any:
        """Wrap a storage that is itself an object of the state."""
        return self.storage(storage, dtype)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call an allowed function or class."""
        self._check(function)
        self._limits.check(function, arguments)
        if function is torch._tensor._rebuild_from_type_v2:  # noqa: SLF001
            return self._rebuild_from_type(*arguments)
        if function is torch._utils._rebuild_sparse_tensor:  # noqa: SLF001
            return _sparse(self._path, *arguments)
        return function(*arguments)

    def _rebuild_from_type(self, function: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
        # torch would call any function with any arguments.
        if not isinstance(arguments, tuple):
            raise self._unsafe(
                f"calls {_name(function)} with {type(arguments).__name__} instead of a tuple of arguments"
            )
        made = self.call(function, arguments)
        if id(kind) not in self._stateful:
            self._limits.check_attributes(state)
        if not isinstance(made, torch.Tensor):
            raise self._unsafe(f"makes {_name(type(made))} where a tensor is expected")
        return torch._tensor._rebuild_from_type_v2(lambda: made, kind, (), state)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def new(self, kind: Any, arguments: tuple[Any, ...], keywords: dict[str, Any] | None) -> Any:
        """Make an object of an allowed class, without its ``__init__``."""
        self._check(kind)
        if keywords and id(kind) not in self._stateful:
            raise self._unsafe(f"makes {_name(kind)} in a way that torch.save does not")
        self._limits.check(kind, arguments)
        if kind is torch.nn.Parameter:
            return torch.nn.Parameter(*arguments)
        return kind.__new__(kind, *arguments, **(keywords or {}))

    def give_state(self, made: Any, state: Any) -> None:
        """Set the state of an object, if its class allows one."""
        kind = type(made)
        # From the class: the object's own attribute of that name may come from the file.
        setter = getattr(kind, "__setstate__", None)
        if kind is collections.OrderedDict:
            self._limits.check_attributes(state)
            made.__dict__.update(state)
        elif setter is torch.Tensor.__setstate__:
            self._limits.check_state(state)
            made.set_(*state)
        elif id(kind) not in self._stateful:
            remedy = f"if you trust its author, allow it: torch.serialization.add_safe_globals([{kind.__qualname__}])"
            what = f"the file gives a state to {kind}, which is not known to be safe; {remedy}"
            raise UnsafeFileError(f"{self._path}: {what}")
        elif setter is not None:
            setter(made, state)
        else:
            attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)  # noqa: PLR2004
            self._limits.check_attributes(state, is_known=True)
            if attributes:
                made.__dict__.update(attributes)
            for name, value in (slots or {}).items():
                setattr(made, name, value)

    def takes_parts(self, made: Any) -> bool:
        """Whether a file may append elements to an object and set its items: the user has allowed its class."""
        return id(type(made)) in self._stateful

    def _check(self, function: Any) -> None:
        if id(function) not in self._callable:
            raise self._unsafe(f"calls {_name(function)}, which is not an allowed function")

    def _unsafe(self, what: str) -> UnsafeFileError:
        """Make the error of a pickle that no ``torch.save`` writes. No setting allows it."""
        return UnsafeFileError(
            f"{self._path}: the file {what}. It is damaged or was made to run code, and none was run; get the file "
            "from a source that you trust, or restore it from a copy"
        )


def _name(function: Any) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else f"a {type(function).__name__}"


@contextmanager
def errors_with_path(path: object) -> Iterator[None]:
    """Raise failures to build objects as errors that name the file."""
    try:
        yield
    except Error as error:
        if error.filename is not None or str(path) in str(error):
            raise
        # Errors from Rust's builder do not name the file.
        named = type(error)(f"{path}: {error}")
        named.filename, named.offset = str(path), error.offset
        raise named from None
    except Warning:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{path}: there is not enough memory for the file's objects") from error
    except Exception as error:
        if is_of_handler(error):
            raise
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise OutOfMemoryError(f"{path}: there is not enough memory for the file's tensors: {error}") from error
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, NotImplementedError):
            # torch continues with a list of what it has for which device.
            first = what.partition(". ")[0]
            msg = f"{path}: torch cannot build the file's objects on this device ({first}); load them on another"
            raise UnsupportedError(msg) from error
        raise CorruptFileError(
            f"{path}: the file's objects cannot be built ({what}); it is damaged: restore it from a copy"
        ) from error
