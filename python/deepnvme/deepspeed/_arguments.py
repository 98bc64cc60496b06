"""What callers pass, checked and turned into what the engine takes.

The rules are those of DeepSpeed's native ops: a flag is anything with a truth value of its own (so 0 and 1, but no
string), an integer is no float, a buffer is a torch tensor. File names may be `os.PathLike` or a stripe set as well.
"""

from __future__ import annotations

import operator
import os
from typing import TypeAlias

import torch

import deepnvme
from deepnvme._utils.arguments import WHOLE_MAX, whole

# What callers name a file by, and what is passed on.
FileName: TypeAlias = str | bytes | os.PathLike[str] | deepnvme.StripeSet
Name: TypeAlias = str | bytes | deepnvme.StripeSet


def tensor(value: object, name: str) -> torch.Tensor:
    """A torch tensor, or `TypeError`."""
    if isinstance(value, torch.Tensor):
        return value
    msg = f"{name} is a {type(value).__name__}; it must be a torch.Tensor (for an array: torch.from_numpy(array))"
    raise TypeError(msg)


def integer(value: object, name: str) -> int:
    """An integer, or `TypeError`; a float is refused even where it is whole."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        msg = f"{name} is {value!r}; it must be an int"
        raise TypeError(msg) from None
    # A bool is an integer to DeepSpeed's own ops.
    return whole(int(number), name, -WHOLE_MAX)


def positive(value: object, name: str) -> int:
    """An integer of 1 or more, or `TypeError`, `ValueError`."""
    number = integer(value, name)
    if number < 1:
        msg = f"{name} is {number}; it must be 1 or more"
        raise ValueError(msg)
    return number


def natural(value: object, name: str) -> int:
    """An integer of 0 or more, or `TypeError`, `ValueError`."""
    number = integer(value, name)
    if number < 0:
        msg = f"{name} is {number}; it must be 0 or more"
        raise ValueError(msg)
    return number


def flag(value: object, name: str) -> bool:
    """A truth value: bool, int, None, numpy bool; `TypeError` for a string, which `"false"` would make true."""
    if hasattr(type(value), "__bool__"):
        return bool(value)
    msg = f"{name} is {value!r}; it must be a bool"
    raise TypeError(msg)


def filename(value: object, name: str = "filename") -> Name:
    """The name of a file: `str`, `bytes`, `os.PathLike` or `deepnvme.StripeSet`; otherwise `TypeError`."""
    if isinstance(value, (str, bytes, deepnvme.StripeSet)):
        return value
    if isinstance(value, os.PathLike):
        path: str | bytes = os.fspath(value)
        return path
    msg = f"{name} is {value!r}; it must be a str, bytes or os.PathLike"
    raise TypeError(msg)


def descriptor(value: object, name: str = "fd") -> int:
    """An open file descriptor, or `TypeError`, `ValueError`."""
    if isinstance(value, bool):
        msg = f"{name} is {value!r}; it must be an open file descriptor"
        raise TypeError(msg)
    return natural(value, name)
