"""Arguments of a swapper: keys and folders."""

from __future__ import annotations

import os
from collections.abc import Iterable

from deepnvme._deepnvme import _make_folders
from deepnvme._utils.public import shown


def checked_key(key: object) -> str:
    """Return a key, or raise."""
    if isinstance(key, str):
        return key
    msg = f"key is {shown(key)}; it must be a str"
    raise TypeError(msg)


def list_of_keys(keys: object) -> list[str]:
    """Return the keys of an argument: one, or several."""
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, Iterable):
        msg = f"keys is {shown(keys)}; it must be a key or a list of keys"
        raise TypeError(msg)
    return [checked_key(key) for key in keys]


def make_swap_folders(swap_dir: object) -> list[str | bytes | os.PathLike[str]]:
    """Return the folders of an argument, and create those that are missing."""
    folders = [swap_dir] if isinstance(swap_dir, str | bytes | os.PathLike) else swap_dir
    if not isinstance(folders, Iterable) or not (folders := list(folders)):
        msg = f"swap_dir is {swap_dir!r}; it must be a folder, or a list of folders, one per drive"
        raise TypeError(msg)
    for folder in folders:
        if not isinstance(folder, str | bytes | os.PathLike):
            msg = f"swap_dir has {folder!r} ({type(folder).__name__}); each folder must be a str or os.PathLike"
            raise TypeError(msg)
        _make_folders(folder)
    return folders
