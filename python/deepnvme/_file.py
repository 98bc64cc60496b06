"""``deepnvme.open``: Python's own kind of binary file, over the engine."""

from __future__ import annotations

import atexit
import io
import os
import warnings
import weakref
from typing import TYPE_CHECKING, NoReturn, overload

from deepnvme._deepnvme import StripeSet, _FileReader, _FileWriter
from deepnvme._utils.arguments import WHOLE_MAX, whole

if TYPE_CHECKING:
    from types import TracebackType
    from typing import BinaryIO, Literal, TypeAlias

    import torch
    from typing_extensions import Buffer

    from deepnvme._deepnvme import Engine

    _Name: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | StripeSet
    _Durability: TypeAlias = Literal["none", "data", "full"]

    class _BinaryFile(io.BufferedIOBase, BinaryIO):
        """For type checkers only: accepted wherever torch and numpy ask for an ``IO[bytes]``."""

else:
    _BinaryFile = io.BufferedIOBase


@overload
def open(  # noqa: A001
    path: _Name, mode: Literal["rb"] = "rb", *, engine: Engine | None = None, durability: _Durability = "full"
) -> Reader: ...
@overload
def open(  # noqa: A001
    path: _Name, mode: Literal["wb"], *, engine: Engine | None = None, durability: _Durability = "full"
) -> Writer: ...
@overload
def open(  # noqa: A001
    path: _Name, mode: str, *, engine: Engine | None = None, durability: _Durability = "full"
) -> Reader | Writer: ...
def open(  # noqa: A001
    path: _Name,
    mode: str = "rb",
    *,
    engine: Engine | None = None,
    durability: _Durability = "full",
) -> Reader | Writer:
    """Open a file for code that wants a file: ``torch.save``, ``numpy.save``, ``pickle``, ``zipfile``, ``tarfile``.

    ``"wb"`` writes a private temporary file in the same folder. Closing syncs it as ``durability`` says and gives it
    its name at once, so that under ``path`` there is always the whole old file or the whole new one; an exception
    inside ``with`` throws the new one away. ``"rb"`` reads ahead, and large reads go straight to the caller's memory.

    Args:
        path: ``str``, ``bytes`` or ``os.PathLike``; for reading also an open file descriptor or a ``StripeSet``.
        mode: ``"rb"`` (default) or ``"wb"``.
        engine: which engine moves the bytes. Default: the default engine.
        durability: what survives a power cut when a written file is closed: ``"none"``, ``"data"`` or ``"full"``
            (default: the bytes, and the file's name in its folder).

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError: as from Python's own ``open``.
        ValueError: another mode or durability.
        TypeError: a path that cannot be opened in that mode.

    Example:
        >>> with deepnvme.open("model.pt", "wb") as file:
        ...     torch.save({"weight": tensor}, file)
        >>> with deepnvme.open("model.pt") as file:
        ...     state = torch.load(file)
        >>> torch.equal(state["weight"], tensor)
        True
    """
    if mode == "rb":
        return Reader(path, engine)
    if mode == "wb":
        return Writer(path, engine, durability)
    msg = f"mode is {mode!r}; it must be 'rb' or 'wb'"
    raise ValueError(msg)


class _File(_BinaryFile):
    """What both ends have in common: a name, and a handle until closed."""

    _handle: _FileReader | _FileWriter | None = None
    mode: str

    def __init__(self, path: _Name) -> None:
        self._path = path if isinstance(path, int | StripeSet) else os.fspath(path)

    @property
    def name(self) -> str | bytes | int | StripeSet:
        """The path as it was given."""
        return self._path

    @property
    def closed(self) -> bool:
        """Whether the file was closed, or thrown away."""
        return self._handle is None

    def fileno(self) -> int:
        """Refuse: reading and writing past the engine would miss what it holds."""
        self._check_open()
        msg = f"a {type(self).__name__} has no file descriptor; it moves its bytes by direct I/O"
        raise io.UnsupportedOperation(msg)

    def isatty(self) -> bool:
        """Return False."""
        self._check_open()
        return False

    def flush(self) -> None:
        """Do nothing: until a written file is closed, nobody can see it."""
        self._check_open()

    def detach(self) -> io.RawIOBase:
        """Refuse: there is no raw file underneath."""
        msg = "detach"
        raise io.UnsupportedOperation(msg)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse: a copy would share the open file, and close it."""
        msg = f"a {type(self).__name__} is neither copied nor pickled; open the file a second time"
        raise TypeError(msg)

    def _check_open(self) -> None:
        if self._handle is None:
            msg = "I/O operation on closed file"
            raise ValueError(msg)

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<deepnvme.{type(self).__name__} name={self._path!r} mode={self.mode!r}{state}>"


class Reader(_File):
    """A file opened by ``deepnvme.open(path, "rb")``: seekable, with reading ahead. Its size is taken when opened."""

    mode = "rb"
    _handle: _FileReader | None = None

    def __init__(self, path: _Name, engine: Engine | None = None) -> None:
        super().__init__(path)
        self._handle = _FileReader(path, engine)

    def readable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def seekable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next ``size`` bytes, or all that are left where ``size`` is negative or ``None``."""
        return self._open_handle().read(-1 if size is None else whole(size, "size", -WHOLE_MAX))

    def read1(self, size: int = -1, /) -> bytes:
        """Read the next bytes: ``size`` at most, and no more than a buffer's worth."""
        size = whole(size, "size", -WHOLE_MAX)
        return self._open_handle().read(io.DEFAULT_BUFFER_SIZE if size < 0 else size)

    def peek(self, size: int = 0, /) -> bytes:  # noqa: ARG002
        """Read what follows without moving on: some KiB, whatever ``size`` says, unless the end comes before."""
        # readline() asks for one byte and searches what it is given: one byte at a time would take for ever.
        return self._open_handle().peek(io.DEFAULT_BUFFER_SIZE)

    def readinto(self, buffer: Buffer | torch.Tensor, /) -> int:
        """Fill ``buffer``, also a tensor on a GPU, as far as the file goes; return how many bytes that were."""
        return self._open_handle().readinto(buffer)

    def readinto1(self, buffer: Buffer | torch.Tensor, /) -> int:
        """Do what ``readinto`` does."""
        return self._open_handle().readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to ``offset`` from the start (0), from here (1) or from the end (2); return where that is."""
        return self._open_handle().seek(whole(offset, "offset", -WHOLE_MAX), whole(whence, "whence", 0, 2))

    def tell(self) -> int:
        """Return the position, in bytes from the start."""
        return self._open_handle().tell()

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def _open_handle(self) -> _FileReader:
        if self._handle is None:
            msg = "I/O operation on closed file"
            raise ValueError(msg)
        return self._handle

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn(f"unclosed file {self!r}", ResourceWarning, stacklevel=2, source=self)
            self.close()


class Writer(_File):
    """A file opened by ``deepnvme.open(path, "wb")``: it appears under its name, whole, when closed.

    A file that is never closed is thrown away.
    """

    mode = "wb"
    _handle: _FileWriter | None = None

    def __init__(self, path: _Name, engine: Engine | None = None, durability: _Durability = "full") -> None:
        super().__init__(path)
        self._handle = _FileWriter(path, engine, durability)
        _open_writers.add(self)

    def writable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def write(self, data: Buffer | torch.Tensor, /) -> int:
        """Write all bytes of ``data``, a contiguous buffer or any tensor; return how many those were."""
        return self._open_handle().write(data)

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._open_handle().tell()

    def close(self) -> None:
        """Finish the file, sync it and give it its name. Closing twice does nothing.

        Raises:
            deepnvme.Error: the bytes could not be written or synced. The new file is gone, and the old one untouched.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.commit()

    def discard(self) -> None:
        """Throw the file away, and leave what was there under its name. Does nothing once the file is closed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.abort()

    def _open_handle(self) -> _FileWriter:
        if self._handle is None:
            msg = "I/O operation on closed file"
            raise ValueError(msg)
        return self._handle

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn(f"unclosed file {self!r}: it was thrown away", ResourceWarning, stacklevel=2, source=self)
            self.discard()


# Writers that are alive at exit are thrown away in an orderly manner: their finalisers may never run.
_open_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


def _discard_writers() -> None:
    for writer in list(_open_writers):
        writer.__del__()


atexit.register(_discard_writers)
