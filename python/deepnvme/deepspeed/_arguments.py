"""Check the arguments of callers and convert them for the engine.

The rules are those of DeepSpeed's native ops. A flag is anything with a truth value of its own: 0 and 1, but no string.
An integer is not a float. A buffer is a torch tensor. File names may also be `os.PathLike` or a stripe set.
"""

from __future__ import annotations

import operator
import os
from typing import TypeAlias

import torch

from deepnvme._deepnvme import StripeSet
from deepnvme._utils.public import WHOLE_MAX, whole

# File names as callers pass them, and as the engine takes them.
FileName: TypeAlias = str | bytes | os.PathLike[str] | StripeSet
Name: TypeAlias = str | bytes | StripeSet


def tensor(value: object, name: str) -> torch.Tensor:
    """Return a torch tensor that is one block of memory, or raise `TypeError`."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            msg = f"{name} has the layout {value.layout}, which is not one block of memory; transfer {name}.to_dense()"
            raise TypeError(msg)
        return value
    msg = f"{name} is a {type(value).__name__}; it must be a torch.Tensor (for an array: torch.from_numpy(array))"
    raise TypeError(msg)


def integer(value: object, name: str, low: int = -WHOLE_MAX) -> int:
    """Return an integer of `low` or more, or raise `TypeError`, even for whole floats, or `ValueError`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        msg = f"{name} is {value!r}; it must be an int"
        raise TypeError(msg) from None
    # DeepSpeed's ops accept a bool as an integer.
    return whole(int(number), name, low)


def positive(value: object, name: str) -> int:
    """Return an integer of 1 or more, or raise `TypeError` or `ValueError`."""
    return integer(value, name, 1)


def natural(value: object, name: str) -> int:
    """Return an integer of 0 or more, or raise `TypeError` or `ValueError`."""
    return integer(value, name, 0)


def flag(value: object, name: str) -> bool:
    """Return the truth value of an object that defines one: a bool, number, None or numpy bool.

    Raises:
        TypeError: it defines none, for example a string: `"false"` would be true.
    """
    if hasattr(type(value), "__bool__"):
        return bool(value)
    msg = f"{name} is {value!r}; it must be a bool"
    raise TypeError(msg)


def filename(value: object, name: str = "filename") -> Name:
    """Return a file name: `str`, `bytes`, `os.PathLike` or `deepnvme.StripeSet`; otherwise raise `TypeError`."""
    if isinstance(value, (str, bytes, StripeSet)):
        return value
    if isinstance(value, os.PathLike):
        path: str | bytes = os.fspath(value)
        return path
    msg = f"{name} is {value!r}; it must be a str, bytes or os.PathLike"
    raise TypeError(msg)


def descriptor(value: object, name: str = "fd") -> int:
    """Return an open file descriptor, or raise `TypeError` or `ValueError`."""
    if isinstance(value, bool):
        msg = f"{name} is {value!r}; it must be an open file descriptor"
        raise TypeError(msg)
    return natural(value, name)
