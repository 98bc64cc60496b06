"""The formats of the tools' files: raw bytes, numpy's and torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from storagebench import data

if TYPE_CHECKING:
    from pathlib import Path

    from storagebench.tools.base import Suffix


def save(tensor: torch.Tensor, path: Path, suffix: Suffix) -> None:
    """Write a tensor in one of the three formats."""
    with path.open("wb") as file:
        if suffix == ".npy":
            np.save(file, tensor.numpy())
        elif suffix == ".pt":
            torch.save(tensor, file)
        else:
            file.write(tensor.numpy().data)


def check(name: str, path: Path, suffix: Suffix, wanted: torch.Tensor, *, every_byte: bool) -> None:
    """Compare a file of one of the three formats with the tensor that was written."""
    if suffix == ".npy":
        data.check_memory(name, torch.from_numpy(np.load(path)), wanted, every_byte=every_byte)
    elif suffix == ".pt":
        data.check_memory(name, torch.load(path, mmap=True), wanted, every_byte=every_byte)
    else:
        data.check_file(name, path, wanted, every_byte=every_byte)
