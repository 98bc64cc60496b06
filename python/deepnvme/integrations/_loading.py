"""``torch.load`` for libraries that call it: the same arguments, the bytes through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import deepnvme._file as file
from deepnvme._checkpoint import load
from deepnvme._deepnvme import _CheckpointReader
from deepnvme.errors import UnsafeFileError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import TypeAlias

    from deepnvme._deepnvme import Engine

    _MapLocation: TypeAlias = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None

_ARCHIVE = b"PK\x03\x04"


def load_as_torch(
    path: str | os.PathLike[str],
    map_location: _MapLocation = None,
    *,
    weights_only: bool = True,
    engine: Engine | None = None,
) -> Any:
    """Load as ``torch.load`` does: ``weights_only=False`` lets the pickle run where it makes more than is harmless."""
    device = _device(path, map_location, engine)
    if device is not None:
        try:
            return load(path, device=device, engine=engine, progress=False)
        except UnsafeFileError:
            if weights_only:
                raise
    with file.open(path, engine=engine) as source:
        return torch.load(source, map_location=map_location, weights_only=weights_only)


def _device(path: Any, map_location: _MapLocation, engine: Engine | None) -> str | torch.device | None:
    """Say where all tensors go; None where only ``torch.load`` knows: several places, or files of before 1.6."""
    with Path(path).open("rb") as start:
        if start.read(len(_ARCHIVE)) != _ARCHIVE:
            return None
    if isinstance(map_location, str | torch.device):
        return map_location
    if callable(map_location):
        return None
    known = map_location or {}
    places = {storage[2] for storage in _CheckpointReader(path, engine, False).storages()}
    targets = {known.get(place, place) for place in places}
    return (targets or {"cpu"}).pop() if len(targets) <= 1 else None
