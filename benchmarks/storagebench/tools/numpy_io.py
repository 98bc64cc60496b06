"""numpy: save and load; fromfile for many tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from common.not_offered import NotOffered
from storagebench.tools.base import Suffix, Tool, synced_write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import BinaryIO

    from common.measure import Action


class NumpyIo(Tool):
    """`numpy.save` and `numpy.load`."""

    suffix: Suffix = ".npy"

    def __init__(self) -> None:
        super().__init__("numpy", "comparison")

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        array = source.numpy()
        return synced_write(path, lambda file: np.save(file, array))

    def overwrite(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        raise NotOffered("numpy.save cuts the old file first")

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base: the mapped array is copied into the tensor."""
        array = target.numpy()

        def action() -> None:
            np.copyto(array, np.load(path, mmap_mode="r"))

        return action

    def load(self, size: int, path: Path) -> Action:
        """See the base."""
        return lambda: torch.from_numpy(np.load(path))

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: the arrays come one after the other from one raw file, each in new memory."""
        counts = [target.numel() for target in targets]

        def action() -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]:
            with path.open("rb") as file:
                return [np.fromfile(file, np.uint8, count) for count in counts]

        return action

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base: `ndarray.tofile`, one after the other, into one raw file."""
        arrays = [cast("np.ndarray[tuple[int, ...], np.dtype[np.uint8]]", source.numpy()) for source in sources]

        def write(file: BinaryIO) -> None:
            for array in arrays:
                array.tofile(file)

        return synced_write(path, write)
