"""What the bodies of fuzz targets in Python share: files to read, and how a reader may fail."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from deepnvme import errors

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .watch import Watch


def read(watch: Watch, named: Path | str, load: Callable[[], object]) -> object:
    """Return what a reader gives; ``None`` for an error, which must be typed and name the file."""
    with watch.reader():
        try:
            return load()
        except errors.Error as error:
            assert not isinstance(error, errors.OutOfMemoryError), error
            assert error.filename is not None or str(named) in str(error), error
        except FileNotFoundError as error:
            assert error.filename is not None
    return None


def safetensors_file(header: dict[str, Any], data: bytes) -> bytes:
    """Return a file with this header, whose tensors begin at a whole page."""
    text = json.dumps(header).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    return struct.pack("<Q", len(text)) + text + data
