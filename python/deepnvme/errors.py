"""The exceptions of deepnvme.

Every failed transfer raises an :class:`Error`, which is an :class:`OSError`. If Python has a class for the failure,
the exception is an instance of that class as well: both ``except deepnvme.Error`` and ``except FileNotFoundError``
catch a missing file. Before any I/O, an argument of the wrong type (a list as a path) raises :class:`TypeError`, a
value outside its range :class:`InvalidArgumentError`, and a tensor that the call cannot use (a sparse one)
:class:`ValueError`.

Example::

    try:
        deepnvme.read(tensor, "weights.bin")
    except FileNotFoundError as error:
        print(error.filename, error.errno)
    except deepnvme.EndOfFileError as error:
        print("the file ends inside the range", error.offset, error.filename)
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


def __dir__() -> list[str]:
    return sorted(__all__)


class Error(OSError):
    """A transfer failed. ``errno``, ``strerror`` and ``filename`` have the meanings of :class:`OSError`.

    For a full disk, ``errno`` is ``errno.ENOSPC``, and the message has the bytes that are needed and free.

    Attributes:
        offset: byte offset of the failure in the file; ``None`` if it has none.
        bytes_done: bytes of the request that were moved before the failure.

    Example:
        >>> try:
        ...     deepnvme.read(torch.empty(1024), "no-such-file.bin")
        ... except deepnvme.Error as error:
        ...     print(type(error).__name__, error.filename, error.offset, error.bytes_done)
        NotFoundError no-such-file.bin None 0
    """

    offset: int | None = None
    bytes_done: int = 0

    def __str__(self) -> str:
        # OSError would print the error number and its text, which only the kernel's errors have.
        return super().__str__() if self.errno is not None else str(self.args[0] if self.args else "")


class NotFoundError(Error, FileNotFoundError):
    """The file, or the folder to create it in, does not exist."""


class PermissionDeniedError(Error, PermissionError):
    """The permissions of the file or folder, or the file system, do not allow it."""


class IsFolderError(Error, IsADirectoryError):
    """The path is a folder."""


class NotFolderError(Error, NotADirectoryError):
    """A component of the path is not a folder."""


class EndOfFileError(Error, EOFError):
    """The file ended inside the requested range. The contents of the target are undefined."""


class InvalidArgumentError(Error, ValueError):
    """An argument is outside its documented range, or two arguments contradict each other."""


class OutOfMemoryError(Error, MemoryError):
    """The machine or the kernel cannot provide the memory."""


class UnsupportedError(Error):
    """Something is not supported: a feature by this kernel, file system or build, or a file, state or model here."""


class DeviceError(Error, RuntimeError):
    """A GPU or its driver reported an error, or a call asks for a GPU that torch cannot use here.

    Errors of earlier work on the GPU also appear here.
    """


class CancelledError(Error):
    """The request was cancelled before it completed."""


class ClosedError(Error, ValueError):
    """The engine, file or other object is closed, or belongs to the parent of this forked process."""


class LockedError(Error):
    """Another ``Checkpointer`` is saving into the folder; the message names its process. Reading needs no lock."""


class WaitTimeoutError(Error, TimeoutError):
    """The timeout passed while the request was in flight. The request continues: wait again, or cancel it."""


class CorruptFileError(Error, ValueError):
    """A checkpoint or swapped tensor is truncated, corrupt or malicious.

    ``offset`` says where, if that is known.
    """


class ChecksumError(Error, ValueError):
    """The bytes of a checkpoint are not those that were saved.

    ``offset`` is the start of the damaged range, if that is known.
    """


class ChangedFileError(Error):
    """A file of streamed weights was replaced, truncated or modified since it was opened. ``filename`` says which."""


class UnsafeFileError(Error, pickle.UnpicklingError):
    """A checkpoint asks for code that is not known to be safe. The message names the code, and how to allow it."""


class PeerError(Error):
    """Another process of a group failed or ended. The message names it, and repeats its error."""


class StepStoppedError(Error):
    """The disk failed during an optimizer step. The message says what was updated, and how to continue the step."""


class MovedError(Error):
    """Internal: the records of an archive must be located one by one. ``deepnvme.load`` handles this itself."""
