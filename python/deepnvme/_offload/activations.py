"""``deepnvme.offload_activations``: tensors that autograd saves stay on disk until the backward pass."""

from __future__ import annotations

import functools
import itertools
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch

from deepnvme._checkpoint.load_memory import BufferPool
from deepnvme._deepnvme import _SavedHooksScope
from deepnvme._modules.calls import wrap_forward
from deepnvme._offload.saved_tensors import (
    KeptTensor,
    OuterTensor,
    SavedTensorHooks,
    keep,
    kept_tensor,
    outer_hooks,
)
from deepnvme._swap.shared import SwapperPart
from deepnvme._swap.swapper import Swapper
from deepnvme._utils.devices import relaxed_capture_for
from deepnvme._utils.end_watch import EndWatch
from deepnvme._utils.heap import HEAP
from deepnvme._utils.interrupts import is_of_handler, make_lock
from deepnvme._utils.public import parse_bytes, public, warn_caller
from deepnvme.errors import ClosedError, Error

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from torch import nn

    from deepnvme._deepnvme import Engine
    from deepnvme._swap.values import SwapStats

    _Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_STORAGE: Any = torch.UntypedStorage
_Module = TypeVar("_Module", bound="nn.Module")

# A view of less than this fraction of its base is stored alone.
_WHOLE_FRACTION_MIN = 1 / 4
# Idle buffers, into which tensors are read, take this fraction of the memory, up to a number of bytes.
_BUFFERS_DIVISOR, _BUFFERS_BYTES_MAX = 4, 64 << 20
# Tensors on these devices can be moved.
_DEVICES = frozenset(("cpu", "cuda"))


@public
@dataclass(frozen=True)
class ActivationStats:
    """What an :class:`ActivationOffload` has done since it was made.

    Attributes:
        tensors: tensors that were moved.
        shared_tensors: of these, tensors whose bytes were stored already, for another one.
        kept_tensors: tensors that stayed in memory: small ones, weights, and those that cannot be moved.
        stored_bytes: bytes that were moved.
        pending_tensors: moved tensors that a backward pass may still need.
        swap: the counters of the swapper behind it.

    Example:
        >>> with deepnvme.offload_activations(".", memory="16MB") as activations:
        ...     activations.stats().tensors
        0
    """

    tensors: int
    shared_tensors: int
    kept_tensors: int
    stored_bytes: int
    pending_tensors: int
    swap: SwapStats


class _Stored:
    """Bytes of a storage in the swapper. They are deleted after the last saved tensor that needs them."""

    __slots__ = ("__weakref__", "key", "nbytes", "start")

    def __init__(self, key: str, start: int, nbytes: int) -> None:
        self.key, self.start, self.nbytes = key, start, nbytes


@dataclass(frozen=True, slots=True)
class _MovedTensor:
    """A saved tensor: where it begins in the stored bytes, and how it views them."""

    stored: _Stored
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device


@dataclass(slots=True)
class _Known:
    """A tensor whose bytes are stored, as long as its storage exists and the tensor has this version."""

    # A weak reference of torch, as a number. No other storage gets its address until it is freed. torch's class for it
    # has a `__del__` in Python, where an interrupt would be lost.
    storage: int
    storage_bytes: int
    # The tensor that has the version, and of which others are views.
    root: weakref.ref[torch.Tensor]
    version: int
    stored: weakref.ref[_Stored]

    def holds(self, tensor: torch.Tensor, start: int, nbytes: int) -> _Stored | None:
        """Return the stored bytes if they are those of a tensor of the same storage."""
        stored = self.stored()
        is_same_storage = not _STORAGE._expired(self.storage)  # noqa: SLF001
        is_same_storage = is_same_storage and self.storage_bytes == tensor.untyped_storage().nbytes()
        if stored is None or not is_same_storage or self.version != tensor._version:  # noqa: SLF001
            return None
        if self.root() is _root(tensor):
            return stored if stored.start <= start <= start + nbytes <= stored.start + stored.nbytes else None
        # A result that its operation saves is another tensor than the one that the next operation saves. Tensors that
        # count their changes apart, such as those of `unsafe_chunk`, have the same count only by chance, unless none
        # was changed.
        is_alias = self.version == 0 and (stored.start, stored.nbytes) == (start, nbytes)
        return stored if is_alias else None


@public
class ActivationOffload(_SavedHooksScope):
    """Activations on disk, as :func:`offload_activations` returns it.

    Within a ``with`` block, and in wrapped modules, each tensor that autograd saves is copied to bounded memory at
    once, and written to disk from there. The backward pass, also after the block, reads the tensors ahead, in the
    reverse order. One object serves any number of blocks and threads, one after the other or at the same time.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> activations = deepnvme.offload_activations(".", memory="16MB", bytes_min="64KiB")
        >>> with activations:
        ...     loss = model(torch.randn(512, 256)).square().mean()
        >>> loss.backward()
        >>> activations.stats().tensors > 0
        True
        >>> activations.close()
    """

    def __init__(
        self, swapper: Swapper | SwapperPart, buffers: BufferPool, bytes_min: int, model: nn.Module | None
    ) -> None:
        self._swapper = swapper
        self._buffers = buffers
        self._bytes_min = bytes_min
        self._model = model
        self._lock = make_lock()
        self._numbers = itertools.count()
        # The keys in the order in which they were stored.
        self._order: dict[str, None] = {}
        self._known: dict[int, _Known] = {}
        weakref.finalize(self, _forget_all, self._known).atexit = False
        # The stored bytes that saved tensors need, each with its key.
        self._needed: EndWatch[str] = EndWatch()
        # Whether something was stored since the order of the backward pass was set.
        self._is_unordered = False
        self._undo: list[Callable[[], object]] = []
        self._moved = self._shared = self._kept = self._stored_bytes = 0
        self._has_warned = False

    def wrap(self, module: _Module) -> _Module:
        """Move the tensors that autograd saves in the calls of a module, until :meth:`close`.

        Args:
            module: a block of a model, for example. Its ``forward`` is replaced.

        Returns:
            The module.

        Example:
            >>> activations = deepnvme.offload_activations(".", memory="16MB")
            >>> block = activations.wrap(torch.nn.Linear(64, 64))
            >>> block(torch.randn(2048, 64)).sum().backward()
            >>> activations.close()
        """
        self._check_open()

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(forward)
            def run(*args: Any, **kwargs: Any) -> Any:
                with SavedTensorHooks(*self._hooks(module)):
                    return forward(*args, **kwargs)

            return run

        wrap_forward(module, around, self._undo)
        return module

    def stats(self) -> ActivationStats:
        """Return the counters so far. They stay readable after :meth:`close`."""
        self._drop_ended()
        with self._lock:
            counts = (self._moved, self._shared, self._kept, self._stored_bytes, len(self._order))
        return ActivationStats(*counts, self._swapper.stats())

    def close(self) -> None:
        """Free memory and disk, and unwrap the modules.

        A backward pass that still needs a tensor of this object raises a ``ClosedError``.
        """
        while self._undo:
            self._undo.pop()()
        self._swapper.close()

    def _restart_keys(self) -> None:
        """Use the keys of the last step again, so that the order of that step applies to the next one."""
        self._drop_ended()
        with self._lock:
            self._numbers = itertools.count()

    def __repr__(self) -> str:
        counts = self.stats()
        state = "closed" if self._swapper.is_closed else f"{counts.pending_tensors} pending"
        return f"<deepnvme.ActivationOffload: {counts.tensors} tensors moved, {state}>"

    def __reduce__(self) -> NoReturn:
        msg = "activations on disk belong to their process, and cannot be pickled or copied"
        raise TypeError(msg)

    def _check_open(self) -> None:
        if self._swapper.is_closed:
            msg = "the activations were closed; call deepnvme.offload_activations again"
            raise ClosedError(msg)

    def _make_hooks(self) -> _Hooks:
        self._check_open()
        return self._hooks(self._model)

    def _hooks(self, model: nn.Module | None) -> _Hooks:
        outer = outer_hooks()
        weights = frozenset() if model is None else _storages_of(model)

        def pack(tensor: torch.Tensor) -> Any:
            moved = self._move(tensor, weights)
            if moved is not None:
                return moved
            with self._lock:
                self._kept += 1
            return keep(tensor, outer)

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, KeptTensor | OuterTensor):
                return kept_tensor(saved)
            return self._read(saved)

        return pack, unpack

    def _move(self, tensor: torch.Tensor, weights: frozenset[int]) -> _MovedTensor | None:
        """Store a tensor. ``None`` if it stays in memory."""
        if not _can_move(tensor):
            return None
        nbytes = _span_bytes(tensor)
        if nbytes < self._bytes_min or _is_weight(tensor, weights):
            return None
        start = int(tensor.storage_offset()) * tensor.itemsize
        stored = self._find(tensor, start, nbytes)
        if stored is None:
            stored = self._store(tensor, start, nbytes)
            if stored is None:
                return None
        with self._lock:
            self._moved += 1
        shape, stride = tensor.shape, tensor.stride()
        return _MovedTensor(stored, start - stored.start, nbytes, tensor.dtype, shape, stride, tensor.device)

    def _find(self, tensor: torch.Tensor, start: int, nbytes: int) -> _Stored | None:
        """Return the stored bytes of a tensor, if its storage was stored before and has not changed."""
        with self._lock:
            known = self._known.get(tensor.untyped_storage()._cdata)  # noqa: SLF001
            stored = None if known is None else known.holds(tensor, start, nbytes)
            self._shared += stored is not None
            return stored

    def _store(self, tensor: torch.Tensor, start: int, nbytes: int) -> _Stored | None:
        self._drop_ended()
        HEAP.moved(nbytes)
        storage, root = tensor.untyped_storage(), _root(tensor)
        root_bytes = _span_bytes(root)
        if root_bytes * _WHOLE_FRACTION_MIN <= nbytes < root_bytes:
            # Other views of it may be saved as well.
            start, nbytes = int(root.storage_offset()) * root.itemsize, root_bytes
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, start, (nbytes,), (1,))
        version = tensor._version  # noqa: SLF001
        with self._lock:
            key = next(key for key in map(str, self._numbers) if key not in self._order)
            self._order[key] = None
        try:
            self._swapper.put(key, source)
        except BaseException as error:
            self._order.pop(key, None)
            # A wait for memory that the caller itself holds is a `RuntimeError`.
            is_expected = isinstance(error, Error | MemoryError | RuntimeError) and not isinstance(error, ClosedError)
            if not is_expected or is_of_handler(error):
                raise
            self._warn(error)
            return None
        stored = _Stored(key, start, nbytes)
        self._needed.watch(stored, key)
        with self._lock:
            self._is_unordered = True
            self._stored_bytes += nbytes
            ended = [storage._cdata] if storage._cdata in self._known else []  # noqa: SLF001
            if len(self._known) > 2 * len(self._order) + 64:
                ended += [number for number, one in self._known.items() if one.stored() is None]
            for number in dict.fromkeys(ended):
                _forget(self._known.pop(number))
            reference: Any = storage._weak_ref()  # noqa: SLF001
            known = _Known(reference, storage.nbytes(), weakref.ref(root), version, weakref.ref(stored))
            self._known[storage._cdata] = known  # noqa: SLF001
        return stored

    def _warn(self, error: BaseException) -> None:
        with self._lock:
            has_warned, self._has_warned = self._has_warned, True
        if not has_warned:
            warn_caller(f"activations stay in memory, since they cannot be moved to disk: {error}")

    def _read(self, saved: _MovedTensor) -> torch.Tensor:
        self._drop_ended()
        HEAP.moved(saved.nbytes)
        with self._lock:
            order = list(reversed(self._order)) if self._is_unordered else None
            self._is_unordered = False
        if order is not None:
            # The backward pass usually needs them in this order. Another order is slower.
            self._swapper.schedule(order, repeat=False)
        # Without autograd: a backward pass with `create_graph` must not record this.
        with torch.no_grad():
            memory = self._allocate(saved.nbytes, saved.device)
            if saved.device.type == "cpu":
                # One that is on disk needs no memory of the swapper, which may have no room while others hold some.
                self._swapper.read(saved.stored.key, saved.start, memory)
            else:
                with relaxed_capture_for(saved.device), self._swapper.borrow(saved.stored.key, shared=True) as held:
                    memory.copy_(held[saved.start : saved.start + saved.nbytes])
            flat = torch.empty(0, dtype=saved.dtype, device=saved.device)
            return flat.set_(memory.untyped_storage(), 0, saved.shape, saved.stride)

    def _allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Allocate memory for a tensor that is read. That of the host is reused once the tensor is gone.

        The C library would put gradients into the freed memory of small tensors, and fetch more for the next one.
        """
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with self._lock:
            buffer = self._buffers.acquire(nbytes)
            self._buffers.release(nbytes)
        return torch.frombuffer(buffer.view, dtype=torch.uint8, count=nbytes, offset=buffer.start)

    def _drop_ended(self) -> None:
        """Delete stored bytes that no saved tensor needs."""
        for key in self._needed.ended():
            # They may be gone with the swapper, or belong to the parent process.
            with suppress(Error, KeyError):
                self._swapper.delete(key)
            # Last: the key may be used again from here on.
            self._order.pop(key, None)


def _forget(known: _Known) -> None:
    _STORAGE._free_weak_ref(known.storage)  # noqa: SLF001


def _forget_all(known: dict[int, _Known]) -> None:
    while known:
        _forget(known.popitem()[1])


def _can_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain view of memory that can be copied."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in _DEVICES
        and not tensor.is_quantized
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001
    )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a tensor is a view of, or itself."""
    base = tensor._base if tensor._is_view() else None  # noqa: SLF001
    return tensor if base is None else base


def _span_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first to the last element in memory: of an expanded tensor, only its own."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _is_weight(tensor: torch.Tensor, weights: frozenset[int]) -> bool:
    """Whether a tensor is a view of a parameter, which is in memory anyway. A linear layer saves such a view."""
    root = _root(tensor)
    if root.is_leaf and root.requires_grad:
        return True
    return bool(weights) and tensor.untyped_storage()._cdata in weights  # noqa: SLF001


def _storages_of(model: nn.Module) -> frozenset[int]:
    """Return the storages of a model's parameters and buffers. Those of tensor subclasses are not moved anyway."""
    own = itertools.chain(model.parameters(), model.buffers())
    plain = (tensor for tensor in own if type(tensor) in (torch.Tensor, torch.nn.Parameter))
    stored = (tensor.untyped_storage() for tensor in plain if tensor.layout is torch.strided)
    return frozenset(storage._cdata for storage in stored)  # noqa: SLF001


@public
def offload_activations(
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    memory: int | str,
    bytes_min: int | str = "256KiB",
    model: nn.Module | None = None,
    checksums: bool = False,
    engine: Engine | None = None,
) -> ActivationOffload:
    """Move the tensors that autograd saves to disk, and read them back ahead of the backward pass.

    Use the result as a ``with`` block around the forward pass, or wrap single blocks of a model with its
    :meth:`~ActivationOffload.wrap`. Gradients are those of training in memory, bit for bit. It can be combined with
    activation checkpointing, which then saves the inputs of its blocks on disk, and with
    :func:`offload_parameters`.

    Args:
        swap_dir: a folder on a local drive; several folders, one per drive, for a striped file. A missing folder is
            created. The file is private, and vanishes with the object, even after a crash.
        memory: bytes for activations, such as ``"4GB"``. A quarter of it, at most 64 MiB, is for buffers of tensors
            that were read. A tensor larger than the rest stays in memory. Tensors that the backward pass is using are
            not counted.
        bytes_min: smaller tensors stay in memory. Default 256 KiB.
        model: its parameters and buffers stay in memory. Not needed for parameters that get gradients, which always
            stay. Default: none.
        checksums: checksum the tensors when they are written, and verify them when they are read. Default False.
        engine: the engine to use. Default: the default engine.

    Returns:
        An :class:`ActivationOffload`. It can be entered again and again; ``close`` frees its memory and disk.

    Raises:
        OSError: the file cannot be created.
        OutOfMemoryError: the machine has less memory.
        ValueError: a size is invalid.

    Warns:
        UserWarning: the disk is full, or cannot be written. Tensors stay in memory then.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> activations = deepnvme.offload_activations(".", memory="16MB")
        >>> for step in range(2):
        ...     with activations:
        ...         loss = model(torch.randn(512, 256)).square().mean()
        ...     loss.backward()
        >>> activations.stats().pending_tensors
        0
        >>> activations.close()
    """
    nbytes, least = parse_bytes(memory), parse_bytes(bytes_min, "bytes_min")
    buffers = BufferPool(min(nbytes // _BUFFERS_DIVISOR, _BUFFERS_BYTES_MAX))
    swapper = Swapper(swap_dir, memory=nbytes - buffers.bytes_max, checksums=checksums, engine=engine)
    return ActivationOffload(swapper, buffers, least, model)
