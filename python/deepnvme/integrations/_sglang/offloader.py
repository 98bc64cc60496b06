"""Modules whose weights live in a file and are in memory only while the module computes."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._utils.arguments import whole
from deepnvme.integrations._sglang.layer import OffloadedLayer
from deepnvme.integrations._sglang.layer_stream import LayerStreamer
from deepnvme.integrations._sglang.weight_file import WeightFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_log = logging.getLogger(__name__)

# As many modules are in memory at once unless a budget is given: one that computes, and two on their way.
_MODULES_IN_MEMORY = 3


class Offloader:
    """An offloader as SGLang has them: it is shown the layers while they are built, and again when they are loaded.

    While a model is loaded, the weights of its layers are mappings of a private file, so whoever fills them fills the
    file, and the memory that takes is the page cache's. Afterwards each layer's weights are read when its turn comes,
    straight into memory of the layer's device, while the layers in front of it compute.

    A layer's weights are its parameters (those that the model allows, where it says so). In memory stay buffers, and
    what ``is_resident`` names.

    Args:
        folder: where the file is.
        memory: bytes for weights in memory at once. Default: three times the largest layer.
        ahead: how many layers may be read ahead. Default: 2, as far as the memory allows.
        is_resident: gives the ids of a layer's parameters that have to stay where they are.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(
        self,
        folder: str,
        *,
        memory: int | None = None,
        ahead: int | None = None,
        is_resident: Callable[[torch.nn.Module], set[int]] = lambda _: set(),
    ) -> None:
        self._file = WeightFile(folder)
        self._memory = None if memory is None else whole(memory, "memory")
        self._ahead = None if ahead is None else whole(ahead, "ahead")
        self._is_resident = is_resident
        self._modules: list[OffloadedLayer] = []
        self._streamer: LayerStreamer | None = None
        self._taken: set[int] = set()

    def wrap_modules(
        self,
        all_modules_generator: Iterable[torch.nn.Module],
        submodule_accessor: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
        whitelist_param_names_creator: Callable[[torch.nn.Module], list[str]] | None = None,
    ) -> list[torch.nn.Module]:
        """Take the weights of each module as soon as it is built, so that never more than one is in memory.

        Args:
            all_modules_generator: makes the layers.
            submodule_accessor: gives the part of a layer whose weights may be taken. Default: all of it.
            whitelist_param_names_creator: gives the names of the parameters that may be taken. Default: all.

        Raises:
            OSError: there is no room for the weights.
        """
        layers = []
        for layer in all_modules_generator:
            layers.append(layer)
            part = layer if submodule_accessor is None else submodule_accessor(layer)
            names = None if whitelist_param_names_creator is None else set(whitelist_param_names_creator(part))
            # What an earlier layer has, too, is in the file already.
            module = OffloadedLayer(part, names, self._is_resident(layer) | self._taken, self._file)
            if module.is_empty:
                continue
            self._taken.update(module.parameter_ids())
            _return_free_memory()
            self._modules.append(module)
            self._hook(part, len(self._modules) - 1)
        return layers

    def post_init(self) -> None:
        """Begin to stream: the model is loaded, and its weights are as they will be. A second call changes empty."""
        if self._streamer is not None:
            return
        shared = Counter(parameter for module in self._modules for parameter in module.parameter_ids())
        several = {parameter for parameter, count in shared.items() if count > 1}
        for module in self._modules:
            module.finish_loading(self._is_resident(module.module) | several)
        self._file.sync()
        _return_free_memory()
        units = [module.pieces(self._file.path) for module in self._modules]
        sizes = [sum(nbytes for _, _, nbytes in pieces) for pieces in units]
        memory = self._memory or min(sum(sizes), _MODULES_IN_MEMORY * max(sizes, default=0))
        device = self._modules[0].device if self._modules else None
        self._streamer = LayerStreamer(units, memory=memory, ahead=self._ahead, device=device)
        _log.info(
            "deepnvme: the weights of %d modules, %.2f GB, stream from %s through %.2f GB on %s",
            len(units), sum(sizes) / 1e9, self._file.folder, memory / 1e9, device,
        )  # fmt: skip

    @property
    def forbid_copy_engine_usage(self) -> bool:
        """Whether kernels should leave the engine that copies to a GPU alone: weights are arriving through it."""
        return any(module.device.type != "cpu" for module in self._modules)

    def stats(self) -> dict[str, Any]:
        """What was read and waited for since the beginning of streaming."""
        return {} if self._streamer is None else self._streamer.stats()

    def close(self) -> None:
        """Stop reading and let go of the file; the modules cannot compute any more. A second call changes empty."""
        if self._streamer is not None:
            self._streamer.close()
        self._file.close()

    def _hook(self, module: torch.nn.Module, index: int) -> None:
        # As SGLang's own offloaders do it: code that calls `forward` instead of the module has its weights, too.
        original = module.forward

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self._present(index):
                return original(*args, **kwargs)

        module.forward = forward

    @contextmanager
    def _present(self, index: int) -> Iterator[None]:
        """Have a module's weights in memory inside the block."""
        if self._streamer is None:
            # SGLang does not say when a draft model has been loaded.
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
            raise RuntimeError(msg) from error
        try:
            module.show(slot.tensor(0))
            yield
        finally:
            module.hide()
            streamer.release(index)


def _return_free_memory() -> None:
    """Have the C library give back what is free: it keeps what weights on the host had, as much as all of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
