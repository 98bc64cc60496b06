"""The op `async_io`: `aio_handle` and its module functions, with DeepSpeed's names, arguments and results.

Where DeepSpeed returns -1, prints or ends the process, these raise `FileNotFoundError`, `PermissionError`,
`ValueError`, `TypeError`, or `deepnvme.Error`.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn

import torch

from . import _checks, _pinned_tensors
from ._checks import FileName
from ._operations import EngineSettings, Operations, Request

# The unit of `get_alignment()`. Callers compute buffer sizes with it; the engine itself needs no alignment.
ALIGNMENT_BYTES = 512
_MISSING: Any = object()


class aio_handle:  # noqa: N801 - the name is DeepSpeed's
    """Reads and writes tensors, blocking or in the background.

    Files are written in place: created and extended as needed, never truncated. Any size, offset, rank and stride
    works, in CPU memory and on NVIDIA GPUs. GPU transfers use bounce buffers and wait for the tensor's current stream.
    Threads may share a handle. It can be neither copied nor pickled, nor used after a fork. A handle that is dropped
    completes its pending operations first.

    The methods take these arguments: `buffer`, a tensor of any dtype and shape; `filename`, a `str` or path, or `fd`,
    an open descriptor; `file_offset`, in bytes from the start of the file (default 0); `validate`, whether to compare
    file and tensor afterwards, and raise `deepnvme.Error` if they differ; `async_`, whether to return before the
    transfer is done; `num_elem`, a number of elements, and `example_tenosr` (spelt as in DeepSpeed), a tensor of the
    wanted dtype; `tensor`, one of `new_cpu_locked_tensor` or `new_pinned_device_tensor`.

    Args:
        block_size: bytes of one request to the device. Default 1 MiB, as in DeepSpeed. Any value of 1 or more is
            accepted here and below; the engine uses the nearest one that it supports.
        queue_depth: requests in flight per worker. Default 128.
        single_submit: one system call per request. Default False.
        overlap_events: stored only; the engine always overlaps. Default False.
        intra_op_parallelism: workers. Default 1.

    Raises:
        TypeError, ValueError: an argument is not of its type, or below 1.

    Example:
        >>> from deepnvme.deepspeed import aio_handle
        >>> handle = aio_handle(queue_depth=32)
        >>> handle.sync_pwrite(torch.arange(1000), "numbers")
        1
        >>> numbers = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.int64))
        >>> handle.async_pread(numbers, "numbers")
        0
        >>> handle.wait()
        1
    """

    # Whether GPU transfers use cuFile.
    _gds: ClassVar[Literal["preferred", "disabled"]] = "disabled"

    __slots__ = (
        "__weakref__",
        "_block_size",
        "_intra_op_parallelism",
        "_operations",
        "_overlap_events",
        "_queue_depth",
        "_single_submit",
    )

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._block_size = _checks.positive(block_size, "block_size")
        self._queue_depth = _checks.positive(queue_depth, "queue_depth")
        self._single_submit = _checks.flag(single_submit, "single_submit")
        self._overlap_events = _checks.flag(overlap_events, "overlap_events")
        self._intra_op_parallelism = _checks.positive(intra_op_parallelism, "intra_op_parallelism")
        self._operations = Operations(
            EngineSettings.of(
                block_size=self._block_size,
                queue_depth=self._queue_depth,
                single_submit=self._single_submit,
                intra_op_parallelism=self._intra_op_parallelism,
            )._replace(gds=self._gds)
        )
        # Runs when the handle is dropped, or at interpreter exit.
        weakref.finalize(self, self._operations.close)

    def get_block_size(self) -> int:
        """Return the block size in bytes, as given."""
        return self._block_size

    def get_queue_depth(self) -> int:
        """Return the queue depth, as given."""
        return self._queue_depth

    def get_single_submit(self) -> bool:
        """Return `single_submit`, as given."""
        return self._single_submit

    def get_overlap_events(self) -> bool:
        """Return `overlap_events`, as given."""
        return self._overlap_events

    def get_intra_op_parallelism(self) -> int:
        """Return `intra_op_parallelism`, as given."""
        return self._intra_op_parallelism

    def get_alignment(self) -> int:
        """Return `intra_op_parallelism * 512`, for callers that compute with it. Nothing has to be aligned."""
        return self._intra_op_parallelism * ALIGNMENT_BYTES

    def read(self, buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int = 0) -> int:
        """Fill `buffer` from a file at byte `file_offset`. Returns 0. Waits only for writes to these bytes."""
        self._operations.run(_checked("read", buffer, filename, validate, file_offset))
        return 0

    def write(self, buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int = 0) -> int:
        """Write `buffer` to a file at byte `file_offset`. Returns 0. Waits only for operations on these bytes."""
        self._operations.run(_checked("write", buffer, filename, validate, file_offset))
        return 0

    def pread(
        self,
        buffer: torch.Tensor,
        filename: FileName,
        validate: bool,
        async_: bool = _MISSING,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Call `async_pread` or `sync_pread`, by the fourth argument, and return its result.

        Args:
            buffer: as for the other methods.
            filename: as for the other methods.
            validate: as for the other methods.
            async_: whether to call `async_pread`.
            file_offset: as for the other methods. Default 0.
            **keywords: DeepSpeed's keyword for `async_` is `async`: `**{"async": True}`.
        """
        run_async = _async_flag("pread", async_, keywords)
        return self._transfer("read", buffer, filename, validate, file_offset, run_async=run_async)

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: FileName,
        validate: bool,
        async_: bool = _MISSING,
        file_offset: int = 0,
        **keywords: bool,
    ) -> int:
        """Call `async_pwrite` or `sync_pwrite`, by the fourth argument, and return its result.

        Args:
            buffer: as for the other methods.
            filename: as for the other methods.
            validate: as for the other methods.
            async_: whether to call `async_pwrite`.
            file_offset: as for the other methods. Default 0.
            **keywords: DeepSpeed's keyword for `async_` is `async`: `**{"async": True}`.
        """
        run_async = _async_flag("pwrite", async_, keywords)
        return self._transfer("write", buffer, filename, validate, file_offset, run_async=run_async)

    def sync_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Fill `buffer` from a file, and wait for all pending operations. Returns their number, including this one."""
        return self._transfer("read", buffer, filename, False, file_offset, run_async=False)

    def sync_pwrite(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Write `buffer` to a file, and wait for all pending operations. Returns their number, including this one."""
        return self._transfer("write", buffer, filename, False, file_offset, run_async=False)

    def async_pread(self, buffer: torch.Tensor, filename: FileName, file_offset: int = 0) -> int:
        """Start to fill `buffer` from a file. Returns 0. Do not touch `buffer` before `wait`."""
        return self._transfer("read", buffer, filename, False, file_offset, run_async=True)

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: FileName | int = _MISSING,
        file_offset: int = 0,
        *,
        fd: int = _MISSING,
    ) -> int:
        """Start to write `buffer` to a file, or to an open descriptor (`fd`) that the caller keeps open. Returns 0.

        Raises:
            TypeError: both or neither of `filename` and `fd` are given.
        """
        if (filename is _MISSING) == (fd is _MISSING):
            msg = "async_pwrite() takes a filename or an fd"
            raise TypeError(msg)
        target = filename if fd is _MISSING else fd
        file = _checks.descriptor(target) if isinstance(target, int) else _checks.filename(target)
        tensor = _checks.tensor(buffer, "buffer")
        self._operations.start(Request("write", tensor, file, _checks.natural(file_offset, "file_offset")))
        return 0

    def new_cpu_locked_tensor(self, num_elem: int, example_tenosr: torch.Tensor) -> torch.Tensor:
        """Return a new 1-D pinned CPU tensor of zeros, with `num_elem` elements and the dtype of the example.

        The misspelt keyword is DeepSpeed's.
        """
        return _pinned_tensors.new(num_elem, example_tenosr)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a locked tensor and leave it empty. Returns False for any other tensor.

        Dropping the last reference to a locked tensor also frees it.
        """
        return _pinned_tensors.free(tensor)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether `buffer` is a locked tensor of any handle, a view of one, or in torch's pinned memory."""
        return _pinned_tensors.is_pinned(buffer)

    def wait(self) -> int:
        """Wait for all pending operations. Returns their number, possibly 0.

        Raises their first error once all are done. The handle stays usable.
        """
        return self._operations.wait()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        msg = f"{name}: a handle is neither copied nor pickled, since it owns threads; make one in every process"
        raise TypeError(msg)

    def _transfer(
        self,
        kind: Literal["read", "write"],
        buffer: torch.Tensor,
        filename: FileName,
        validate: bool,
        file_offset: int,
        *,
        run_async: bool,
    ) -> int:
        request = _checked(kind, buffer, filename, validate, file_offset)
        if not run_async and self._operations.is_idle:
            self._operations.run(request)
            return 1
        self._operations.start(request)
        return 0 if run_async else self._operations.wait()


def aio_read(  # noqa: PLR0917 - the order is DeepSpeed's
    buffer: torch.Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
    /,
) -> int:
    """Fill `buffer` from the start of a file, and wait.

    Args:
        buffer: a tensor of any dtype and shape.
        filename: the file, a `str` or path.
        block_size: as for `aio_handle`.
        queue_depth: as for `aio_handle`.
        single_submit: as for `aio_handle`.
        overlap_events: as for `aio_handle`.
        validate: whether to compare the file with the tensor afterwards.

    Returns:
        0, as in DeepSpeed.

    Raises:
        FileNotFoundError, PermissionError: as from `open`.
        deepnvme.Error: the transfer failed, or `validate` found that the file differs from the tensor.
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> from deepnvme.deepspeed import aio_read, aio_write
        >>> aio_write(torch.ones(1000), "ones", 1 << 20, 32, False, False, False)
        0
        >>> aio_read(torch.empty(1000), "ones", 1 << 20, 32, False, False, False)
        0
    """
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(buffer, filename, validate)


def aio_write(  # noqa: PLR0917 - the order is DeepSpeed's
    buffer: torch.Tensor,
    filename: FileName,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
    /,
) -> int:
    """Write `buffer` to the start of a file, and wait. A missing file is created. A longer one keeps its other bytes.

    Args:
        buffer: a tensor of any dtype and shape.
        filename: the file, a `str` or path.
        block_size: as for `aio_handle`.
        queue_depth: as for `aio_handle`.
        single_submit: as for `aio_handle`.
        overlap_events: as for `aio_handle`.
        validate: whether to compare the file with the tensor afterwards.

    Returns:
        0, as in DeepSpeed.

    Raises:
        FileNotFoundError, PermissionError: as from `open`.
        deepnvme.Error: the transfer failed, or `validate` found that the file differs from the tensor.
        TypeError, ValueError: an argument is invalid.

    Example:
        >>> from deepnvme.deepspeed import aio_read, aio_write
        >>> aio_write(torch.ones(1000), "ones", 1 << 20, 32, False, False, False)
        0
        >>> aio_read(torch.empty(1000), "ones", 1 << 20, 32, False, False, False)
        0
    """
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(buffer, filename, validate)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor, /) -> int:
    """Copy a tensor into another one, whatever their shapes.

    Args:
        dest: the tensor to fill.
        src: the tensor to copy, of the same dtype and number of elements.

    Returns:
        0, as in DeepSpeed.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: dtypes or numbers of elements differ.

    Example:
        >>> from deepnvme.deepspeed import deepspeed_memcpy
        >>> deepspeed_memcpy(torch.empty(2, 3), torch.ones(6))
        0
    """
    target = _checks.tensor(dest, "dest")
    source = _checks.tensor(src, "src")
    if target.dtype != source.dtype or target.numel() != source.numel():
        msg = (
            f"dest has {target.numel()} elements of {target.dtype}, src {source.numel()} of {source.dtype}; "
            "both must agree"
        )
        raise ValueError(msg)
    target.detach().copy_(source.detach().reshape(target.shape))
    return 0


def _checked(
    kind: Literal["read", "write"], buffer: torch.Tensor, filename: FileName, validate: bool, file_offset: int
) -> Request:
    tensor = _checks.tensor(buffer, "buffer")
    name = _checks.filename(filename)
    offset = _checks.natural(file_offset, "file_offset")
    check = partial(_checks.compare, tensor, name, offset) if _checks.flag(validate, "validate") else None
    return Request(kind, tensor, name, offset, check)


def _async_flag(method: str, positional: bool, keywords: dict[str, bool]) -> bool:
    # `async` is a Python keyword, so it can be an argument name only through `**`.
    given = dict(keywords)
    value = given.pop("async", positional)
    if given or (positional is not _MISSING and "async" in keywords):
        msg = f"{method}() takes buffer, filename, validate, async, file_offset; got {sorted(keywords)} as well"
        raise TypeError(msg)
    if value is _MISSING:
        msg = f"{method}() misses the argument 'async'"
        raise TypeError(msg)
    return _checks.flag(value, "async")
