"""The exceptions of deepnvme.

Every failed transfer raises an :class:`Error`, which is an :class:`OSError`. If Python has a class for the failure,
the exception is an instance of that class as well: both ``except deepnvme.Error`` and ``except FileNotFoundError``
catch a missing file. Before any I/O, an argument of the wrong type (a list as a path) raises :class:`TypeError`, a
value outside its range, or a tensor that the call cannot use (a read-only one), :class:`InvalidArgumentError`, which is
also a :class:`ValueError`.

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

    For a full disk, ``errno`` is ``errno.ENOSPC``. The message says how many bytes are needed, and how many are free.

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
    """The file, or the folder to create it in, does not exist.

    Example:
        >>> try:
        ...     deepnvme.load("no-such-model.pt")
        ... except deepnvme.errors.NotFoundError as error:
        ...     print(error.filename)
        no-such-model.pt
    """


class PermissionDeniedError(Error, PermissionError):
    """The permissions of the file or folder, or the file system, do not allow the operation.

    Example:
        >>> try:
        ...     deepnvme.save({"weight": torch.ones(3)}, "/sys/model.pt")
        ... except deepnvme.errors.PermissionDeniedError as error:
        ...     print(error.filename)
        /sys/model.pt
    """


class IsFolderError(Error, IsADirectoryError):
    """The path is a folder.

    Example:
        >>> try:
        ...     deepnvme.read(torch.empty(3), "/")
        ... except deepnvme.errors.IsFolderError as error:
        ...     print(error.filename)
        /
    """


class NotFolderError(Error, NotADirectoryError):
    """A component of the path is not a folder.

    Example:
        >>> size = deepnvme.write(torch.ones(3), "weights.bin")
        >>> try:
        ...     deepnvme.read(torch.empty(3), "weights.bin/part")
        ... except deepnvme.errors.NotFolderError as error:
        ...     print(error.filename)
        weights.bin/part
    """


class EndOfFileError(Error, EOFError):
    """The file ended inside the requested range. The contents of the target are undefined.

    Example:
        >>> size = deepnvme.write(torch.ones(3), "weights.bin")
        >>> try:
        ...     deepnvme.read(torch.empty(5), "weights.bin")
        ... except deepnvme.EndOfFileError as error:
        ...     print(error.offset, error.bytes_done)
        0 12
    """


class InvalidArgumentError(Error, ValueError):
    """An argument is outside its documented range, or two arguments contradict each other.

    Example:
        >>> try:
        ...     deepnvme.Engine(backend="disk")
        ... except deepnvme.errors.InvalidArgumentError as error:
        ...     print(isinstance(error, ValueError))
        True
    """


class OutOfMemoryError(Error, MemoryError):
    """The machine or the kernel cannot provide the memory.

    Example:
        >>> try:
        ...     deepnvme.Swapper(".", memory="1PB")
        ... except deepnvme.errors.OutOfMemoryError as error:
        ...     print(isinstance(error, MemoryError))
        True
    """


class UnsupportedError(Error):
    """This kernel, file system, build or device lacks a required feature.

    Or deepnvme does not support the file, state or model.

    Example:
        >>> size = deepnvme.write(torch.ones(3), "model.pt")
        >>> try:
        ...     deepnvme.load("model.pt")
        ... except deepnvme.errors.UnsupportedError as error:
        ...     print(str(error).startswith("model.pt: "))
        True
    """


class DeviceError(Error, RuntimeError):
    """A GPU or its driver reported an error, or a call asks for a GPU that torch cannot use here.

    An error from earlier work on the GPU is raised by a later call.

    Example:
        >>> try:
        ...     deepnvme.load("model.pt", device="cuda:99")
        ... except (deepnvme.errors.DeviceError, deepnvme.errors.NotFoundError) as error:
        ...     print(isinstance(error, deepnvme.Error))
        True
    """


class CancelledError(Error):
    """The request was cancelled before it completed.

    Example:
        >>> transfer = deepnvme.start_write(torch.ones(3), "weights.bin")
        >>> _ = transfer.cancel()
        >>> try:
        ...     _ = transfer.result()
        ... except deepnvme.errors.CancelledError:
        ...     pass  # it was stopped in time
    """


class ClosedError(Error, ValueError):
    """The engine, file, swapper, row store, model or other object is closed.

    Or it belongs to the parent of this forked process.

    Example:
        >>> engine = deepnvme.Engine()
        >>> engine.close()
        >>> try:
        ...     engine.write(torch.ones(3), "weights.bin")
        ... except deepnvme.errors.ClosedError as error:
        ...     print(error)
        the engine is closed; make a new one
    """


class LockedError(Error):
    """Another ``Checkpointer`` is saving into the folder; the message names its process. Reading needs no lock.

    Example:
        >>> first, second = deepnvme.Checkpointer("run"), deepnvme.Checkpointer("run")
        >>> first.save(1, {"weight": torch.ones(3)})
        True
        >>> try:
        ...     second.save(2, {"weight": torch.ones(3)})
        ... except deepnvme.errors.LockedError as error:
        ...     print(type(error).__name__)
        LockedError
    """


class WaitTimeoutError(Error, TimeoutError):
    """The timeout passed while the request was in flight. The request continues: wait again, or cancel it.

    Example:
        >>> transfer = deepnvme.start_write(torch.ones(1 << 20), "weights.bin", durability="full")
        >>> try:
        ...     _ = transfer.result(timeout=0)
        ... except deepnvme.errors.WaitTimeoutError:
        ...     _ = transfer.result()  # wait again
    """


class CorruptFileError(Error, ValueError):
    """A checkpoint or swapped tensor is truncated, corrupt or malicious.

    ``offset`` says where, if that is known.

    Example:
        >>> import os
        >>> size = deepnvme.save({"weight": torch.ones(3)}, "model.pt")
        >>> os.truncate("model.pt", 100)
        >>> try:
        ...     deepnvme.load("model.pt")
        ... except deepnvme.errors.CorruptFileError as error:
        ...     print(error.filename)
        model.pt
    """


class ChecksumError(Error, ValueError):
    """The bytes of a checkpoint, or of a packed table of rows, are not those that were saved.

    ``offset`` is the start of the damaged range, if that is known.

    Example:
        >>> import os
        >>> size = deepnvme.save({"weight": torch.ones(3)}, "model.safetensors")
        >>> with open("model.safetensors", "r+b") as file:
        ...     _ = file.seek(-1, os.SEEK_END)
        ...     _ = file.write(b"!")
        >>> try:
        ...     deepnvme.load("model.safetensors", verify="full")
        ... except deepnvme.errors.ChecksumError as error:
        ...     print(error.filename)
        model.safetensors
    """


class ChangedFileError(Error):
    """A file was replaced, truncated or modified after it was opened. ``filename`` says which.

    It is a file of a streamed model, of a ``RowStore``, of a load or of ``iterate_weights``. The file's identity, size
    and modification time tell. A load reads the file that it has opened, so a file that has got the name since is no
    change. A write in place goes unnoticed if the size stays and the old time is restored.

    Example:
        >>> layer = torch.nn.Linear(8, 8)
        >>> size = deepnvme.save(layer.state_dict(), "model.safetensors")
        >>> model = deepnvme.stream(layer, weights="model.safetensors", memory="1MB")
        >>> try:
        ...     with torch.no_grad():
        ...         output = model(torch.ones(8))
        ... except deepnvme.errors.ChangedFileError as error:
        ...     print(error.filename, "was replaced")
    """


class UnsafeFileError(Error, pickle.UnpicklingError):
    """A checkpoint asks for code that is not known to be safe. The message names the code, and says how to allow it.

    Example:
        >>> torch.save({"call": print}, "model.pt")
        >>> try:
        ...     deepnvme.load("model.pt")
        ... except deepnvme.errors.UnsafeFileError as error:
        ...     print("print" in str(error))
        True
    """


class PeerError(Error):
    """Another process of a group failed or ended.

    If that process reported its error, the message names it and repeats the error. A killed process reports nothing.

    Example:
        >>> checkpointer = deepnvme.Checkpointer("run")
        >>> try:
        ...     _ = checkpointer.save(2, {"weight": torch.ones(3)})
        ... except deepnvme.errors.PeerError as error:
        ...     print("another rank failed:", error)
    """


class StepStoppedError(Error):
    """The disk failed during an optimizer step. The message says what was updated, and how to continue the step.

    Example:
        >>> weights = torch.nn.Parameter(torch.ones(3))
        >>> optimizer = deepnvme.optim.AdamW([weights], swap_dir=".", memory="1MB")
        >>> weights.sum().backward()
        >>> try:
        ...     optimizer.step()
        ... except deepnvme.errors.StepStoppedError:
        ...     optimizer.step()  # it goes on where it stopped
    """


class MovedError(Error):
    """Internal: the records of an archive must be located one by one. ``deepnvme.load`` handles this itself."""
