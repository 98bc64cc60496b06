"""``torch.load`` through the engine, with the same arguments, for libraries that call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import deepnvme._file as file
from deepnvme._checkpoint.load import load
from deepnvme._checkpoint.load_request import LoadRequest
from deepnvme._utils.devices import with_checked_locations
from deepnvme.errors import UnsafeFileError, UnsupportedError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import TypeAlias

    from deepnvme._deepnvme import Engine

    _MapLocation: TypeAlias = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None


def load_as_torch(
    path: str | os.PathLike[str],
    map_location: _MapLocation = None,
    *,
    weights_only: bool = True,
    engine: Engine | None = None,
) -> Any:
    """Load like ``torch.load``. Only ``weights_only=False`` runs a pickle, and only one that cannot be read safely."""
    try:
        return _load(path, map_location, engine)
    except (UnsafeFileError, UnsupportedError):
        if weights_only:
            raise
    # The caller trusts the file: it contains other classes, or is older than archives.
    with file.open(path, engine=engine) as source:
        return torch.load(source, map_location=map_location, weights_only=False)


def _load(path: Any, map_location: _MapLocation, engine: Engine | None) -> Any:
    """Load with the safe unpickler."""
    if isinstance(map_location, str | torch.device):
        return load(path, device=map_location, engine=engine, progress=False)
    # Returns the storage on its device, by the location that torch saved with it.
    restore_location = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]  # noqa: SLF001
    request = LoadRequest(
        path=path,
        device=torch.device("cpu"),
        verify="auto",
        engine=engine,
        restore_location=with_checked_locations(restore_location, map_location),
    )
    return request.load()
