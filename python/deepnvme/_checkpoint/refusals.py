"""What goes wrong in a load, as errors of the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepnvme.errors import CorruptFileError, Error, OutOfMemoryError


@contextmanager
def room_for(name: str) -> Iterator[None]:
    """Raise what goes wrong where memory is refused as ``OutOfMemoryError`` of the file."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.filename is not None or name in str(error):
            raise
        raise OutOfMemoryError(f"{name}: {error}") from error
    except MemoryError as error:
        raise OutOfMemoryError(f"{name}: there is no memory for what the file describes") from error
    except BaseException as error:
        # Where Python has no memory for an object, the extension's binding panics.
        if type(error).__name__ != "PanicException" or str(error) != "Python API call failed":
            raise
        raise OutOfMemoryError(f"{name}: there is no memory for what the file describes") from error


@contextmanager
def typed(path: object) -> Iterator[None]:
    """Raise what goes wrong while objects are made as an error of the file, which names it."""
    try:
        yield
    except Error as error:
        if error.filename is not None or str(path) in str(error):
            raise
        # What Rust finds while it makes objects knows no file.
        named = type(error)(f"{path}: {error}")
        named.filename, named.offset = str(path), error.offset
        raise named from None
    except Warning:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(f"{path}: there is no memory for the objects of the file") from error
    except Exception as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise OutOfMemoryError(f"{path}: there is no memory for the tensors of the file: {error}") from error
        what = f"{type(error).__name__}: {error}"
        raise CorruptFileError(f"{path}: the file's objects cannot be made ({what}); it is damaged") from error
