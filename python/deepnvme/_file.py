"""``deepnvme.open``: binary file objects on the engine."""

from __future__ import annotations

import atexit
import io
import os
import warnings
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar, overload

from deepnvme._deepnvme import StripeSet, _FileReader, _FileWriter
from deepnvme._utils.end_watch import EndWatch
from deepnvme._utils.metadata_file import parts_listed, warn_of_kept_parts
from deepnvme._utils.public import WHOLE_MAX, check_engine, public, whole
from deepnvme.errors import ClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import BinaryIO, Literal, TypeAlias

    import torch
    from typing_extensions import Buffer, Self

    from deepnvme._deepnvme import Engine

    _Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | int | StripeSet
    _Durability: TypeAlias = Literal["none", "data", "full"]

    class _BinaryFile(io.BufferedIOBase, BinaryIO):
        """For type checkers only: torch and numpy accept it as an ``IO[bytes]``."""

else:
    _BinaryFile = io.BufferedIOBase

_Handle = TypeVar("_Handle", _FileReader, _FileWriter)


@overload
def open(  # noqa: A001
    path: _Path, mode: Literal["rb"] = "rb", *, engine: Engine | None = None, durability: _Durability = "full"
) -> Reader: ...
@overload
def open(  # noqa: A001
    path: _Path, mode: Literal["wb"], *, engine: Engine | None = None, durability: _Durability = "full"
) -> Writer: ...
@overload
def open(  # noqa: A001
    path: _Path, mode: str, *, engine: Engine | None = None, durability: _Durability = "full"
) -> Reader | Writer: ...
@public
def open(  # noqa: A001
    path: _Path,
    mode: str = "rb",
    *,
    engine: Engine | None = None,
    durability: _Durability = "full",
) -> Reader | Writer:
    """Open a file object for ``torch.save``, ``numpy.save``, ``pickle``, ``zipfile``, ``tarfile`` and others.

    ``"wb"`` writes a private temporary file in the same folder. Closing it syncs it, as ``durability`` says, and
    renames it to ``path``. So ``path`` is always the complete old or new file. An exception inside ``with`` discards
    the new one. ``"rb"`` reads ahead, and large reads go straight to the caller's memory.

    Args:
        path: ``str``, ``bytes``, ``os.PathLike`` or a ``StripeSet``; for reading also an open file descriptor.
        mode: ``"rb"`` (default) or ``"wb"``.
        engine: the engine that transfers the bytes. Default: the default engine.
        durability: the data that survives a power cut once a written file is closed: ``"none"`` none, ``"data"`` the
            bytes and the size, ``"full"`` (default) also the file's name in its folder.

    Returns:
        A :class:`Reader` or a :class:`Writer`, which are file objects and close at the end of a ``with`` block.

    Raises:
        FileNotFoundError, PermissionError, IsADirectoryError: as from Python's own ``open``.
        ValueError: the mode or durability is unknown, or the path to write is the manifest of a stripe set.
        TypeError: the path cannot be opened in that mode.
        deepnvme.Error: later, if a write or the close fails; a full disk gives ``errno.ENOSPC``. The old file stays.

    Example:
        >>> tensor = torch.ones(3)
        >>> with deepnvme.open("model.pt", "wb") as file:
        ...     torch.save({"weight": tensor}, file)
        >>> with deepnvme.open("model.pt") as file:
        ...     state = torch.load(file)
        >>> torch.equal(state["weight"], tensor)
        True
    """
    check_engine(engine)
    if mode == "rb":
        return Reader(path, engine)
    if mode == "wb":
        return Writer(path, engine, durability)
    msg = f"mode is {mode!r}; it must be 'rb' or 'wb'"
    raise InvalidArgumentError(msg)


class _FileBase(_BinaryFile, Generic[_Handle]):
    """The common base of readers and writers: a name, and a handle until closed."""

    _handle: _Handle | None = None
    mode: str

    def __init__(self, path: _Path) -> None:
        self._path = path if isinstance(path, int | StripeSet) else os.fspath(path)

    @property
    def name(self) -> str | bytes | int | StripeSet:
        """The path that was given; of an ``os.PathLike``, its text or bytes."""
        return self._path

    @property
    def closed(self) -> bool:
        """Whether the file was closed or discarded."""
        return self._handle is None

    def fileno(self) -> int:
        """Raise ``UnsupportedOperation``: other I/O on the descriptor would bypass the engine's buffers."""
        self._check_open()
        msg = f"a {type(self).__name__} has no file descriptor; it uses direct I/O"
        raise io.UnsupportedOperation(msg)

    def isatty(self) -> bool:
        """Return False."""
        self._check_open()
        return False

    def flush(self) -> None:
        """Do nothing: a written file is invisible until it is closed."""
        self._check_open()

    def detach(self) -> io.RawIOBase:
        """Raise ``UnsupportedOperation``: there is no raw file."""
        msg = "detach"
        raise io.UnsupportedOperation(msg)

    # Python's base class would raise a plain ValueError in a closed file.
    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __iter__(self) -> Self:
        self._check_open()
        return self

    def writelines(self, lines: Iterable[Buffer], /) -> None:
        """Write each of ``lines``."""
        self._check_open()
        super().writelines(lines)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse: a copy would share the open file, and close it."""
        msg = f"a {type(self).__name__} is neither copied nor pickled; open the file a second time"
        raise TypeError(msg)

    def _open_handle(self) -> _Handle:
        # Read once: another thread may close the file after the check.
        handle = self._handle
        if handle is None:
            path = os.fsdecode(self._path) if isinstance(self._path, bytes | str) else self._path
            msg = f"{path}: I/O operation on closed file; open it again"
            raise ClosedError(msg)
        return handle

    def _check_open(self) -> None:
        self._open_handle()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<deepnvme.{type(self).__name__} name={self._path!r} mode={self.mode!r}{state}>"


@public
class Reader(_FileBase[_FileReader]):
    """A file opened by ``deepnvme.open(path, "rb")``: seekable, with read-ahead. Opening it fixes its size.

    Example:
        >>> deepnvme.write(torch.zeros(1024), "zeros.bin")
        4096
        >>> with deepnvme.open("zeros.bin") as file:
        ...     file.seek(4000), len(file.read()), file.tell()
        (4000, 96, 4096)
    """

    mode = "rb"

    def __init__(self, path: _Path, engine: Engine | None = None) -> None:
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
        """Read the next ``size`` bytes, or all remaining bytes if ``size`` is negative or ``None``."""
        return self._open_handle().read(-1 if size is None else whole(size, "size", -WHOLE_MAX))

    def read1(self, size: int = -1, /) -> bytes:
        """Read at most ``size`` bytes, or one buffer if ``size`` is negative."""
        size = whole(size, "size", -WHOLE_MAX)
        return self._open_handle().read(io.DEFAULT_BUFFER_SIZE if size < 0 else size)

    def peek(self, size: int = 0, /) -> bytes:  # noqa: ARG002
        """Return the next ``io.DEFAULT_BUFFER_SIZE`` bytes without advancing, fewer at the end of the file.

        Args:
            size: ignored.
        """
        # readline() asks for one byte and searches the result. One byte at a time would be too slow.
        return self._open_handle().peek(io.DEFAULT_BUFFER_SIZE)

    def readinto(self, buffer: Buffer | torch.Tensor, /) -> int:
        """Fill ``buffer``, or a tensor on any device, up to the end of the file. Returns the bytes read."""
        return self._open_handle().readinto(buffer)

    def readinto1(self, buffer: Buffer | torch.Tensor, /) -> int:
        """Do the same as ``readinto``."""
        return self._open_handle().readinto(buffer)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to ``offset`` from the start (0), the position (1) or the end (2). Returns the new position."""
        return self._open_handle().seek(whole(offset, "offset", -WHOLE_MAX), whole(whence, "whence", 0, 2))

    def tell(self) -> int:
        """Return the position, in bytes from the start."""
        return self._open_handle().tell()

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()

    def __del__(self) -> None:
        if self._handle is not None:
            warnings.warn(f"unclosed file {self!r}", ResourceWarning, stacklevel=2, source=self)
            self.close()


@public
class Writer(_FileBase[_FileWriter]):
    """A file opened by ``deepnvme.open(path, "wb")``. Closing it gives it its name.

    A file that is never closed is discarded.

    Example:
        >>> with deepnvme.open("ones.bin", "wb") as file:
        ...     file.write(torch.ones(3)), file.write(b"more")
        (12, 4)
    """

    mode = "wb"

    def __init__(self, path: _Path, engine: Engine | None = None, durability: _Durability = "full") -> None:
        super().__init__(path)
        self._handle = _FileWriter(path, engine, durability)
        _open_writers.watch(self, None)

    def writable(self) -> bool:
        """Return True."""
        self._check_open()
        return True

    def write(self, data: Buffer | torch.Tensor, /) -> int:
        """Write all bytes of ``data``, a contiguous buffer or any tensor. Returns the bytes written."""
        return self._open_handle().write(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._open_handle().tell()

    def close(self) -> None:
        """Finish the file, sync it and give it its name. Closing twice does nothing.

        Raises:
            deepnvme.Error: writing or syncing failed. The new file is gone, and the old one is unchanged.
        """
        self._commit()

    def _commit(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if not isinstance(self._path, StripeSet):
            handle.commit()
            return
        before = parts_listed(self._path)
        handle.commit()
        warn_of_kept_parts(self._path, before)

    def discard(self) -> None:
        """Discard the file, and keep the old file of its name. Does nothing once the file is closed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.discard()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc_type is None:
            self._commit()
        else:
            self.discard()

    def __del__(self) -> None:
        if self._handle is not None:
            # Not a ResourceWarning, which Python hides: bytes are lost.
            text = "it was not closed, so what was written to it is discarded; use `with deepnvme.open(...) as file:`"
            warnings.warn(f"{self!r}: {text}", RuntimeWarning, stacklevel=2, source=self)
            self.discard()


# Writers alive at exit are discarded explicitly: their finalisers may never run.
_open_writers: EndWatch[None] = EndWatch(forgets=True)


def _discard_writers() -> None:
    for writer in _open_writers.living():
        writer.__del__()


atexit.register(_discard_writers)
