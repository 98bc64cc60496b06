"""What can go wrong, as exceptions.

Every failure of a transfer is a :class:`Error`, which is an :class:`OSError`. Where Python has a word of its
own for the failure, the class is that too, so that both ``except deepnvme.Error`` and, say,
``except FileNotFoundError`` catch it. Arguments that cannot be meant (a sparse tensor, a path that is a list)
are refused before any I/O, as plain :class:`TypeError` or :class:`ValueError`.

Example::

    try:
        deepnvme.read(tensor, "weights.bin")
    except FileNotFoundError as error:
        print(error.filename, error.errno)
    except deepnvme.EndOfFileError as error:
        print("only", error.bytes_done, "bytes were there")
"""

import pickle

__all__ = [
    "CancelledError",
    "ChangedFileError",
    "ChecksumError",
    "ClosedError",
    "CorruptFileError",
    "DeviceError",
    "EndOfFileError",
    "Error",
    "InvalidArgumentError",
    "IsFolderError",
    "LockedError",
    "NotFolderError",
    "NotFoundError",
    "OutOfMemoryError",
    "PeerError",
    "PermissionDeniedError",
    "StepStoppedError",
    "UnsafeFileError",
    "UnsupportedError",
    "WaitTimeoutError",
]


class Error(OSError):
    """A transfer failed. ``errno``, ``strerror`` and ``filename`` are as :class:`OSError` has them.

    A full disk is an ``Error`` whose ``errno`` is ``errno.ENOSPC``.
    """

    offset: int | None = None
    """Where in the file it failed, in bytes; ``None`` where no place was involved."""

    bytes_done: int = 0
    """Bytes of the request that had been moved by then."""

    def __str__(self) -> str:
        # OSError knows no failure but the kernel's, and would print its number and words only.
        return super().__str__() if self.errno is not None else str(self.args[0] if self.args else "")


class NotFoundError(Error, FileNotFoundError):
    """The file, or the folder that it is to be made in, does not exist."""


class PermissionDeniedError(Error, PermissionError):
    """The file, its folder or its file system does not allow it."""


class IsFolderError(Error, IsADirectoryError):
    """The path names a folder."""


class NotFolderError(Error, NotADirectoryError):
    """A part of the path is not a folder."""


class EndOfFileError(Error, EOFError):
    """The file ended inside the range that was to be read; ``bytes_done`` says how many bytes there were."""


class InvalidArgumentError(Error, ValueError):
    """An argument is outside its documented range, or two contradict each other."""


class OutOfMemoryError(Error, MemoryError):
    """The kernel has no memory for it."""


class UnsupportedError(Error):
    """This kernel, file system or build does not have what was required."""


class DeviceError(Error, RuntimeError):
    """A GPU, or its driver, has refused; where earlier work on the GPU has failed, this is how it shows."""


class CancelledError(Error):
    """The request was cancelled before it was done."""


class ClosedError(Error, ValueError):
    """The engine or file is closed, or belongs to the process that this one was forked from."""


class LockedError(Error):
    """Another ``Checkpointer`` saves into the folder; the message says which process has it. Reading needs no lock."""


class WaitTimeoutError(Error, TimeoutError):
    """The request was still in flight when the time was up. It goes on; wait again, or cancel it."""


class CorruptFileError(Error, ValueError):
    """A checkpoint, or a swapped tensor, is not what it was or says it is: cut, damaged, made to deceive.

    ``offset`` says where.
    """


class ChecksumError(Error, ValueError):
    """The bytes of a checkpoint are not those that were saved. ``offset`` says where the damaged stretch begins."""


class ChangedFileError(Error):
    """A file that weights stream from was replaced, cut or written to since it was opened. ``filename`` says which."""


class UnsafeFileError(Error, pickle.UnpicklingError):
    """A checkpoint asks for code that is not known to be harmless. The message names it, and how to allow it."""


class PeerError(Error):
    """Another process failed at what several do together, or has ended. The message names it, and what it said."""


class StepStoppedError(Error):
    """The disk failed in the middle of an optimizer's step. The message says what stands, and how the step goes on."""


class MovedError(Error):
    """Internal: the records of an archive have to be looked up one by one. ``deepnvme.load`` does that by itself."""
