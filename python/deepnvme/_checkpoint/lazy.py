"""``deepnvme.load(lazy=True)``: a state whose tensors are read on first use, or ahead in the order of the file."""

from __future__ import annotations

import copy
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import _utils

from deepnvme._checkpoint.load_memory import LoadBuffers
from deepnvme._checkpoint.load_request import storage_entries, tensor_entries
from deepnvme._checkpoint.safe_unpickler import SafeUnpickler, errors_with_path
from deepnvme._checkpoint.size_limits import SizeLimits
from deepnvme._utils.gc_pause import gc_paused
from deepnvme._utils.interrupts import is_of_handler, make_lock
from deepnvme._utils.tensors import without_memory
from deepnvme.errors import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from deepnvme._checkpoint.load_request import LoadRequest, SourceFile
    from deepnvme._deepnvme import _CheckpointReader

# torch marks a parameter whose class is another tensor class by this attribute. `isinstance` looks for it.
_IS_PARAMETER = "_is_param"
# Attributes that need no bytes.
_META = ("shape", "dtype", "ndim", "layout", "is_sparse", "is_quantized", "is_nested", "names", "itemsize", "nbytes")
# Read-ahead begins with this, doubles while the order holds, and ends at the larger size.
_WINDOW_BYTES_MIN = 1 << 20
WINDOW_BYTES_MAX = 16 << 20
# Storages that follow each other before any is read ahead: the weight and the bias of one layer are no sign of more.
_IN_ORDER_MIN = 2


class LazyTensor(torch.Tensor):
    """A tensor whose bytes are still in the file. An operation that needs them reads them, once."""

    _read: Callable[[], torch.Tensor]
    _device: torch.device
    _lock: threading.RLock
    _real: torch.Tensor | None

    @staticmethod
    def make(
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        read: Callable[[], torch.Tensor],
        *,
        is_parameter: bool = False,
    ) -> LazyTensor:
        """Make a lazy tensor that ``read`` reads.

        It has no memory. Functions that bypass ``__torch_function__`` get an error that names
        :meth:`materialize`.
        """
        message = (
            f"a lazy tensor of shape {tuple(shape)} reaches a function that bypasses torch's overrides and cannot read "
            "it from its file; pass tensor.materialize(), or load the state without lazy=True"
        )
        described = without_memory(shape, strides, dtype, message)
        if described is None:
            described = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        lazy: LazyTensor = torch.Tensor._make_subclass(LazyTensor, described)  # noqa: SLF001
        vars(lazy).update(_read=read, _device=device, _lock=make_lock(), _real=None)
        if is_parameter:
            vars(lazy)[_IS_PARAMETER] = True
        return lazy

    def materialize(self) -> torch.Tensor:
        """Return the real tensor, and read it the first time."""
        with self._lock:
            if self._real is None:
                self._real = self._read()
                # It has served. Python's collector would search for it again and again.
                self._read = _read_twice
            if vars(self).get(_IS_PARAMETER) and not isinstance(self._real, torch.nn.Parameter):
                # `torch.nn.Parameter` got this tensor. Its copies and pickles are parameters.
                self._real = torch.nn.Parameter(self._real, self._real.requires_grad)
            return self._real

    def read(self) -> torch.Tensor:
        """Return the real tensor without keeping it."""
        with self._lock:
            return self._read() if self._real is None else self._real

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run operations on the real tensors, except those that need no bytes."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute in _CHANGED_IN_PLACE and _is_read(args[0]):
                # An operation in place, or an assignment to `data`, may have changed them.
                return func(args[0].materialize())
            if attribute in _META:
                return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
            if attribute == "device":
                return vars(args[0])["_device"]
        is_size = name in ("size", "dim", "stride", "numel", "element_size", "__len__", "is_contiguous")
        if is_size and not _is_read(args[0]):
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if name == "detach":
            return args[0].derive(torch.Tensor.detach)
        made = func(*_real(args), **_real(kwargs or {}))
        # `torch.nn.Parameter` calls `detach` and `requires_grad_`, and requires that the type stays.
        return args[0] if name == "requires_grad_" else made

    def derive(self, function: Callable[[torch.Tensor], torch.Tensor], *, is_parameter: bool = False) -> LazyTensor:
        """Make a lazy tensor of the result of ``function``, which has the same sizes and dtype."""
        return LazyTensor.make(
            self.shape,
            self.stride(),
            self.dtype,
            self._device,
            lambda: function(self.materialize()),
            is_parameter=is_parameter,
        )

    def __hash__(self) -> int:
        # By identity, like any tensor. The inherited method would read it.
        return id(self)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"LazyTensor(shape={shape}, dtype={self.dtype}, device={self._device}, read={self._real is not None})"

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.materialize(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _read_twice() -> torch.Tensor:
    msg = "a lazy tensor is read once"
    raise AssertionError(msg)


# Attributes that operations in place change.
_CHANGED_IN_PLACE = frozenset(("shape", "dtype", "ndim", "layout", "itemsize", "nbytes"))


def _is_read(tensor: Any) -> bool:
    return isinstance(tensor, LazyTensor) and vars(tensor).get("_real") is not None


def _real(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value.materialize()
    if isinstance(value, tuple | list):
        return type(value)(_real(element) for element in value)
    if isinstance(value, dict):
        return {key: _real(element) for key, element in value.items()}
    return value


class _LazyStorage:
    """A storage of the file, not read yet. Tensors that share it share its memory, and free it together."""

    def __init__(self, source: ReadAhead, index: int) -> None:
        self._source, self._index = source, index
        self._lock = make_lock()
        self._storage: torch.UntypedStorage | None = None

    def read(self) -> torch.UntypedStorage:
        """Return the storage, and read it the first time."""
        with self._lock:
            if self._storage is None:
                self._storage = self._source.read(self._index)
            return self._storage


class _LazyTypedStorage:
    """A typed storage that is not read yet, as torch's functions expect it."""

    def __init__(self, stored: _LazyStorage, dtype: str) -> None:
        self.stored = stored
        self.dtype = dtype


class LazyUnpickler(SafeUnpickler):
    """Makes tensors and parameters lazy. Other objects made of tensors are read at once."""

    def __init__(self, path: object, limits: SizeLimits, device: torch.device) -> None:
        super().__init__(path, limits)
        self._device = device

    def tensor(self, storage: Any, dtype: str, offset: int, shape: Any, strides: Any, *rest: Any) -> torch.Tensor:
        """Make a tensor of a storage that is read on first use."""

        def read() -> torch.Tensor:
            return SafeUnpickler.tensor(self, storage.read(), dtype, offset, shape, strides, *rest)

        if _is_quantised(getattr(torch, dtype)):
            return read()
        return LazyTensor.make(shape, strides, getattr(torch, dtype), self._device, read)

    def storage(self, storage: Any, dtype: str) -> Any:
        """Wrap a storage that is not read yet."""
        return None if storage is None else _LazyTypedStorage(storage, dtype)

    def own_storage(self, storage: Any, dtype: str) -> Any:
        """Read a storage that is itself an object of the state: there are no lazy storages."""
        return None if storage is None else super().storage(storage.read(), dtype)

    def call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Call an allowed function or class, now or when its tensor is read."""
        first = arguments[0] if arguments else None
        if function is _utils._rebuild_parameter and type(first) is LazyTensor:  # noqa: SLF001
            return first.derive(
                lambda data: SafeUnpickler.call(self, function, (data, *arguments[1:])), is_parameter=True
            )
        # The sizes were compared with the storage when the file was opened.
        is_lazy = function is _utils._rebuild_tensor_v3 and type(first) is _LazyTypedStorage  # noqa: SLF001
        if is_lazy and not _is_quantised(arguments[6]):
            return LazyTensor.make(
                arguments[2],
                arguments[3],
                arguments[6],
                self._device,
                lambda: SafeUnpickler.call(self, function, self._read(arguments)),
            )
        return super().call(function, self._read(arguments))

    def new(self, kind: Any, arguments: tuple[Any, ...], keywords: dict[str, Any] | None) -> Any:
        """Make an object of an allowed class, without its ``__init__``."""
        return super().new(kind, self._read(arguments), keywords)

    def give_state(self, made: Any, state: Any) -> None:
        """Set the state of an object, if its class allows one."""
        super().give_state(made, self._read(state))

    def _read(self, value: Any) -> Any:
        if type(value) is tuple:
            return tuple(self._read(element) for element in value)
        if type(value) is _LazyTypedStorage:
            return super().storage(value.stored.read(), value.dtype)
        return value.materialize() if type(value) is LazyTensor else value


def _is_quantised(dtype: torch.dtype) -> bool:
    """Whether torch makes tensors of this type by functions that a lazy tensor cannot override."""
    return str(dtype).startswith(("torch.qint", "torch.quint"))


def load_lazily(request: LoadRequest) -> Any:
    """Return the state of a file, or the tensors of several by name. Tensors and parameters are read on first use."""
    # The files stay open, since they are read later, even if they are deleted.
    return request.for_files(lambda files: _load_files(request, files))


def _load_files(request: LoadRequest, files: list[SourceFile]) -> Any:
    if len(files) == 1 and files[0].names is None:
        return _load_file(request, files[0])
    request.check_only(files)
    whole: dict[str, Any] = {}
    for file in files:
        whole.update(_load_file(request, file))
    return whole


@gc_paused
def _load_file(request: LoadRequest, file: SourceFile) -> Any:
    path, names = file.path, file.names
    reader = request.open(file, headers="read_unless_verified")
    tensors = tensor_entries(reader)
    chosen = request.select([entry.name for entry in tensors], names)
    wanted = set(chosen)
    source = ReadAhead(request, reader, (entry.storage for entry in tensors if entry.name in wanted))
    stored = [_LazyStorage(source, index) for index in range(reader.storage_count)]
    unpickler = LazyUnpickler(path, SizeLimits(path, reader), request.device)
    if reader.format == "safetensors":
        return {
            entry.name: unpickler.tensor(
                stored[entry.storage],
                entry.dtype,
                entry.storage_offset,
                tuple(entry.shape),
                tuple(entry.strides),
                False,
            )
            for entry in tensors
            if entry.name in wanted
        }
    is_whole = request.only is None and names is None
    with errors_with_path(path):
        return reader.build(unpickler, stored, None if is_whole else chosen)


class ReadAhead:
    """Reads the storages of a file. Threads may share it.

    One that is used out of order is read alone. Once three are used in the order of the file, those behind them are
    read in the same request, and the next request starts when the first of them is used. Storages that were read and
    not used take two windows at most: older ones are given up, and read again if they are used after all. Errors are
    reported when their storage is used.
    """

    def __init__(self, request: LoadRequest, reader: _CheckpointReader, wanted: Iterable[int]) -> None:
        self._request, self._reader = request, reader
        self._wanted = [*wanted]
        self._process = os.getpid()
        self._lock = make_lock()
        # Made at the first read: most lazy states are read in part, and many never.
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._sizes: list[int] = []
        self._started: set[int] = set()
        self._ahead: dict[int, _Window] = {}
        # Those that have storages in `_ahead`, the oldest first.
        self._windows: list[_Window] = []
        self._next = -1
        # How many were used in order, one after the other.
        self._in_order = 0
        self._window_bytes = 0

    def read(self, index: int) -> torch.UntypedStorage:
        """Read a storage."""
        if os.getpid() != self._process:
            # In a forked child, no read of the parent arrives, and nobody releases a lock that was held at the fork.
            return self._read_alone(index)
        with self._lock:
            if not self._positions:
                self._sort()
            window = self._ahead.pop(index, None) or self._miss(index)
            if not window.is_used:
                window.is_used = True
                self._start_next()
        try:
            if (found := window.storage(index)) is not None:
                return found
        except (Error, OSError) as error:
            if is_of_handler(error):
                raise
            if len(window.indices) == 1:
                raise
        # The window's error may be that of a neighbour.
        return self._read_alone(index)

    def _read_alone(self, index: int) -> torch.UntypedStorage:
        alone = self._window([index]).storage(index)
        assert alone is not None
        return alone

    def _sort(self) -> None:
        storages = storage_entries(self._reader)
        self._order = sorted({*self._wanted}, key=lambda index: storages[index].offset)
        self._positions = {index: position for position, index in enumerate(self._order)}
        self._sizes = [storages[index].nbytes for index in self._order]

    def _miss(self, index: int) -> _Window:
        """Start to read a storage that was not read ahead."""
        position = self._positions.get(index)
        if position is None:
            return self._window([index])
        self._in_order = self._in_order + 1 if position == self._next else 0
        is_ahead = self._in_order >= _IN_ORDER_MIN
        self._window_bytes = min(max(self._window_bytes * 2, _WINDOW_BYTES_MIN), WINDOW_BYTES_MAX) if is_ahead else 0
        window = self._start(position)
        self._keep(window, window.indices[1:])
        return window

    def _start_next(self) -> None:
        """Start the next window, while those before it are used."""
        if self._window_bytes and 0 <= self._next < len(self._order) and self._fits(self._next, 0):
            self._window_bytes = min(self._window_bytes * 2, WINDOW_BYTES_MAX)
            try:
                window = self._start(self._next)
            except (Error, OSError, MemoryError) as error:
                if is_of_handler(error):
                    raise
                # Nobody has asked for it: those who do get the error.
                self._window_bytes = 0
                return
            self._keep(window, window.indices)

    def _keep(self, window: _Window, indices: list[int]) -> None:
        """Keep a window for the uses to come. Give up the oldest ones that are too much then."""
        self._windows = [
            kept for kept in self._windows if any(self._ahead.get(index) is kept for index in kept.indices)
        ]
        if not indices:
            return
        self._windows.append(window)
        self._ahead.update(dict.fromkeys(indices, window))
        while len(self._windows) > 1 and sum(kept.nbytes for kept in self._windows) > 2 * WINDOW_BYTES_MAX:
            oldest = self._windows.pop(0)
            for index in oldest.indices:
                if self._ahead.get(index) is oldest:
                    del self._ahead[index]
                    self._started.discard(index)

    def _start(self, position: int) -> _Window:
        indices, nbytes = [self._order[position]], self._sizes[position]
        position += 1
        while position < len(self._order) and self._fits(position, nbytes):
            indices.append(self._order[position])
            nbytes += self._sizes[position]
            position += 1
        self._next = position
        self._started.update(indices)
        return self._window(indices, nbytes)

    def _fits(self, position: int, nbytes: int) -> bool:
        return nbytes + self._sizes[position] <= self._window_bytes and self._order[position] not in self._started

    def _window(self, indices: list[int], nbytes: int = 0) -> _Window:
        buffers = LoadBuffers(self._reader, indices, self._request.device, pin_memory=self._request.pin_memory)
        return _Window(indices, nbytes, buffers, self._request)


class _Window:
    """Storages that are read together."""

    def __init__(self, indices: list[int], nbytes: int, buffers: LoadBuffers, request: LoadRequest) -> None:
        self.indices, self.nbytes = indices, nbytes
        self.is_used = False
        self._buffers, self._request = buffers, request
        self._lock = make_lock()
        self._is_finished = self._is_whole = False

    def storage(self, index: int) -> torch.UntypedStorage | None:
        """Wait for all of them, and return one. ``None`` if an earlier call has failed."""
        with self._lock:
            if not self._is_finished:
                self._is_finished = True
                self._buffers.finish(self._request.verify, None)
                self._is_whole = True
            return self._buffers.storage(index, self._request.device) if self._is_whole else None
