"""The tools that save and load, each with its usual API.

A save is on the disk when it returns: tools that do not sync get an fsync.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from checkpointbench.models import State
from storagebench.tools.base import NotOffered


class Tool:
    """One way to save and load a state dict."""

    name = ""
    suffix = ""
    saves = True
    loads = True
    #: The tool that writes the file, if this one reads another's.
    reads_of = ""

    def save(self, state: State, path: Path) -> Any:
        """Save, durably; fio gives its own measurement."""
        raise NotOffered("it only loads")

    def load(self, path: Path) -> Any:
        """Load all tensors into host memory."""
        raise NotOffered("it only saves")

    def close(self) -> None:
        """Release the memory that a load has left."""


def sync(path: Path) -> None:
    """Bring a file, or all files of a folder, to the disk, and the name of the file or folder."""
    files = [entry for entry in path.rglob("*") if entry.is_file()] if path.is_dir() else [path]
    for file in [*files, path.parent]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Deepnvme(Tool):
    """``deepnvme.save`` and ``deepnvme.load`` as they come."""

    def __init__(self, suffix: str) -> None:
        self.name = f"deepnvme {suffix}"
        self.suffix = suffix

    def save(self, state: State, path: Path) -> None:
        """See the base."""
        import deepnvme  # noqa: PLC0415

        deepnvme.save(state, path, progress=False)

    def load(self, path: Path) -> Any:
        """See the base."""
        import deepnvme  # noqa: PLC0415

        return deepnvme.load(path, progress=False)


class Torch(Tool):
    """``torch.save`` with an fsync, ``torch.load(weights_only=True)``."""

    name = "torch"
    suffix = ".torch.pt"

    def save(self, state: State, path: Path) -> None:
        """See the base."""
        torch.save(state, path)
        sync(path)

    def load(self, path: Path) -> Any:
        """See the base."""
        return torch.load(path, weights_only=True)


class TorchMmap(Tool):
    """``torch.load(mmap=True)``: pages come in when they are touched."""

    name = "torch mmap"
    saves = False
    reads_of = "torch"

    def load(self, path: Path) -> Any:
        """See the base."""
        return torch.load(path, weights_only=True, mmap=True)


class Safetensors(Tool):
    """``save_file`` with an fsync, ``load_file``."""

    name = "safetensors"
    suffix = ".theirs.safetensors"

    def save(self, state: State, path: Path) -> None:
        """See the base."""
        from safetensors.torch import save_file  # noqa: PLC0415

        save_file(state, path)
        sync(path)

    def load(self, path: Path) -> Any:
        """See the base."""
        from safetensors.torch import load_file  # noqa: PLC0415

        return load_file(path)


class FastSafetensors(Tool):
    """``fastsafe_open`` on the CPU."""

    name = "fastsafetensors"
    saves = False
    reads_of = "safetensors"

    def load(self, path: Path) -> Any:
        """See the base."""
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # noqa: PLC0415

        self._loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        self._loader.add_filenames({0: [str(path)]})
        self._buffer = self._loader.copy_files_to_device()
        return {name: self._buffer.get_tensor(name) for name in self._buffer.key_to_rank_lidx}

    def close(self) -> None:
        """See the base."""
        if hasattr(self, "_buffer"):
            self._buffer.close()
            self._loader.close()
            del self._buffer, self._loader


class Runai(Tool):
    """The streamer of Run:ai, into tensors of their own."""

    saves = False
    reads_of = "safetensors"

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self._environment = environment

    def load(self, path: Path) -> Any:
        """See the base."""
        from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

        before = {key: os.environ.get(key) for key in self._environment}
        os.environ.update(self._environment)
        try:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(str(path))
                return dict(streamer.get_tensors())
        finally:
            for key, value in before.items():
                if value is None:
                    del os.environ[key]
                else:
                    os.environ[key] = value


class Tensorizer(Tool):
    """CoreWeave's format."""

    name = "tensorizer"
    suffix = ".tensors"

    def save(self, state: State, path: Path) -> None:
        """See the base."""
        from tensorizer import TensorSerializer  # noqa: PLC0415

        serializer = TensorSerializer(str(path))
        serializer.write_state_dict(state)
        serializer.close()
        sync(path)

    def load(self, path: Path) -> Any:
        """See the base."""
        from tensorizer import TensorDeserializer  # noqa: PLC0415

        return dict(TensorDeserializer(str(path), device="cpu", lazy_load=False).items())


class Dcp(Tool):
    """``torch.distributed.checkpoint`` in one process; it syncs its files itself."""

    name = "torch DCP"
    suffix = ".dcp"

    def save(self, state: State, path: Path) -> None:
        """See the base."""
        from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

        shutil.rmtree(path, ignore_errors=True)
        save(dict(state), checkpoint_id=str(path), no_dist=True)
        sync(path)

    def load(self, path: Path) -> Any:
        """See the base."""
        from torch.distributed.checkpoint.filesystem import FileSystemReader  # noqa: PLC0415
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: PLC0415
        from torch.distributed.checkpoint.state_dict_loader import load  # noqa: PLC0415

        known = FileSystemReader(path).read_metadata().state_dict_metadata
        state = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in known.items()
            if isinstance(one, TensorStorageMetadata)
        }
        load(state, checkpoint_id=str(path), no_dist=True)
        return state


class FastFileWriter(Tool):
    """DeepSpeed's FastPersist writer under ``torch.save``: double-buffered, 64 MiB, on DeepSpeed's own handle."""

    name = "DeepSpeed FastFileWriter"
    suffix = ".fast.pt"
    loads = False

    def save(self, state: State, path: Path) -> None:
        """See the base."""
        from deepspeed.io import FastFileWriter as Writer  # noqa: PLC0415
        from deepspeed.io import FastFileWriterConfig  # noqa: PLC0415

        from storagebench.tools import deepspeed_op  # noqa: PLC0415

        if not hasattr(self, "_handle"):
            self._handle = deepspeed_op.load().aio_handle(1 << 20, 32, False, True, 2)  # noqa: FBT003
            self._pinned = self._handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(dnvme_handle=self._handle, pinned_tensor=self._pinned, double_buffer=True)
        writer = Writer(str(path), config)
        torch.save(state, writer)
        writer.close()
        sync(path)


def direct_runai() -> Runai:
    """Return the streamer of Run:ai with direct I/O."""
    settings = {"RUNAI_STREAMER_DIRECT_BLOCK": "4096", "RUNAI_STREAMER_FS_QUEUE_DEPTH": "32"}
    return Runai("runai streamer, direct", settings)


def all_tools() -> list[Tool]:
    """Return all tools, each after the one whose files it reads."""
    return [
        Deepnvme(".pt"),
        Deepnvme(".safetensors"),
        Torch(),
        TorchMmap(),
        Safetensors(),
        FastSafetensors(),
        Runai("runai streamer", {}),
        direct_runai(),
        Tensorizer(),
        Dcp(),
        FastFileWriter(),
    ]
