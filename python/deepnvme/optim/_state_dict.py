"""State dicts and state files of an optimizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._utils.public import to_path
from deepnvme._utils.tensors import mark_copies
from deepnvme.errors import InvalidArgumentError
from deepnvme.optim import _save_load
from deepnvme.optim._optimizer import SIXTEEN_BIT_FLOATS
from deepnvme.optim._state_store import without_scales
from deepnvme.optim._step import SteppingOptimizer

if TYPE_CHECKING:
    from deepnvme.optim._state_store import Shards


class KernelOptimizer(SteppingOptimizer):
    """Derives before one of torch's optimizers, and replaces its ``step`` and its state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state in torch's format, with fp32 moments.

        State on disk is read into memory for it.

        Returns:
            A dict that ``load_state_dict`` accepts, both here and in torch's class.

        Raises:
            ClosedError: the optimizer has state on disk, and was closed.
            RuntimeError: a step or a load has stopped half way.
        """
        self._check_complete()
        packed: dict[str, Any] = super().state_dict()
        saved = [index for group in packed["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            gathered = self._store.read(param)
            if gathered:
                mark_copies(gathered.values(), "optimizer.load_state_dict(state)")
                packed["state"][index] = {**without_scales(packed["state"].get(index, {})), **gathered}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of torch's optimizer or ours.

        State of bf16 and fp16 parameters stays fp32, which torch would round to the type of the parameter.

        Args:
            state_dict: the result of ``state_dict()``.

        Raises:
            ClosedError: the optimizer has state on disk, and was closed.
            ValueError: as from torch, the param groups differ.
        """
        self._store.check_open()
        was_half_loaded, state_before = self._is_half_loaded, self.state
        # Until all of it is loaded: half-loaded state is useless.
        self._is_half_loaded = True
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            # torch checks everything, then replaces the state at once. A state dict that it refuses changes nothing.
            self._is_half_loaded = was_half_loaded or self.state is not state_before
            raise
        self._progress = None
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            if param.dtype in SIXTEEN_BIT_FLOATS:
                for name, value in state_dict["state"].get(index, {}).items():
                    if torch.is_tensor(value) and value.is_floating_point() and name != "step":
                        self.state[param][name] = value.detach().to(torch.float32, copy=True)
        self._adopt_state()
        self._is_half_loaded = False

    def save_state(
        self, path: str | os.PathLike[str], *, shards: Shards | None = None, checksums: bool = True
    ) -> dict[str, int]:
        """Save the state on disk to a file, without loading it as a whole.

        XFS and Btrfs share the blocks; elsewhere the kernel copies. The result is a safetensors file. It gets its name
        once it is completely on disk; until then a previous file of that name is untouched. If the path is a symbolic
        link, its target is replaced.

        Args:
            path: path of the file, one per rank.
            shards: for each parameter, the name of a whole tensor and the index of the parameter's first element in it,
                in memory order. Another number of ranks can then load the file. Default: parameters are whole, and
                named by their number.
            checksums: checksum each MiB and the header. The file is read once for that. Default True.

        Returns:
            Bytes by route: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.

        Raises:
            ClosedError: the optimizer was closed.
            deepnvme.Error: the disk or the file system refused; the error names the path.
            RuntimeError: a step or a load has stopped half way.
            ValueError: the state is in memory; ``deepnvme.save(optimizer.state_dict(), path)`` saves that. Or the name
                ends with ``.pt`` or ``.pth``. Or :meth:`load_state` would refuse ``shards`` or a setting of a param
                group; no file is written.

        Example:
            >>> layer = torch.nn.Linear(512, 512)
            >>> optimizer = deepnvme.optim.AdamW(layer.parameters(), swap_dir=".", memory="1MB")
            >>> layer(torch.randn(2, 512)).sum().backward()
            >>> optimizer.step()
            >>> moved = optimizer.save_state("state.safetensors")
            >>> sum(moved.values()) >= 2 * 4 * 512 * 513  # two fp32 moments of each parameter
            True
        """
        self._check_complete()
        target = to_path(path)
        if target.suffix in {".pt", ".pth"}:
            msg = f"{target}: this is a safetensors file, and {target.suffix} names a torch archive"
            raise InvalidArgumentError(f"{msg}; name it {target.stem}.safetensors")
        return _save_load.save(self, self._on_disk(), target, shards, checksums=checksums)

    def load_state(
        self,
        path: str | bytes | os.PathLike[str] | Sequence[str | bytes | os.PathLike[str]],
        *,
        shards: Shards | None = None,
        verify: Literal["auto", "off", "sample", "full"] = "auto",
    ) -> dict[str, int]:
        """Load the result of :meth:`save_state`, with the settings of param groups and step counts.

        Args:
            path: path of the file, or of the files of all ranks, however many.
            shards: as in :meth:`save_state`.
            verify: what to compare with checksums first. ``"auto"`` and ``"sample"``: the header and one MiB of 32.
                ``"full"``: every byte. ``"off"``: nothing.

        Returns:
            Bytes by route: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``. State that is split as it was saved is
            shared, or copied by the kernel, if the file system allows it.

        Raises:
            ClosedError: the optimizer was closed.
            deepnvme.errors.ChecksumError: bytes differ from those that were saved.
            CorruptFileError: a file is truncated, or not a result of ``save_state``.
            ValueError: elements are missing, another optimizer or model saved a file, or the state is in memory.

        Example:
            >>> model = torch.nn.Linear(512, 512)
            >>> settings = {"swap_dir": ".", "memory": "1MB"}
            >>> optimizer = deepnvme.optim.AdamW(model.parameters(), **settings)
            >>> model(torch.randn(2, 512)).square().mean().backward()
            >>> optimizer.step()
            >>> moved = optimizer.save_state("state.safetensors")
            >>> resumed = deepnvme.optim.AdamW(model.parameters(), **settings)
            >>> moved = resumed.load_state("state.safetensors")
            >>> resumed.state[model.weight]["step"]
            tensor(1.)
        """
        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else path
        if verify not in ("auto", "off", "sample", "full"):
            msg = f"verify is {verify!r}; it must be 'auto', 'off', 'sample' or 'full'"
            raise InvalidArgumentError(msg)
        found = _save_load.load(self, self._on_disk(), [to_path(one) for one in paths], shards, verify)
        self._progress, self._is_half_loaded = None, False
        return found
