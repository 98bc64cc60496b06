"""Tools that load a file of weights to a GPU, each with its usual API."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from gpubench.tool import Loader, OwnEngine, Setup, needs_torch_cuda

if TYPE_CHECKING:
    from pathlib import Path

    import torch

OURS = 'deepnvme.load(device="cuda")'
OURS_PT = 'deepnvme.load(device="cuda"), .pt'
OURS_GDS = 'deepnvme.load(device="cuda"), cuFile'


class Deepnvme(OwnEngine, Loader):
    """``deepnvme.load`` with its defaults."""

    name = OURS

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See the base."""
        return self.setup.gpu.load(str(path), self.engine)


class DeepnvmeGds(Deepnvme):
    """The same with cuFile required; otherwise the reason is recorded."""

    name = OURS_GDS
    options: ClassVar[dict[str, str]] = {"gds": "required"}


class DeepnvmePt(Deepnvme):
    """The same with a torch archive."""

    name = OURS_PT
    suffix = ".pt"


class TorchLoad(Loader):
    """``torch.load`` of the archive, without a memory map of the file."""

    name = "torch.load, .pt"
    suffix = ".pt"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        needs_torch_cuda(setup, self.name)

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See the base."""
        import torch  # noqa: PLC0415

        state: dict[str, torch.Tensor] = torch.load(
            path, map_location=self.setup.gpu.device, weights_only=True, mmap=False
        )
        return state


class FastSafetensors(Loader):
    """``SafeTensorsFileLoader``, with its own threads and bounce buffers."""

    name = "fastsafetensors"
    without_gds = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        needs_torch_cuda(setup, self.name)
        import torch  # noqa: PLC0415
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # noqa: PLC0415

        self._make: Any = lambda: SafeTensorsFileLoader(
            SingleGroup(), torch.device(setup.gpu.device), nogds=self.without_gds
        )
        self._to_close: list[Any] = []

    def settings(self) -> str:
        """See the base."""
        return f"nogds={self.without_gds}"

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See the base."""
        loader = self._make()
        self._to_close.append(loader)
        loader.add_filenames({0: [str(path)]})
        buffer = loader.copy_files_to_device()
        self._to_close.append(buffer)
        return {name: buffer.get_tensor(name) for name in buffer.key_to_rank_lidx}

    def free_last_load(self) -> None:
        """See the base."""
        while self._to_close:
            self._to_close.pop().close()

    def close(self) -> None:
        """See the base."""
        self.free_last_load()


class FastSafetensorsGds(FastSafetensors):
    """The same with cuFile, direct or copying."""

    name = "fastsafetensors, cuFile"
    without_gds = False


class _PackageLoader(Loader):
    """A loader whose package is imported when it runs."""

    module: ClassVar[str]
    function: ClassVar[str]

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        needs_torch_cuda(setup, self.name)
        self._function: Any = getattr(importlib.import_module(self.module), self.function)


class Safetensors(_PackageLoader):
    """``safetensors.torch.load_file(device="cuda")``."""

    name = "safetensors"
    module = "safetensors.torch"
    function = "load_file"

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See the base."""
        state: dict[str, torch.Tensor] = self._function(path, device=self.setup.gpu.device)
        return state


class Runai(_PackageLoader):
    """``SafetensorsStreamer`` to the GPU."""

    name = "runai streamer"
    module = "runai_model_streamer"
    function = "SafetensorsStreamer"

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See the base. Tensors that the streamer yields on the host go to the GPU, as in SGLang and vLLM."""
        device = self.setup.gpu.device
        with self._function() as streamer:
            streamer.stream_file(str(path), device=device)
            return {name: tensor.to(device, non_blocking=True) for name, tensor in streamer.get_tensors()}


class InstantTensor(_PackageLoader):
    """``instanttensor.safe_open``, which yields tensors of their own memory on the GPU."""

    name = "InstantTensor"
    module = "instanttensor"
    function = "safe_open"

    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """See the base."""
        with self._function(str(path), framework="pt", device=self.setup.gpu.device) as file:
            return dict(file.tensors())


KINDS: tuple[type[Loader], ...] = (
    Deepnvme,
    DeepnvmeGds,
    DeepnvmePt,
    Safetensors,
    TorchLoad,
    FastSafetensors,
    FastSafetensorsGds,
    Runai,
    InstantTensor,
)
