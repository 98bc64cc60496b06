"""TensorNVMe's offloader under torch's fused AdamW, as ColossalAI and its own examples put it together.

Moments of one parameter are one vectored request. While some parameters are changed, the next are read and the last
written. Moments get new memory when they are read, and lose it when they are written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from common import cache
from common.not_offered import NotOffered
from trainbench import tensornvme_op
from trainbench.steppers import Plain
from trainbench.tensors import LR, WEIGHT_DECAY

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TensorNvme(Plain):
    """Reads and writes through the page cache. Its file is dropped from it before each step, outside the timing."""

    name = "TensorNVMe"
    contract = "moments on disk, by the page cache; cold before each step; a step ends with an fsync"
    is_cached = True
    trials = ({"at_once": 2, "entries": 32}, {"at_once": 1, "entries": 32}, {"at_once": 4, "entries": 64})

    def open(self) -> None:
        """See the base."""
        if self.setting.is_16_bit:
            raise NotOffered("it has tensors of one type on disk, and no master weights")
        try:
            package = tensornvme_op.load()
        except ImportError as error:
            raise NotOffered(f"TensorNVMe: {error}") from error
        super().open()
        options = {**self.trials[0], **self.setting.options}
        self._at_once = options["at_once"]
        folder = Path(self.setting.folder) / "tensornvme"
        self._disk: Any = package.DiskOffloader(str(folder), options["entries"], backend="aio")
        (self._file,) = folder.iterdir()
        self._optimizer = torch.optim.AdamW(self.of, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
        for one in self.of:
            moments = {name: torch.zeros_like(one) for name in _MOMENTS}
            self._optimizer.state[one] = {"step": torch.tensor(0.0), **moments}
            self._disk.sync_writev(self._moments(one))

    def _moments(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        return [self._optimizer.state[parameter][name] for name in _MOMENTS]

    def _read(self, parameters: list[torch.nn.Parameter]) -> None:
        for one in parameters:
            self._disk.async_readv(self._moments(one))

    def step(self, rate: float) -> None:
        """See the base."""
        group, width = self._optimizer.param_groups[0], self._at_once
        group["lr"] = rate
        self._read(self.of[:width])
        for index in range(0, len(self.of), width):
            here = self.of[index : index + width]
            # Its sync_read_events waits for writes alone.
            self._disk.synchronize()
            self._read(self.of[index + width : index + 2 * width])
            group["params"] = here
            self._optimizer.step()
            for one in here:
                self._disk.async_writev(self._moments(one))
        group["params"] = self.of
        self._disk.synchronize()

    def close(self) -> None:
        """See the base; its file goes with it."""
        del self._disk

    def settle(self) -> None:
        """See the base."""
        descriptor = os.open(self._file, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rest(self) -> None:
        """See the base."""
        cache.make_cold(self._file)

    def settings(self) -> dict[str, Any]:
        """See the base."""
        return {**self.trials[0], **super().settings()}
