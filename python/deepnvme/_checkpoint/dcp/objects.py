"""Non-tensor values of a distributed checkpoint.

torch's planners unpickle their input, and so run any code in it. They never get bytes of a file: its pickle goes
through the safe unpickler of ``deepnvme.load``, and the planner gets a new pickle of the resulting objects.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._checkpoint.load import load
from deepnvme.errors import CorruptFileError, Error, InvalidArgumentError, UnsafeFileError

if TYPE_CHECKING:
    from pathlib import Path

    from deepnvme._deepnvme import Engine


def repickle_safely(content: bytes | bytearray, path: Path, name: str, engine: Engine | None) -> io.BytesIO:
    """Unpickle a value without running code, and pickle it again.

    Raises:
        deepnvme.errors.UnsafeFileError: it asks for code.
        deepnvme.errors.CorruptFileError: it is not a pickle of ``torch.save``.
    """
    again = io.BytesIO()
    torch.save(_load(content, f"{path}: {name}", engine), again)
    again.seek(0)
    return again


def check_loadable(content: bytes | bytearray, name: str, engine: Engine | None) -> None:
    """Refuse a value that no load would return. One that asks for an unknown class is loaded once that is allowed.

    Raises:
        deepnvme.errors.InvalidArgumentError: it is too large or too deep, for example.
    """
    try:
        _load(content, name, engine)
    except (UnsafeFileError, MemoryError):
        return
    except Error as error:
        msg = f"the state cannot be saved so that it could be loaded: {error}"
        raise InvalidArgumentError(msg) from error


def _load(content: bytes | bytearray, location: str, engine: Engine | None) -> Any:
    # `load` reads files only.
    descriptor = os.memfd_create("deepnvme-object", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:  # noqa: PTH123 (it is open already)
        file.write(content)
        file.flush()
        path = f"/proc/self/fd/{descriptor}"
        try:
            return load(path, verify="off", engine=engine, progress=False)
        except Error as error:
            named = type(error)(str(error).replace(path, location))
            named.filename, named.offset = location, error.offset
            raise named from None
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise CorruptFileError(f"{location}: {error}") from error
