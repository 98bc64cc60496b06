"""The tools that save and load, each with its usual API.

A save, including its directory entries, is on the disk when it returns: tools that do not sync get an fsync.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from checkpointbench.states import State
from common import runai
from common.not_offered import NotOffered
from common.sync import sync


class Tool:
    """One way to save and load a state dict."""

    name = ""
    suffix = ""
    saves = True
    loads = True
    #: The tool that writes the file, if this one reads another's.
    written_by = ""

    def save(self, state: State, path: Path) -> Any:
        """Save, durably. Returns a `Sample` if the tool measures itself, as `limit.Fio` does."""
        raise NotOffered("it only loads")

    def load(self, path: Path) -> Any:
        """Load all tensors into host memory."""
        raise NotOffered("it only saves")

    def close(self) -> None:
        """Release the memory that a load has left."""


class Deepnvme(Tool):
    """``deepnvme.save`` and ``deepnvme.load`` with their defaults, without a progress bar."""

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
    written_by = "torch"

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
    """``SafeTensorsFileLoader`` on the CPU."""

    name = "fastsafetensors"
    saves = False
    written_by = "safetensors"

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
    """The streamer of Run:ai. Its tensors are views of its buffer."""

    saves = False
    written_by = "safetensors"

    def __init__(self, name: str, settings: dict[str, str]) -> None:
        self.name = name
        self._settings = settings

    def load(self, path: Path) -> Any:
        """See the base."""
        return runai.load(path, self._settings)


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
    """``torch.distributed.checkpoint`` in one process. It syncs its files, but not their directory."""

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

        from common import deepspeed_op  # noqa: PLC0415

        if not hasattr(self, "_handle"):
            # block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
            self._handle = deepspeed_op.load().aio_handle(1 << 20, 32, False, True, 2)  # noqa: FBT003
            self._pinned = self._handle.new_cpu_locked_tensor(64 << 20, torch.empty(0, dtype=torch.uint8))
        config = FastFileWriterConfig(dnvme_handle=self._handle, pinned_tensor=self._pinned, double_buffer=True)
        writer = Writer(str(path), config)
        torch.save(state, writer)
        writer.close()
        sync(path)


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
        Runai("runai streamer, direct", runai.DIRECT),
        Tensorizer(),
        Dcp(),
        FastFileWriter(),
    ]
