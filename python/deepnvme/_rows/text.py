"""Sizes and labels in the text of ``deepnvme rows``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme._utils.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_UNITS = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def labelled(label: str, text: str) -> str:
    """Return a line that begins with its label."""
    return f"{label:<10}{printable(text)}"


def size_text(nbytes: float) -> str:
    """Return a number of bytes in the unit that suits it."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} byte{'' if nbytes == 1 else 's'}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Sequence[int]) -> str:
    """Return a shape, such as ``50000 x 160``."""
    return " x ".join(map(str, shape))


def row_text(shape: Sequence[int], dtype: str) -> str:
    """Return the shape and the dtype of a row, such as ``160 bfloat16``."""
    return f"{shape_text(shape)} {dtype}" if shape else dtype
