"""State dicts, and state files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._utils.arguments import path_of
from deepnvme.optim._optimizer import SHORT
from deepnvme.optim._state_store import stride_of, without_scales
from deepnvme.optim._step import SteppingOptimizer

if TYPE_CHECKING:
    from deepnvme.optim._save_load import Shards


class KernelOptimizer(SteppingOptimizer):
    """Comes before one of torch's optimizers, and takes the place of its `step`."""

    def state_dict(self) -> dict[str, Any]:
        """Give settings and state, as torch's do; moments are fp32, whatever they are kept as.

        State on disk is read for it, and takes as much memory as there is of it.

        Raises:
            RuntimeError: a step has stopped half way.
        """
        self.check_complete()
        packed: dict[str, Any] = super().state_dict()
        saved = [index for group in packed["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            gathered = self._store.read(param)
            if gathered:
                shaped = {name: _shaped(tensor, param) for name, tensor in gathered.items()}
                packed["state"][index] = {**without_scales(packed["state"].get(index, {})), **shaped}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of another, torch's own or ours.

        State beside short parameters stays fp32, where torch would round it to the type of the parameter.
        """
        # Until all of it has come: what is half of one state and half of another is nothing to go on with.
        self._is_half_loaded = True
        super().load_state_dict(state_dict)
        self._progress = None
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            if param.dtype in SHORT:
                for name, value in state_dict["state"].get(index, {}).items():
                    if torch.is_tensor(value) and value.is_floating_point() and name != "step":
                        self.state[param][name] = value.detach().to(torch.float32, copy=True)
        self._adopt_state()
        self._is_half_loaded = False

    def save_state(
        self, path: str | os.PathLike[str], *, shards: Shards | None = None, checksums: bool = True
    ) -> dict[str, int]:
        """Save state that is on disk in a file, without a trip through memory.

        XFS and Btrfs share the blocks, elsewhere the kernel copies. The file is a safetensors file. It has its name
        once all of it is on disk; until then, the file that had the name before is untouched. A symbolic link stays,
        and its target is replaced.

        Args:
            path: of the file; one for each rank.
            shards: what each parameter is: the name of a whole tensor, and which of its elements, as they lie in
                memory, is the parameter's first. With that, another number of ranks can load it. Default: each is
                whole, and its name is its number.
            checksums: whether to keep a checksum of each MiB and of all that the file says of itself. The file is read
                once for that. Default True.

        Returns:
            How many bytes went which way: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.

        Raises:
            deepnvme.Error: the disk or the file system refused; the error names the path.
            RuntimeError: a step has stopped half way.
            ValueError: the state is in memory; ``deepnvme.save(optimizer.state_dict(), path)`` saves that.
        """
        self.check_complete()
        from deepnvme.optim import _save_load  # noqa: PLC0415

        return _save_load.save(self, self._on_disk(), path_of(path), shards, checksums=checksums)

    def load_state(
        self,
        path: str | bytes | os.PathLike[str] | Sequence[str | bytes | os.PathLike[str]],
        *,
        shards: Shards | None = None,
        verify: Literal["auto", "off", "sample", "full"] = "auto",
    ) -> dict[str, int]:
        """Load what :meth:`save_state` saved; settings of groups and counts of steps, too.

        Args:
            path: of the file, or of all that the ranks saved, however many.
            shards: as in :meth:`save_state`.
            verify: what is compared with checksums before anything is loaded: ``"auto"`` and ``"sample"``, all that the
                file says of itself and one MiB of 32; ``"full"``, every byte; ``"off"``, nothing.

        Returns:
            How many bytes came which way: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``. What is cut in the same
            way as it was saved takes no trip through memory.

        Raises:
            deepnvme.errors.ChecksumError: bytes differ from those that were saved.
            CorruptFileError: a file was cut, or is none of ``save_state``.
            ValueError: elements are missing, or the state is in memory.
        """
        from deepnvme.optim import _save_load  # noqa: PLC0415

        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else path
        if verify not in ("auto", "off", "sample", "full"):
            msg = f"verify is {verify!r}; it must be 'auto', 'off', 'sample' or 'full'"
            raise ValueError(msg)
        found = _save_load.load(self, self._on_disk(), [path_of(one) for one in paths], shards, verify)
        self._progress, self._is_half_loaded = None, False
        return found


def _shaped(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Give flat state the shape of its parameter, and the same order in memory."""
    return tensor.as_strided(param.shape, stride_of(param))
