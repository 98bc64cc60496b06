"""SGLang's offloader: modules whose weights are in a file, and in memory only while the module computes.

Layers pass through bounded memory. Each is read while earlier ones compute. ``_Streamer`` schedules the reads, as for
:func:`deepnvme.stream`, and ``LayerStreamer`` gives their bytes as tensors.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deepnvme._deepnvme import _Streamer
from deepnvme._stream.memory_budget import PAGE_BYTES, allocate_slots, classify_sizes, merge_small_classes
from deepnvme._utils.interrupts import is_of_handler, make_lock
from deepnvme._utils.public import whole
from deepnvme._utils.tensors import pinned_empty
from deepnvme.errors import ClosedError, InvalidArgumentError
from deepnvme.integrations._sglang.layer import OffloadedLayer, WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    _Piece = tuple[str, int, int]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

# Modules in memory without a given budget: one that computes, and two that are being read.
_MODULES_IN_MEMORY = 3


class Offloader:
    """An offloader with SGLang's interface. SGLang passes it the layers while it builds them, and after loading.

    During loading, the weights of a layer are mappings of a private file: filling them fills the file, and takes memory
    of the page cache only. Afterwards each layer's weights are read before it runs, straight into memory of its device,
    while earlier layers compute.

    A layer's weights are its parameters (those that the model allows, if it says so). Buffers stay in memory, and so do
    the parameters of ``is_resident``.

    Threads take turns: a layer has its weights for one of them at a time.

    Args:
        folder: folder of the file.
        memory: bytes of memory for weights. Default: three times the largest layer, or all layers if that is less.
        prefetch_layers: layers to read ahead. Default: 2, if the memory allows it.
        is_resident: returns the ids of a layer's parameters that must stay in memory.

    Raises:
        OSError: the folder is not writable.
    """

    def __init__(
        self,
        folder: str,
        *,
        memory: int | None = None,
        prefetch_layers: int | None = None,
        is_resident: Callable[[torch.nn.Module], set[int]] = lambda _: set(),
    ) -> None:
        self._file = WeightFile(folder)
        self._memory = None if memory is None else whole(memory, "memory")
        self._prefetch_layers = None if prefetch_layers is None else whole(prefetch_layers, "prefetch_layers")
        self._is_resident = is_resident
        self._modules: list[OffloadedLayer] = []
        self._streamer: LayerStreamer | None = None
        self._moved: set[int] = set()
        # Held while a layer runs. Reentrant, because layers may contain each other.
        self._lock = make_lock()
        self._process = os.getpid()
        self.is_closed = False
        """Whether :meth:`close` was called."""

    def wrap_modules(
        self,
        all_modules_generator: Iterable[torch.nn.Module],
        submodule_accessor: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        whitelist_param_names_creator: Callable[[torch.nn.Module], list[str]] | None = None,
    ) -> list[torch.nn.Module]:
        """Move the weights of each module to the file once it is built, so that only one is in memory at a time.

        Args:
            all_modules_generator: builds the layers.
            submodule_accessor: returns the part of a layer whose weights may be moved. Default: all of it.
            whitelist_param_names_creator: returns the names of the parameters that may be moved. Default: all.

        Raises:
            OSError: there is no space for the weights.
        """
        self._check_process()
        layers = []
        for layer in all_modules_generator:
            layers.append(layer)
            part = layer if submodule_accessor is None else submodule_accessor(layer)
            names = None if whitelist_param_names_creator is None else set(whitelist_param_names_creator(part))
            # Parameters shared with an earlier layer are in the file already.
            module = OffloadedLayer(part, names, self._is_resident(layer) | self._moved, self._file, self)
            if module.is_empty:
                continue
            self._moved.update(module.parameter_ids())
            _return_free_memory()
            self._modules.append(module)
            self._hook(part, len(self._modules) - 1)
        return layers

    def post_init(self) -> None:
        """Start streaming: the model is loaded, and its weights are final. A second call does nothing.

        After Ctrl-C, the next call goes on with it.

        Raises:
            ClosedError: the offloader is closed, or another thread closes it meanwhile.
        """
        self._check_process()
        if self._streamer is not None:
            return
        self._file.check_open()
        shared = Counter(parameter for module in self._modules for parameter in module.parameter_ids())
        several = {parameter for parameter, count in shared.items() if count > 1}
        for module in self._modules:
            module.finish_loading(self._is_resident(module.module) | several)
        self._file.sync()
        _return_free_memory()
        with self._file.opened():
            units = [module.byte_ranges(self._file.path) for module in self._modules]
            sizes = [sum(nbytes for _, _, nbytes in pieces) for pieces in units]
            memory = self._memory or min(sum(sizes), _MODULES_IN_MEMORY * max(sizes, default=0))
            device = self._modules[0].device if self._modules else None
            self._streamer = LayerStreamer(units, memory=memory, prefetch_layers=self._prefetch_layers, device=device)
        if self.is_closed:
            # Another thread closed it before it was there to be closed.
            self._streamer.close()
            raise self.closed_error()
        _log.info(
            "deepnvme: the weights of %d modules, %.2f GB, stream from %s through %.2f GB on %s",
            len(units), sum(sizes) / 1e9, self._file.folder, memory / 1e9, device,
        )  # fmt: skip

    def closed_error(self, what: str = "") -> ClosedError:
        """Make the error of a use after the close."""
        return ClosedError(f"{what}the offloader of {self._file.folder} was closed; load the model again")

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Whether kernels should not use the GPU's copy engine, which transfers weights."""
        return any(module.device.type != "cpu" for module in self._modules)

    def stats(self) -> dict[str, Any]:
        """Return counts of reads and waits since streaming started."""
        return {} if self._streamer is None else self._streamer.stats()

    def close(self) -> None:
        """Stop reading and close the file. The modules can no longer compute. A second call does nothing."""
        self.is_closed = True
        if self._streamer is not None:
            self._streamer.close()
        self._file.close()

    def _hook(self, module: torch.nn.Module, index: int) -> None:
        # As in SGLang's own offloaders, so that direct calls of `forward` also find the weights.
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return self._run(index, lambda: original(*args, **kwargs))

        module.forward = forward

    def _run(self, index: int, work: Callable[[], _T]) -> _T:
        """Call a function with a module's weights in memory."""
        if self._streamer is None:
            # SGLang does not report when a draft model is loaded.
            self.post_init()
        module = self._modules[index]
        if module.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            msg = "weights that stream from disk cannot be part of a CUDA graph: start SGLang with --disable-cuda-graph"
            raise RuntimeError(msg)

        def refused(error: OSError) -> Exception:
            kind = type(module.module).__name__
            msg = f"{self._file.folder}: the weights of {kind}, module {index}, could not be read: {error}"
            return (ClosedError if isinstance(error, ClosedError) else RuntimeError)(msg)

        def bound(slot: Slot) -> _T:
            try:
                module.bind(slot.tensor(0))
                return work()
            finally:
                module.unbind()

        assert self._streamer is not None
        return self._streamer.run(index, bound, refused)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            msg = (
                f"{self._file.folder}: the offloader belongs to process {self._process}, the parent of this fork; "
                "make another"
            )
            raise ClosedError(msg)


class LayerStreamer:
    """Keeps some of the units in memory, and reads the next ones ahead.

    Args:
        units: the pieces of each unit (path, offset, bytes), in order of use.
        memory: bytes for units in memory, without the rounding to whole pages.
        prefetch_layers: units to read ahead. Default: 2, if the memory allows it.
        device: device of the memory. Default: the host, pinned up to its limits.

    Raises:
        ValueError: the largest unit does not fit into the memory.
        OSError: a file cannot be opened.
    """

    def __init__(
        self,
        units: Sequence[Sequence[_Piece]],
        *,
        memory: int,
        prefetch_layers: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        paths = list(dict.fromkeys(path for pieces in units for path, _, _ in pieces))
        self._places: list[list[tuple[int, int]]] = []
        reads = []
        for pieces in units:
            at, places, unit = 0, [], []
            for path, offset, nbytes in pieces:
                # With the same offset within a page as in the file, direct I/O needs no copy.
                at = -(-at // PAGE_BYTES) * PAGE_BYTES + offset % PAGE_BYTES
                places.append((at, nbytes))
                unit.append((paths.index(path), offset, nbytes, at))
                at += nbytes
            self._places.append(places)
            reads.append(unit)
        sizes = [sum(nbytes for _, nbytes in places) for places in self._places]
        ends = [places[-1][0] + places[-1][1] if places else 0 for places in self._places]
        largest = max(sizes, default=0)
        if memory < largest:
            raise InvalidArgumentError(
                f"memory is {memory} bytes, but the largest unit takes {largest}; set it to at least {largest}, or "
                f"{2 * largest} to read ahead"
            )
        # Room for the requested number of units, each rounded to whole pages.
        memory += max((end - size for end, size in zip(ends, sizes, strict=True)), default=0) * (
            memory // max(largest, 1)
        )
        memory += PAGE_BYTES * (memory // max(largest, 1))
        class_of, slot_bytes = merge_small_classes(memory, *classify_sizes(ends))
        classes = allocate_slots(memory, class_of, slot_bytes, prefetch_layers) if ends else []
        self._slots = sum(each.slots for each in classes)
        self._device = device if device is not None and device.type == "cuda" else None
        nbytes = sum(each.slots * each.slot_bytes for each in classes)
        self._memory = (
            pinned_empty(nbytes) if self._device is None else torch.empty(nbytes, dtype=torch.uint8, device=device)
        )
        kinds = [(each.slots, each.prefetch, each.slot_bytes, each.shares_memory) for each in classes]
        self._streamer = _Streamer(paths, list(zip(class_of, reads, strict=True)), kinds, self._memory, None)
        self._streamer.warm_up()

    def run(self, unit: int, work: Callable[[Slot], _T], refused: Callable[[OSError], Exception] | None = None) -> _T:
        """Wait until the unit is in memory, and keep it there while a function runs.

        Its memory is reused once the current stream's work on it is done.

        Args:
            unit: the number of the unit.
            work: gets the memory. Its result is returned.
            refused: returns the error to raise where the unit cannot be read. Default: that error.
        """
        acquire, release = self._streamer.acquire, self._streamer.release
        stream = None if self._device is None else torch.cuda.current_stream(self._device)
        held: list[int] = []
        try:
            try:
                # `map` runs no bytecode between the call and the append, where Ctrl-C could come. So the list always
                # holds what was acquired.
                held.extend(map(acquire, (unit,)))
            except OSError as error:
                if refused is None or is_of_handler(error):
                    raise
                raise refused(error) from error
            at = held[0]
            return work(Slot(self._memory, [(at + place, nbytes) for place, nbytes in self._places[unit]]))
        finally:
            # First statement in `finally`, so that Ctrl-C cannot come before it: an unreleased unit would be lost.
            if held:
                release(unit, stream)

    def close(self) -> None:
        """Stop reading. A second call does nothing."""
        self._streamer.close()

    def stats(self) -> dict[str, float]:
        """Return counts of reads and waits since the start."""
        return {"units": len(self._places), "slots": self._slots, **self._streamer.stats()}


class Slot:
    """Memory that contains a unit while a function runs."""

    def __init__(self, memory: torch.Tensor, places: list[tuple[int, int]]) -> None:
        self._memory, self._places = memory, places

    def tensor(self, index: int) -> torch.Tensor:
        """Return the bytes of one piece of the unit, as a one-dimensional ``uint8`` tensor."""
        at, nbytes = self._places[index]
        return self._memory[at : at + nbytes]


def _return_free_memory() -> None:
    """Return free memory to the kernel. The C library would otherwise keep as much as all weights took."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
