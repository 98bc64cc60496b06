"""``deepnvme.spill``: a whole model and its optimizer on disk between two phases, and back into the same tensors."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme._deepnvme import default_engine
from deepnvme._offload.begin import check_module
from deepnvme._offload.storages import PAGE_BYTES, REMEDY, SpilledStorage, allocate_for, movable_storages, tensors_of
from deepnvme._swap.values import make_swap_folders
from deepnvme._utils.devices import relaxed_capture
from deepnvme._utils.heap import HEAP
from deepnvme._utils.memory import check_available
from deepnvme._utils.public import public
from deepnvme.errors import ClosedError, Error, UnsupportedError

if TYPE_CHECKING:
    import os

    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

    from deepnvme._deepnvme import Engine

# With several drives, each gets the next piece of this size.
_PIECE_BYTES = 16 << 20


@public
def spill(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    engine: Engine | None = None,
) -> Spilled:
    """Move a model, its gradients and the state of its optimizer to disk, and give their memory back to the system.

    For programs that alternate between phases, such as training and generation in reinforcement learning. Each tensor
    stays the same object, with its shape, strides and dtype. Do not compute with it until :meth:`Spilled.restore` has
    filled it again: most operations raise ``RuntimeError``, and a few kernels of torch end the process. If the program
    ends before, the data are gone: resume from the last checkpoint.

    Tensors stay in memory, and count in ``kept_bytes``, if they have less than 4 KiB, or if something else uses them: a
    view, a state dict, a graph that a backward pass still needs, ``DistributedDataParallel``, or a library, through
    DLPack. Drop these first. Memory of swappers stays as well: that of ``deepnvme.offload`` and of optimizers
    with state on disk. No other thread may use the model during the call.

    Args:
        model: a module, or several. Parameters, buffers and gradients are moved, from CPU memory or from a GPU, and of
            DTensors the part of this process.
        optimizer: the optimizer whose state is moved too. Default: none.
        swap_dir: a folder on the NVMe drive, or several, one per drive. A missing folder is created. The file has no
            name, and is gone with the process.
        engine: the engine that writes and reads. Default: the default engine.

    Returns:
        ``model.spilled``, whose :meth:`~Spilled.restore` brings everything back. It is also a ``with`` block.

    Raises:
        OSError: the disk is full or fails. All tensors are in memory, as before.
        TypeError: ``model`` is no module, or ``optimizer`` no optimizer.
        RuntimeError: another thread has changed a tensor while it was written. All tensors are in memory, as before.
        deepnvme.errors.UnsupportedError: the model or a part of it is on disk already.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with deepnvme.spill(model, optimizer, swap_dir=".") as spilled:
        ...     spilled.nbytes >= 4 * 256 * 256 * 4
        True
        >>> model(torch.ones(1, 256)).shape
        torch.Size([1, 256])
    """
    models: list[Any] = [*model] if isinstance(model, list | tuple) else [model]
    if not models:
        raise TypeError("spill takes a torch.nn.Module or several, and got none")
    for one in models:
        check_module(one, "spill")
        earlier = getattr(one, "spilled", None)
        if isinstance(earlier, Spilled) and not earlier.is_restored:
            raise UnsupportedError("this model is spilled already; call model.spilled.restore() first")
        if earlier is not None and not isinstance(earlier, Spilled):
            raise UnsupportedError("this model has a 'spilled' of its own, the name that the result gets; rename that")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    spilled = Spilled(make_swap_folders(swap_dir), engine)
    with torch.inference_mode(mode=False):
        spilled._write(models, optimizer)  # noqa: SLF001
        # The model has its data with it, even if the caller drops the result.
        for one in models:
            one.spilled = spilled
        spilled._release(models, optimizer)  # noqa: SLF001
    return spilled


@public
class Spilled:
    """What :func:`spill` has moved to disk.

    Attributes:
        nbytes: bytes on disk.
        kept_bytes: bytes that stayed in memory.
        is_restored: whether all is in memory again.

    Example:
        >>> model = torch.nn.Linear(256, 256)
        >>> spilled = deepnvme.spill(model, swap_dir=".")
        >>> spilled.nbytes
        262144
        >>> spilled.restore()
        >>> spilled.is_restored
        True
    """

    def __init__(self, folders: Sequence[Any], engine: Engine | None) -> None:
        self._folders, self._engine = folders, engine
        self._files = ExitStack()
        self._descriptors: list[int] = []
        self._moved: list[SpilledStorage] = []
        self._hooks: list[RemovableHandle] = []
        self.nbytes = self.kept_bytes = 0
        self.is_restored = True

    def __repr__(self) -> str:
        where = "in memory" if self.is_restored else "on disk"
        return f"Spilled({self.nbytes:,} bytes {where}, {self.kept_bytes:,} bytes kept)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Fill all tensors again. Does nothing if they are in memory.

        A tensor that the program has given other data in the meantime keeps them. If it is interrupted or fails, the
        data are still on disk, and the next call tries again.

        Raises:
            MemoryError: the machine has too little memory.
            OSError: the disk fails.
        """
        with torch.inference_mode(mode=False):
            self._restore()

    def _restore(self) -> None:
        waiting = [one for one in self._moved if one.is_released]
        if any(one.filled is None for one in waiting):
            check_available(sum(one.nbytes for one in waiting if one.device.type == "cpu"), "what restore() needs")
            fresh = allocate_for(waiting)
            items = [item for one, memory in zip(waiting, fresh, strict=True) for item in self._pieces(one, memory)]
            with relaxed_capture():
                self._read(items)
            # From here on an interrupted call continues with this memory: tensors that share it go on sharing it.
            for one, memory in zip(waiting, fresh, strict=True):
                one.filled = memory
        for one in waiting:
            one.fill()
        self.is_restored = True
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()
        self._moved.clear()
        self._files.close()
        # The model can be copied again.
        self._engine = None

    def _write(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Write everything. Nothing has changed if this fails."""
        moved, self.kept_bytes = movable_storages(tensors_of(models, optimizer))
        begin = 0
        for one in moved:
            one.begin = begin
            begin += -(-one.nbytes // PAGE_BYTES) * PAGE_BYTES
        try:
            for folder in self._folders:
                file = self._files.enter_context(
                    tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (the stack closes it)
                )
                self._descriptors.append(file.fileno())
            with relaxed_capture():
                engine = default_engine() if self._engine is None else self._engine
                engine.write_batch(item for one in moved for item in self._pieces(one, one.bytes_of()))
            _check_unchanged(moved)
        except BaseException as error:
            self._files.close()
            if isinstance(error, Error) and error.errno is not None:
                text = f"{error.strerror or error}; nothing was spilled: swap_dir needs {begin:,} free bytes"
                raise type(error)(error.errno, text, str(self._folders[0])) from error
            raise
        self._moved = moved
        self.nbytes = sum(one.nbytes for one in moved)

    def _read(self, items: list[tuple[int, int, torch.Tensor]]) -> None:
        if self._engine is not None:
            with suppress(ClosedError):
                self._engine.read_batch(items)
                return
        # An engine that was closed, or belongs to the parent of this process, is no reason to lose data.
        default_engine().read_batch(items)

    def _release(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None) -> None:
        """Free the memory of everything that was written."""
        self.is_restored = False
        try:
            # A step would count itself, and a forward pass its batches, before either fails.
            for one in models:
                self._hooks.append(one.register_forward_pre_hook(self._refuse_call, prepend=True))
            if optimizer is not None:
                self._hooks.append(optimizer.register_step_pre_hook(self._refuse_step))
            for moved in self._moved:
                moved.release()
        except BaseException:
            self.restore()
            raise
        HEAP.trim()
        if any(one.device.type == "cuda" for one in self._moved):
            torch.cuda.empty_cache()

    def _pieces(self, one: SpilledStorage, memory: torch.Tensor) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield the file, offset and bytes of each piece of a storage."""
        count = len(self._descriptors)
        if count == 1:
            yield self._descriptors[0], one.begin, memory
            return
        at, end = one.begin, one.begin + one.nbytes
        while at < end:
            number, within = divmod(at, _PIECE_BYTES)
            stop = min(end, (number + 1) * _PIECE_BYTES)
            place = number // count * _PIECE_BYTES + within
            yield self._descriptors[number % count], place, memory[at - one.begin : stop - one.begin]
            at = stop

    # An interrupt may leave them there.

    def _refuse_call(self, *_: object) -> None:
        if not self.is_restored:
            raise RuntimeError(f"this model is on disk: {REMEDY}")

    def _refuse_step(self, *_: object) -> None:
        if not self.is_restored:
            raise RuntimeError(f"the state of this optimizer is on disk: {REMEDY}")


def _check_unchanged(moved: Sequence[SpilledStorage]) -> None:
    for one in moved:
        if not one.is_unchanged():
            raise RuntimeError(
                f"{one.name} was changed while spill wrote it, and nothing was spilled; let no other thread use the "
                "model and the optimizer during the call"
            )
