"""The weights of one layer: moved to the file while it is built, and shown to it while it computes.

The file is private, has no name, and has one extent for each layer.
"""

from __future__ import annotations

import _thread
import errno
import mmap
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from deepnvme._deepnvme import write
from deepnvme._modules.partition import Weight
from deepnvme._modules.weight_classes import Placeholder
from deepnvme._stream.parameter_binding import refuse_loading, set_weight
from deepnvme._utils import tensors
from deepnvme._utils.interrupts import POLL_INTERVAL_S, SignalSafeEvent, make_lock
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deepnvme._modules.weight_classes import Gate

_RESTART = "restart with the new weights"
# Extents begin at a page, so that they can be mapped, and read directly on any disk.
_EXTENT_ALIGNMENT = max(4096, mmap.PAGESIZE)
# Alignment of tensors, as GPU kernels expect it.
_TENSOR_ALIGNMENT = 512


class LayerPlaceholder(Placeholder):
    """Stands for a weight of a layer while the layer does not run."""

    _REMEDY = "start SGLang without DEEPNVME_OFFLOAD_DIR"

    def _refused(self, what: str) -> Exception:
        if self.gate.is_closed:
            return self.gate.closed_error(f"{self.weight_name} is on disk: ")
        return RuntimeError(
            f"{self.weight_name} is on disk: it is in memory only while its layer runs. {what} was called on it from "
            f"elsewhere; call the layer itself, or {self._REMEDY}"
        )


@dataclass(frozen=True)
class _Weight:
    """A parameter, its places in the module, and its placeholder there."""

    parameter: torch.nn.Parameter
    references: list[Weight]
    layout: TensorLayout
    placeholder: torch.nn.Parameter
    empty: torch.Tensor


class OffloadedLayer:
    """A module whose parameters are in an extent of the file.

    Args:
        module: the module.
        names: dotted names of the parameters that may be moved. None: all.
        resident: ids of the parameters that may not.
        file: the file to move them to.
        gate: whether the offloader is open.
    """

    def __init__(
        self, module: torch.nn.Module, names: set[str] | None, resident: set[int], file: WeightFile, gate: Gate
    ) -> None:
        self.module = module
        self._gate = gate
        self._names = names
        self._file = file
        self._start = self._reserved = self._nbytes = 0
        self._mapped: torch.Tensor | None = None
        self._weights: list[_Weight] = []
        moved = [parameter for parameter in self._parameters(resident) if is_dense(parameter.data)]
        self.device = moved[0].device if moved else torch.device("cpu")
        self.is_empty = not moved
        if moved:
            self._move(moved)

    def parameter_ids(self) -> list[int]:
        """Return the ids of all parameters that ``names`` allows, resident or not."""
        return [id(parameter) for parameter in self._parameters(set())]

    def byte_ranges(self, path: str) -> list[tuple[str, int, int]]:
        """Return the byte ranges to read for this module: its extent."""
        return [(path, self._start, self._nbytes)]

    def finish_loading(self, resident: set[int]) -> None:
        """Write the loaded weights to the file, and unbind them.

        Loading may have replaced them by tensors of other shapes and dtypes.
        """
        if self._weights:
            # Done before an error of another layer, or of the memory.
            return
        chosen = []
        is_extent_in_use = False
        for parameter in self._parameters(set()):
            is_away = parameter.device != self.device
            if id(parameter) in resident or not is_dense(parameter.data):
                if is_away:
                    parameter.data = parameter.data.to(self.device)
                # A CPU parameter stays where it is, and so do other tensors that share its memory.
                is_extent_in_use = is_extent_in_use or not is_away
            elif is_away or self.device.type == "cpu":
                chosen.append(parameter)
        layouts, nbytes = plan_layout(chosen)
        if not self._is_in_place(chosen, layouts):
            self._write(chosen, layouts, nbytes, in_new_extent=is_extent_in_use)
        self._nbytes = nbytes
        references = self._references()
        kind = type(self.module).__name__
        weights = [
            _Weight(
                parameter,
                references[id(parameter)],
                layout,
                self._placeholder(parameter, f"{references[id(parameter)][0].name} of {kind}"),
                torch.empty(0, dtype=parameter.dtype, device=self.device),
            )
            for parameter, layout in zip(chosen, layouts, strict=True)
        ]
        refuse_loading((reference for weight in weights for reference in weight.references), {}, _RESTART)
        self._weights, self._mapped = weights, None
        self.unbind()

    def bind(self, extent: torch.Tensor) -> None:
        """Give the module its weights, as views of its extent's bytes."""
        # An inference tensor cannot become a parameter's data.
        with torch.inference_mode(mode=False):
            if extent.device != self.device:
                extent = extent.to(self.device)
            for weight in self._weights:
                weight.parameter.data = weight.layout.view(extent)
                for reference in weight.references:
                    set_weight(reference, weight.parameter)

    def unbind(self) -> None:
        """Take the weights away. Computing without them raises an error instead of returning wrong numbers."""
        for weight in self._weights:
            for reference in weight.references:
                set_weight(reference, weight.placeholder)
            weight.parameter.data = weight.empty

    def _parameters(self, resident: set[int]) -> Iterator[torch.nn.Parameter]:
        for name, parameter in self.module.named_parameters():
            if (self._names is None or name in self._names) and id(parameter) not in resident:
                yield parameter

    def _references(self) -> dict[int, list[Weight]]:
        """Find every place that refers to a parameter."""
        references: dict[int, list[Weight]] = {}
        for path, owner in self.module.named_modules():
            for name, parameter in owner._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    place = Weight(owner, name, f"{path}.{name}".lstrip("."))
                    references.setdefault(id(parameter), []).append(place)
        return references

    def _placeholder(self, parameter: torch.nn.Parameter, name: str) -> torch.nn.Parameter:
        """Make a placeholder for a hidden weight. A plain meta tensor would not do: torch computes with those."""
        shape, stride, device = parameter.shape, parameter.stride(), torch.device("meta")
        stand_in = LayerPlaceholder(name, shape, parameter.dtype, device, self._gate, stride)
        placeholder = torch.nn.Parameter(stand_in, requires_grad=False)
        # Models load weights through this attribute.
        vars(placeholder)["weight_loader"] = _refuse
        return placeholder

    def _move(self, moved: list[torch.nn.Parameter]) -> None:
        layouts, self._nbytes = plan_layout(moved)
        self._reserved = self._nbytes
        self._start = self._file.reserve(self._nbytes)
        self._mapped = extent = self._file.mapped(self._start, self._nbytes)
        for parameter, layout in zip(moved, layouts, strict=True):
            target = layout.view(extent)
            target.copy_(parameter.data)
            parameter.data = target

    def _is_in_place(self, chosen: list[torch.nn.Parameter], layouts: list[TensorLayout]) -> bool:
        if self._mapped is None:
            return False
        base = self._mapped.data_ptr()
        return all(
            parameter.data_ptr() == base + layout.offset for parameter, layout in zip(chosen, layouts, strict=True)
        )

    def _write(
        self, chosen: list[torch.nn.Parameter], layouts: list[TensorLayout], nbytes: int, *, in_new_extent: bool
    ) -> None:
        """Rewrite the extent through memory: old and new positions of weights may overlap."""
        extent = torch.zeros(nbytes, dtype=torch.uint8)
        for parameter, layout in zip(chosen, layouts, strict=True):
            layout.view(extent).copy_(parameter.data)
        if in_new_extent or nbytes > self._reserved:
            self._start, self._reserved = self._file.reserve(nbytes), nbytes
        self._file.write(extent, self._start)


class WeightFile:
    """A file without a name in a folder. It vanishes with the process, however that ends.

    Args:
        folder: a folder on the disk to stream from.

    Raises:
        OSError: the folder is not writable or is full; the message names it.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        with tempfile.TemporaryFile(dir=folder, prefix=".deepnvme-weights-") as file:
            self._descriptor = os.dup(file.fileno())
        self._lock = make_lock()
        self._users = 0
        self._is_closed = False
        self.nbytes = 0

    @property
    def path(self) -> str:
        """A path by which this process can open the file again."""
        return f"/proc/self/fd/{self._descriptor}"

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield the descriptor, which stays open inside the block if another thread closes the file.

        Raises:
            ClosedError: the file is closed.
        """
        with self._lock:
            self.check_open()
            self._users += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._users -= 1
                self._close_unused()

    def reserve(self, nbytes: int) -> int:
        """Add an extent with allocated disk space. Returns its offset."""
        with self.opened() as descriptor:
            start = self.nbytes
            stop = start + _ceil(max(1, nbytes), _EXTENT_ALIGNMENT)
            there = os.fstatvfs(descriptor)
            # Checked first: some file systems fill up for everyone before they report the lack of space.
            if stop - start > there.f_bavail * there.f_frsize:
                raise self._full_disk_error(stop)
            try:
                os.posix_fallocate(descriptor, start, stop - start)
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    os.ftruncate(descriptor, start)
                    raise self._full_disk_error(stop) from error
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
                os.ftruncate(descriptor, stop)
            self.nbytes = stop
            return start

    def mapped(self, start: int, nbytes: int) -> torch.Tensor:
        """Map an extent as bytes. Writes to it go to the file, through the page cache."""
        with self.opened() as descriptor:
            memory = mmap.mmap(descriptor, max(1, nbytes), mmap.MAP_SHARED, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def write(self, tensor: torch.Tensor, offset: int) -> None:
        """Write bytes at an offset."""
        with self.opened():
            write(tensor, self.path, offset)

    def sync(self) -> None:
        """Sync the file, and drop it from the page cache. Ctrl-C or a close ends the wait, and the sync goes on.

        Raises:
            ClosedError: the file is closed, or another thread closes it meanwhile.
        """
        # No signal ends the system call, so another thread makes it.
        done = SignalSafeEvent()
        failures: list[BaseException] = []
        try:
            _thread.start_new_thread(self._sync, (done, failures))
        except RuntimeError:
            # The process has as many threads as it may have.
            self._sync(done, failures)
        while not done.wait(POLL_INTERVAL_S):
            self.check_open()
        if failures:
            raise failures[0]

    def _sync(self, done: SignalSafeEvent, failures: list[BaseException]) -> None:
        try:
            with self.opened() as descriptor:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        except BaseException as error:  # noqa: BLE001 - `sync` raises it
            failures.append(error)
        finally:
            done.set()

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the file is closed."""
        if self._is_closed:
            msg = f"{self.folder}: the offloader was closed before it started to stream; make another"
            raise ClosedError(msg)

    def _full_disk_error(self, nbytes: int) -> OSError:
        msg = f"there is no space for {nbytes} bytes of weights; free some, or use another folder"
        return OSError(errno.ENOSPC, msg, self.folder)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and not self._users:
            # Taken first: a second close would close another file that got the number.
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)


@dataclass(frozen=True)
class TensorLayout:
    """Offset and layout of a tensor in its extent."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, extent: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the extent's bytes."""
        flat = extent[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.size, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor contains each of its bytes once without gaps, in any order of dimensions."""
    is_plain = tensor.layout == torch.strided and tensor.numel() > 0 and not tensor.is_quantized
    return is_plain and tensors.is_dense(tensor)


def plan_layout(tensors: Sequence[torch.Tensor]) -> tuple[list[TensorLayout], int]:
    """Return the layout of dense tensors, one after the other, and the total bytes."""
    layouts: list[TensorLayout] = []
    at = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.itemsize
        layouts.append(TensorLayout(at, nbytes, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())))
        at = _ceil(at + nbytes, _TENSOR_ALIGNMENT)
    return layouts, at


def _refuse(*_: object, **__: object) -> NoReturn:
    msg = f"the weights of this module stream from disk and cannot be changed; {_RESTART}"
    raise RuntimeError(msg)


def _ceil(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
