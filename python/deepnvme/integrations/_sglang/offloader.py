"""SGLang's offloader: modules whose weights are in a file, and in memory only while the module computes.

Layers pass through bounded memory. Each is read while earlier ones compute. ``_Streamer`` schedules the reads, as for
:func:`deepnvme.stream`, and ``LayerStreamer`` gives their bytes as tensors.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import _Streamer
from deepnvme._stream.memory_budget import PAGE_BYTES, allocate_slots, classify_sizes, merge_small_classes
from deepnvme._utils.arguments import whole
from deepnvme._utils.locks import make_lock
from deepnvme._utils.tensors import pinned_empty
from deepnvme.errors import ClosedError, InvalidArgumentError
from deepnvme.integrations._sglang.layer import OffloadedLayer, WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    _Piece = tuple[str, int, int]

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
        """Start streaming: the model is loaded, and its weights are final. A second call does nothing."""
        if self._streamer is not None:
            return
        if self.is_closed:
            raise ClosedError(
                f"{self._file.folder}: the offloader was closed before it started to stream; make another"
            )
        shared = Counter(parameter for module in self._modules for parameter in module.parameter_ids())
        several = {parameter for parameter, count in shared.items() if count > 1}
        for module in self._modules:
            module.finish_loading(self._is_resident(module.module) | several)
        self._file.sync()
        _return_free_memory()
        units = [module.byte_ranges(self._file.path) for module in self._modules]
        sizes = [sum(nbytes for _, _, nbytes in pieces) for pieces in units]
        memory = self._memory or min(sum(sizes), _MODULES_IN_MEMORY * max(sizes, default=0))
        device = self._modules[0].device if self._modules else None
        self._streamer = LayerStreamer(units, memory=memory, prefetch_layers=self._prefetch_layers, device=device)
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
            with self._lock, self._present(index):
                return original(*args, **kwargs)

        module.forward = forward

    @contextmanager
    def _present(self, index: int) -> Iterator[None]:
        """Keep a module's weights in memory inside the block."""
        if self._streamer is None:
            # SGLang does not report when a draft model is loaded.
            self.post_init()
        module = self._modules[index]
        if module.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            msg = "weights that stream from disk cannot be part of a CUDA graph: start SGLang with --disable-cuda-graph"
            raise RuntimeError(msg)
        streamer = self._streamer
        assert streamer is not None
        try:
            slot = streamer.acquire(index)
        except OSError as error:
            kind = type(module.module).__name__
            msg = f"{self._file.folder}: the weights of {kind}, module {index}, could not be read: {error}"
            raise (ClosedError if isinstance(error, ClosedError) else RuntimeError)(msg) from error
        try:
            module.bind(slot.tensor(0))
            yield
        finally:
            module.unbind()
            streamer.release(index)


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

    def acquire(self, unit: int) -> Slot:
        """Wait until the unit is in memory, and keep it there until it is released."""
        at = self._streamer.acquire(unit)
        return Slot(self._memory, [(at + place, nbytes) for place, nbytes in self._places[unit]])

    def release(self, unit: int) -> None:
        """Release the unit's memory once the current stream's work on it is done, and continue to read ahead."""
        stream = None if self._device is None else torch.cuda.current_stream(self._device)
        if not self._streamer.release(unit, stream):
            raise InvalidArgumentError(f"unit {unit} was released without being acquired")

    def close(self) -> None:
        """Stop reading. A second call does nothing."""
        self._streamer.close()

    def stats(self) -> dict[str, float]:
        """Return counts of reads and waits since the start."""
        return {"units": len(self._places), "slots": self._slots, **self._streamer.stats()}


class Slot:
    """Memory that contains a unit until the unit is released."""

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
