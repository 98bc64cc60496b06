from collections.abc import Callable, Generator, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, final, type_check_only

import torch
from typing_extensions import Buffer, Self, disjoint_base

__all__ = [
    "BackendProbe",
    "Engine",
    "Kernel",
    "Probe",
    "Progress",
    "Stats",
    "StepGradients",
    "StepPlan",
    "StepRecord",
    "StripeSet",
    "Trace",
    "Transfer",
    "_BorrowScope",
    "_Borrowed",
    "_CheckpointReader",
    "_DevicePin",
    "_DirectReads",
    "_FileReader",
    "_FileWriter",
    "_Gather",
    "_GcPause",
    "_HashCosts",
    "_History",
    "_Loading",
    "_NewFile",
    "_NewFolder",
    "_PlainTargets",
    "_PrivateFolder",
    "_ReflinkTarget",
    "_RowStore",
    "_SavePlan",
    "_SaveShard",
    "_SaveStaging",
    "_SavedHooksScope",
    "_Saving",
    "_SetReplacement",
    "_SparseRowCache",
    "_StoredTensor",
    "_Streamer",
    "_Swapper",
    "__version__",
    "_at_exit",
    "_cacheable_bytes",
    "_call_with_params",
    "_check_pickle",
    "_checkpoint_paths",
    "_command_result",
    "_crc64",
    "_crc64_of_all",
    "_end_gc_pauses",
    "_exchange_capture_mode",
    "_find_set",
    "_is_held",
    "_list_state",
    "_make_folders",
    "_not_plain",
    "_open_regular",
    "_pack_rows",
    "_packed_block_bytes",
    "_packed_tensors",
    "_parse_bytes",
    "_parse_packed_rows",
    "_pickle_plain",
    "_pin_device",
    "_pinned_capsule",
    "_plan_archive",
    "_plan_safetensors",
    "_python_command",
    "_read_small_file",
    "_refuse_list_name",
    "_remove_leftovers",
    "_retire_set",
    "_row_page_bytes",
    "_run_command",
    "_sees_used_pages",
    "_shard_ranges",
    "default_engine",
    "probe",
    "read",
    "read_batch",
    "span",
    "start_read",
    "start_read_batch",
    "start_write",
    "start_write_batch",
    "stats",
    "trace",
    "write",
    "write_batch",
]

__version__: str

@type_check_only
class _SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, Any]: ...

# torch tensors and numpy arrays support both protocols.
_Tensor: TypeAlias = Buffer | _SupportsDLPack
_Name: TypeAlias = str | bytes | PathLike[str] | PathLike[bytes]
_Place: TypeAlias = tuple[int, int]
_Path: TypeAlias = _Name | int | StripeSet
_Durability: TypeAlias = Literal["none", "data", "full"]

@final
class Engine:
    """Move tensors between files and memory.

    Every argument is optional. Threads may share an engine. Each engine owns its threads and memory, so one per process
    is enough. Don't use it after ``fork``: create a new one in the child.

    Args:
        backend: I/O interface: ``"io_uring"``, ``"aio"`` (Linux native AIO), ``"threads"``, or ``"auto"`` (default):
            the first of them that works here. ``probe()`` explains the choice.
        workers: threads that submit and reap, 1 to 64. Default: one per CPU, at most 4.
        queue_depth: ops in flight per worker, 1 to 4096. Default 128. With ``window="sliding"`` it is an upper
            bound: the depth adapts to the ops that the device completes in 200 ms, but does not fall below 16, or below
            ``queue_depth`` if that is less.
        block_bytes: maximum bytes of an op, a multiple of 4096 up to 64 MiB, or text such as ``"1MiB"``. Default
            2 MiB. Ops through bounce buffers have at most 512 KiB.
        submit: ``"batch"`` (default) submits several ops per system call, ``"single"`` one at a time.
        window: refill policy of the queue: ``"sliding"`` (default) refills as soon as an op completes, ``"drain"``
            once all have, as DeepSpeed does with ``overlap_events=False``.
        direct: page cache bypass: ``"preferred"`` (default) bypasses it if the file system can, except for reads
            of bytes that are in it; ``"required"`` bypasses it for these as well, and raises if the file system
            cannot; ``"disabled"`` always uses the page cache. The ragged edges of writes use it in every mode.
            ``stats()`` reports the result.
        gds: direct transfers between disk and GPU with cuFile (GPUDirect Storage): ``"preferred"`` uses cuFile if it
            works, ``"required"`` raises if it does not, ``"disabled"`` (default) uses bounce buffers. ``stats()``
            reports the result (``bytes_gds``, ``gds_reason``).
        pool_bytes: upper bound of the memory for bounce buffers: bytes, or text such as ``"64MiB"``. Each worker needs
            at least one buffer. Default: 8 MiB per worker, at most 256 MiB, and 1.125 MiB for small calls.
        lock_pool: pin this memory if ``RLIMIT_MEMLOCK`` allows. Default True.
        register_pool: register this memory with io_uring. Default True.

    Raises:
        ValueError: a setting is out of range; the message names the range.
        deepnvme.errors.UnsupportedError: the requested backend does not work here; the message says why.

    Example:
        >>> with deepnvme.Engine(workers=2, block_bytes="1MiB") as engine:
        ...     engine.write(torch.ones(1024), "weights.bin")
        4096
    """

    def __new__(
        cls,
        *,
        backend: Literal["auto", "io_uring", "aio", "threads"] = "auto",
        workers: int | None = None,
        queue_depth: int | None = None,
        block_bytes: int | str | None = None,
        submit: Literal["batch", "single"] = "batch",
        window: Literal["sliding", "drain"] = "sliding",
        direct: Literal["preferred", "required", "disabled"] = "preferred",
        gds: Literal["preferred", "required", "disabled"] = "disabled",
        pool_bytes: int | str | None = None,
        lock_pool: bool = True,
        register_pool: bool = True,
    ) -> Self: ...
    @staticmethod
    def from_file(
        path: _Name | None = None,
        *,
        folder: _Name | None = None,
        direction: Literal["read", "write"] | None = None,
    ) -> Engine:
        r"""Create an engine with settings that ``deepnvme tune`` wrote.

        Args:
            path: the settings file. Default: ``DEEPNVME_CONFIG``, else ``deepnvme.toml`` in the current folder.
            folder: folder of the data. Uses the settings of the deepest listed folder that contains it. Default: the
                settings for every folder.
            direction: ``"read"`` or ``"write"``, for an engine that does only one. Default: both.

        Returns:
            A new engine.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: a setting is invalid; the message names it and its range.

        Example:
            >>> with open("deepnvme.toml", "w") as file:  # or deepnvme.tune("/mnt/nvme")
            ...     _ = file.write("[engine]\nqueue_depth = 8\n")
            >>> deepnvme.Engine.from_file("deepnvme.toml", folder="/mnt/nvme", direction="read").queue_depth
            8
        """
    @property
    def backend(self) -> Literal["io_uring", "aio", "threads"]:
        """Backend in use: ``"io_uring"``, ``"aio"`` or ``"threads"``."""
    @property
    def workers(self) -> int:
        """Threads that submit and reap."""
    @property
    def queue_depth(self) -> int:
        """Ops in flight per worker."""
    @property
    def block_bytes(self) -> int:
        """Maximum bytes of an op."""
    @property
    def submit(self) -> Literal["batch", "single"]:
        """Whether several ops are submitted per system call: ``"batch"`` or ``"single"``."""
    @property
    def window(self) -> Literal["sliding", "drain"]:
        """Refill policy of the queue: ``"sliding"`` or ``"drain"``."""
    @property
    def direct(self) -> Literal["preferred", "required", "disabled"]:
        """Page cache bypass: ``"preferred"``, ``"required"`` or ``"disabled"``."""
    @property
    def gds(self) -> Literal["preferred", "required", "disabled"]:
        """Use of cuFile for CUDA tensors: ``"preferred"``, ``"required"`` or ``"disabled"``."""
    @property
    def pool_bytes(self) -> int:
        """Upper bound of the engine's bounce buffers, in bytes."""
    @property
    def is_closed(self) -> bool:
        """Whether the engine is closed."""
    def read(self, tensor: _Tensor, path: _Path, offset: int = 0) -> int:
        """Read ``tensor.nbytes`` bytes of a file into a tensor, and wait for them.

        Any size, offset and memory alignment works. The call releases the GIL and handles signals (Ctrl-C).

        Args:
            tensor: the tensor to fill: a torch tensor (any shape, dtype and strides, on the CPU or a CUDA device), a
                numpy array, or a writable object with the buffer protocol or DLPack.
            path: ``str``, ``bytes``, ``os.PathLike``, an open file descriptor (it stays open, and its position
                unchanged) or a ``StripeSet``.
            offset: position in the file, in bytes. Default 0.

        Returns:
            The number of bytes read, which is ``tensor.nbytes``.

        Raises:
            FileNotFoundError, PermissionError: as from ``open``.
            deepnvme.EndOfFileError: the file ends inside the range. The contents of the tensor are undefined then.
            TypeError, ValueError: the tensor cannot be filled (read-only, sparse, overlapping elements).
            deepnvme.Error: any other failure, with ``errno``, ``filename`` and ``offset``.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.write(tensor, "weights.bin")
            4096
            >>> deepnvme.read(torch.empty_like(tensor), "weights.bin")
            4096
        """
    def write(
        self, tensor: _Tensor, path: _Path, offset: int | None = None, *, durability: _Durability = "none"
    ) -> int:
        """Write the bytes of a tensor to a file, and wait for them.

        Without ``offset``, the file becomes exactly the tensor: a longer file is truncated, a missing one created. With
        ``offset``, only that range changes, and the file grows if the range ends beyond it. Elements are written in
        row-major order, as in ``tensor.contiguous()``.

        Args:
            tensor: the tensor to write, of the kinds that ``read`` takes. It may be read-only, and its elements may
                overlap.
            path: as for ``read``. A missing file is created; its folder must exist.
            offset: position in the file, in bytes; ``None`` (default) writes the whole file.
            durability: data that survives a power cut once this returns: ``"none"`` (default) none, ``"data"`` the bytes
                and the size, ``"full"`` also the file's name in its folder.

        Returns:
            The number of bytes written, which is ``tensor.nbytes``.

        Raises:
            deepnvme.Error: the write failed; a full disk gives ``errno.ENOSPC``. A new file may stay, empty or half written:
                for all-or-nothing files, use ``deepnvme.open(path, "wb")``.
            TypeError, ValueError: the tensor cannot be written (sparse, without memory), or an argument is invalid.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.write(tensor, "weights.bin", durability="full")
            4096
        """
    def start_read(self, tensor: _Tensor, path: _Path, offset: int = 0) -> Transfer:
        """Start a ``read`` and return at once, whatever the size.

        Don't use the tensor until the transfer is done.

        Args:
            tensor: as for ``read``.
            path: as for ``read``.
            offset: as for ``read``. Default 0.

        Returns:
            A ``Transfer``. Its ``result()`` waits, and returns the number of bytes.

        Raises:
            FileNotFoundError, PermissionError: as from ``open``.
            TypeError, ValueError: as from ``read``. Failures of the transfer itself are raised by ``Transfer.result``.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.write(tensor, "weights.bin")
            4096
            >>> transfer = deepnvme.start_read(tensor, "weights.bin")
            >>> transfer.result()
            4096
        """
    def start_write(
        self, tensor: _Tensor, path: _Path, offset: int | None = None, *, durability: _Durability = "none"
    ) -> Transfer:
        """Start a ``write`` and return at once, whatever the size.

        Don't change the tensor until the transfer is done.

        Args:
            tensor: as for ``write``.
            path: as for ``write``.
            offset: as for ``write``. Default ``None``, which writes the whole file.
            durability: as for ``write``. Default ``"none"``.

        Returns:
            A ``Transfer``. Its ``result()`` waits, and returns the number of bytes.

        Raises:
            FileNotFoundError, PermissionError: as from ``open``.
            TypeError, ValueError: as from ``write``. Failures of the transfer itself are raised by ``Transfer.result``.

        Example:
            >>> transfer = deepnvme.start_write(torch.ones(1024), "weights.bin")
            >>> transfer.result()
            4096
        """
    def read_batch(self, items: Iterable[tuple[_Path, int, _Tensor]]) -> int:
        """Read many tensors as one request, and wait for them.

        Adjacent ranges of a file are merged into large ops. Thousands of small tensors are then about as fast as one
        tensor of the same size.

        Args:
            items: tuples ``(path, offset, tensor)``, each as for ``read``; offsets are in bytes.

        Returns:
            The number of bytes of all tensors.

        Raises:
            TypeError, ValueError: an item is invalid (the message says which), or two tensors share memory.
            deepnvme.Error: as from ``read``; ``filename`` and ``offset`` say where.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.write(tensor, "weights.bin")
            4096
            >>> deepnvme.read_batch([("weights.bin", 0, tensor[:512]), ("weights.bin", 2048, tensor[512:])])
            4096
        """
    def write_batch(
        self, items: Iterable[tuple[_Path, int | None, _Tensor]], *, durability: _Durability = "none"
    ) -> int:
        """Write many tensors as one request, and wait for them.

        Args:
            items: tuples ``(path, offset, tensor)``. Offsets are in bytes, and are all given or all ``None``: with
                ``None``, every file becomes exactly its tensor.
            durability: as for ``write``, for all files. Default ``"none"``.

        Returns:
            The number of bytes of all tensors.

        Raises:
            TypeError, ValueError: an item is invalid, or two ranges overlap.
            deepnvme.Error: as from ``write``.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.write_batch([("parts.bin", 0, tensor[:512]), ("parts.bin", 2048, tensor[512:])])
            4096
        """
    def start_read_batch(self, items: Iterable[tuple[_Path, int, _Tensor]]) -> Transfer:
        """Start a ``read_batch`` and return at once.

        Don't use the tensors until the transfer is done.

        Args:
            items: as for ``read_batch``.

        Returns:
            One ``Transfer`` for the whole batch.

        Raises:
            FileNotFoundError, PermissionError: as from ``open``.
            TypeError, ValueError: as from ``read_batch``. Failures of the transfer are raised by ``Transfer.result``.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.write(tensor, "weights.bin")
            4096
            >>> deepnvme.start_read_batch([("weights.bin", 0, tensor[:512])]).result()
            2048
        """
    def start_write_batch(
        self, items: Iterable[tuple[_Path, int | None, _Tensor]], *, durability: _Durability = "none"
    ) -> Transfer:
        """Start a ``write_batch`` and return at once.

        Don't change the tensors until the transfer is done.

        Args:
            items: as for ``write_batch``.
            durability: as for ``write``, for all files. Default ``"none"``.

        Returns:
            One ``Transfer`` for the whole batch.

        Raises:
            FileNotFoundError, PermissionError: as from ``open``.
            TypeError, ValueError: as from ``write_batch``. Failures of the transfer are raised by ``Transfer.result``.

        Example:
            >>> tensor = torch.ones(1024)
            >>> deepnvme.start_write_batch([("a.bin", None, tensor), ("b.bin", None, tensor)]).result()
            8192
        """
    def stats(self) -> Stats:
        """Return the engine's counters since it was created.

        Returns:
            A ``Stats`` of this moment. Later work does not change it.

        Example:
            >>> before = deepnvme.stats().requests
            >>> deepnvme.write(torch.ones(1024), "weights.bin")
            4096
            >>> deepnvme.stats().requests - before
            1
        """
    def trace(self, path: _Name) -> Trace:
        """Record the engine's work during a ``with`` block, and write it to a file.

        The file appears complete when the block ends, even if the block raises. Several timelines may be recorded at
        once. Each has all events that end meanwhile, up to 262,144; further events are only counted. While none is
        recorded, this costs nothing.

        Args:
            path: output file: ``*.json`` for https://ui.perfetto.dev and ``chrome://tracing``, ``*.html`` for a
                self-contained page.

        Returns:
            A ``Trace``, which records while its ``with`` block runs.

        Raises:
            deepnvme.Error: the file cannot be written; raised when the block begins.
            ValueError: the suffix is unknown; raised when the block begins.

        Example:
            >>> with deepnvme.trace("timeline.html") as trace:
            ...     deepnvme.write(torch.ones(1024), "weights.bin")
            4096
            >>> trace.summary()["requests"] >= 1
            True
        """
    def span(self, name: str, lane: str, start_ns: int, end_ns: int) -> None:
        """Add a bar, for example for computation or a wait, to the timelines that the engine records now.

        While no timeline is recorded, this does nothing.

        Args:
            name: label of the bar.
            lane: name of the band of the timeline; bars of the same lane share it.
            start_ns: start time, as ``time.monotonic_ns()`` gives it.
            end_ns: end time, on the same clock.

        Raises:
            ValueError: the bar ends before it starts.

        Example:
            >>> import time
            >>> with deepnvme.trace("timeline.json"):
            ...     started = time.monotonic_ns()
            ...     deepnvme.span("step 1", "training", started, time.monotonic_ns())
        """
    def probe(self) -> Probe:
        """Report the backends that work on this machine, and the reason for the engine's choice.

        Returns:
            A ``Probe`` with a result for each backend.

        Example:
            >>> deepnvme.probe().threads.works
            True
        """
    def close(self) -> None:
        """Finish all transfers in flight, including other threads', and stop the engine's threads.

        Later calls raise ``deepnvme.errors.ClosedError``, as do files, streamers and swappers that use the engine.
        Closing twice does nothing. A ``with`` block closes the engine at its end.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None: ...

@final
class Trace:
    """Record an engine's work while the block runs, and write it to a file.

    ``deepnvme.trace`` and ``Engine.trace`` make it.

    Example:
        >>> import time
        >>> with deepnvme.trace("timeline.html") as trace:
        ...     started = time.monotonic_ns()
        ...     deepnvme.write(torch.ones(1024), "weights.bin")
        ...     trace.span("first", "steps", started, time.monotonic_ns())
        4096
        >>> trace.summary()["bytes_written"]
        4096
    """

    def span(self, name: str, lane: str, start_ns: int, end_ns: int) -> None:
        """Add a bar to this timeline, and to the others that the engine records now.

        Args:
            name: label of the bar.
            lane: name of the band of the timeline; bars of the same lane share it.
            start_ns: start time, as ``time.monotonic_ns()`` gives it.
            end_ns: end time, on the same clock.

        Raises:
            ValueError: the bar ends before it starts, or the timeline is not being recorded.
        """
    def summary(self) -> dict[str, Any]:
        """Summarise the recording after the block.

        The dictionary that this returns contains:

        - ``seconds``, ``requests``, ``ops``, ``bytes_read`` and ``bytes_written``; of these bytes,
          ``bytes_direct``, ``bytes_bounced``, ``bytes_buffered`` and ``bytes_gds``;
        - ``disk_busy_s``: time with an op in flight;
        - ``copies``, ``bytes_copied``, ``copies_busy_s``, and ``disk_overlap``: the share of ``copies_busy_s`` with an
          op in flight (``None`` without copies);
        - ``lanes``: for each added lane ``name``, ``spans`` (their number), ``busy_s``, and ``disk_overlap`` (the share
          of ``busy_s`` with an op in flight);
        - ``events``, and ``dropped`` ones.

        Raises:
            ValueError: the block has not ended yet.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None: ...

@final
class Transfer:
    """A request in flight, from ``start_read``, ``start_write`` or their batches.

    The tensor and the file stay alive until the request is done, even if the ``Transfer`` is dropped. In that case,
    they are released soon after it is done, and a failure becomes a ``ResourceWarning``. Until the request is done,
    don't change a tensor that is being written, and don't use a tensor that is being read into.

    ``await transfer`` waits in a coroutine, and a ``with`` block waits at its end.

    Example:
        >>> transfer = deepnvme.start_write(torch.ones(1024), "weights.bin")
        >>> transfer.result(timeout=60)
        4096
        >>> transfer.done(), transfer.progress()
        (True, Progress(bytes_done=4096, bytes_total=4096))
    """

    def result(self, timeout: float | None = None) -> int:
        """Wait until the request is done.

        The call releases the GIL and handles signals (Ctrl-C).

        Args:
            timeout: seconds to wait at most; ``None`` (default) waits without limit.

        Returns:
            The number of bytes moved.

        Raises:
            TimeoutError: the request is still in flight (``deepnvme.errors.WaitTimeoutError``). It continues: wait
                again, or cancel it.
            ValueError: ``timeout`` is negative, or not a number.
            deepnvme.Error: the transfer failed. Each later ``result`` raises it again.

        Example:
            >>> deepnvme.start_write(torch.ones(1024), "weights.bin").result()
            4096
        """
    def done(self) -> bool:
        """Return whether the request is done: it succeeded, failed or was cancelled. Never blocks."""
    def progress(self) -> Progress:
        """Return the request's progress, even while it is in flight."""
    def cancel(self) -> bool:
        """Cancel the part that has not started yet.

        Returns True if anything was cancelled. ``result`` then raises ``deepnvme.errors.CancelledError`` once the
        started part is done. A cancelled write leaves the file half written.
        """
    def _completion_fd(self) -> int: ...
    def __await__(self) -> Generator[Any, None, int]: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None: ...

@final
class Progress:
    """Progress of a request, in bytes. ``Transfer.progress`` returns it.

    Example:
        >>> with deepnvme.start_write(torch.ones(1024), "weights.bin") as transfer:
        ...     pass
        >>> transfer.progress().bytes_done
        4096
    """

    @property
    def bytes_done(self) -> int:
        """Bytes moved so far."""
    @property
    def bytes_total(self) -> int:
        """Bytes of the whole request."""
    def __eq__(self, other: object, /) -> bool: ...

@final
class StripeSet:
    """One logical file striped over several part files, as RAID-0 stripes disks.

    It adds up the bandwidth of several drives without RAID. ``read``, ``write``, ``open``, ``save``, ``load`` and
    others accept a stripe set as a path.

    The first write creates a manifest next to the first part, ``<first part>.stripes.json``. You can pass the
    manifest's path instead of the set to ``read``, ``write`` and ``load``, and to ``open`` for reading.

    Args:
        paths: the part files in order, one per drive, 1 to 4096. Their folders must exist.
        stripe_bytes: bytes of one part before the next part follows, a multiple of 4096, or text such as ``"1MiB"``.
            Default 1 MiB.

    Raises:
        ValueError: no part, too many, a duplicate, or ``stripe_bytes`` out of range.

    Example:
        >>> parts = deepnvme.StripeSet(["disk0.part", "disk1.part"], stripe_bytes=4096)
        >>> deepnvme.write(torch.ones(2048), parts)
        8192
        >>> deepnvme.read(torch.empty(2048), parts)
        8192
    """

    def __new__(cls, paths: Iterable[_Name], *, stripe_bytes: int | str = 1048576) -> Self: ...
    @staticmethod
    def from_manifest(path: _Name) -> StripeSet:
        """Load the set of a manifest. A save to it replaces the files of that manifest.

        Args:
            path: the manifest, ``<first part>.stripes.json``.

        Returns:
            The set that was written last.

        Raises:
            FileNotFoundError: the manifest does not exist.
            deepnvme.errors.CorruptFileError: the file is not a manifest, or differs from its checksum.

        Example:
            >>> parts = deepnvme.StripeSet(["disk0.part", "disk1.part"])
            >>> deepnvme.write(torch.ones(1024), parts)
            4096
            >>> deepnvme.StripeSet.from_manifest(parts.manifest_path).stripe_bytes
            1048576
        """
    @property
    def paths(self) -> tuple[str, ...]:
        """The part files, in order."""
    @property
    def stripe_bytes(self) -> int:
        """Bytes of one part before the next part follows. Default 1 MiB."""
    @property
    def manifest_path(self) -> str:
        """Path of the manifest."""
    def _manifest_text(self) -> str: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    @staticmethod
    def _unpickle(paths: Iterable[_Name], stripe_bytes: int, manifest: _Name) -> StripeSet: ...
    def __reduce__(self) -> tuple[Callable[..., StripeSet], tuple[tuple[str, ...], int, str]]: ...

@final
class Stats:
    """Counters of an engine's work so far. Counts and bytes only grow, except ``pool_bytes``.

    Example:
        >>> before = deepnvme.stats()
        >>> deepnvme.write(torch.ones(1024), "weights.bin")
        4096
        >>> deepnvme.stats().bytes_written - before.bytes_written
        4096
    """

    @property
    def backend(self) -> str:
        """Backend in use: ``"io_uring"``, ``"aio"`` or ``"threads"``."""
    @property
    def requests(self) -> int:
        """Requests that have ended, successfully or not."""
    @property
    def requests_failed(self) -> int:
        """Requests that ended in an error."""
    @property
    def ops(self) -> int:
        """Reads, writes and syncs submitted to the kernel, including resubmitted ones."""
    @property
    def bytes_read(self) -> int:
        """Bytes read from files."""
    @property
    def bytes_written(self) -> int:
        """Bytes written to files."""
    @property
    def bytes_direct(self) -> int:
        """Bytes read and written with direct I/O, to or from the tensor."""
    @property
    def bytes_bounced(self) -> int:
        """Bytes read and written with direct I/O, through bounce buffers."""
    @property
    def bytes_buffered(self) -> int:
        """Bytes read and written through the page cache."""
    @property
    def buffered_reason(self) -> str | None:
        """First reason for buffered I/O although direct I/O was requested."""
    @property
    def retries(self) -> int:
        """Ops that were interrupted or temporarily refused, and resubmitted."""
    @property
    def short_ops(self) -> int:
        """Ops that moved fewer bytes than requested, and were continued."""
    @property
    def syncs(self) -> int:
        """Syncs of files and folders."""
    @property
    def gpu_copies(self) -> int:
        """Copies between bounce buffers and GPUs."""
    @property
    def bytes_to_gpu(self) -> int:
        """Bytes copied to GPUs."""
    @property
    def bytes_from_gpu(self) -> int:
        """Bytes copied from GPUs."""
    @property
    def bytes_gds(self) -> int:
        """Bytes read and written by cuFile between disk and GPU. Part of ``bytes_read`` and ``bytes_written``."""
    @property
    def bytes_gds_pinned(self) -> int:
        """Part of ``bytes_gds`` that used memory registered with cuFile."""
    @property
    def gds_pins(self) -> int:
        """Registrations of GPU memory with cuFile."""
    @property
    def gds_pins_evicted(self) -> int:
        """Registrations, of any engine, that were evicted to make room for this engine's."""
    @property
    def gds_reason(self) -> str | None:
        """First reason for using bounce buffers for GPU tensors although cuFile was requested."""
    @property
    def gpu_waits(self) -> int:
        """Requests that waited for earlier work on a CUDA stream."""
    @property
    def bytes_compared(self) -> int:
        """Tensor bytes that ``load`` compared with checksums."""
    @property
    def bytes_not_compared(self) -> int:
        """Tensor bytes that ``load`` did not compare, without checksums or because it would have taken too long."""
    @property
    def staged_reason(self) -> str | None:
        """Reason for staged GPU copies, if the driver could not register the bounce buffers."""
    @property
    def latency_count(self) -> int:
        """Blocks whose latency was measured, from submission to completion."""
    @property
    def latency_us_min(self) -> int:
        """Shortest latency in microseconds."""
    @property
    def latency_us_p50(self) -> int:
        """Median latency in microseconds."""
    @property
    def latency_us_p99(self) -> int:
        """99th percentile of the latency in microseconds."""
    @property
    def latency_us_max(self) -> int:
        """Longest latency in microseconds."""
    @property
    def pool_bytes(self) -> int:
        """Bytes of memory that the engine holds now."""
    @property
    def pool_locked(self) -> bool | None:
        """Whether this memory is pinned; ``None`` while there is none."""
    @property
    def pool_lock_reason(self) -> str | None:
        """Reason why this memory is not pinned; ``None`` if it is, and while there is none."""
    def to_dict(self) -> dict[str, int | str | bool | None]:
        """Return the fields as a dictionary, ready for JSON."""

@final
class BackendProbe:
    """Availability of one backend on this machine, with the reason and remedy if it does not work.

    Example:
        >>> deepnvme.probe().threads.name
        'threads'
    """

    @property
    def name(self) -> str:
        """``"io_uring"``, ``"aio"`` or ``"threads"``."""
    @property
    def works(self) -> bool:
        """Whether it was set up and read a file correctly."""
    @property
    def detail(self) -> str | None:
        """Features that the kernel granted, if it works."""
    @property
    def errno(self) -> int | None:
        """The kernel's error number; ``None`` if the backend works, or fails for another reason."""
    @property
    def reason(self) -> str | None:
        """Why it does not work."""
    @property
    def remedy(self) -> str | None:
        """Steps that would make it work."""
    def to_dict(self) -> dict[str, int | str | bool | None]:
        """Return the fields as a dictionary, ready for JSON."""

@final
class Probe:
    """Backends that work on this machine, found by trying them, and the backend that this engine uses.

    Example:
        >>> probe = deepnvme.probe()
        >>> probe.threads.works
        True
    """

    @property
    def backend(self) -> str:
        """Backend of this engine: ``"io_uring"``, ``"aio"`` or ``"threads"``."""
    @property
    def backend_reason(self) -> str:
        """Reason why this backend was chosen."""
    @property
    def io_uring(self) -> BackendProbe:
        """Result for ``io_uring``."""
    @property
    def aio(self) -> BackendProbe:
        """Result for Linux native AIO."""
    @property
    def threads(self) -> BackendProbe:
        """Result for plain system calls on threads."""
    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary, ready for JSON."""

@final
class _FileReader:
    def __new__(cls, path: _Path, engine: Engine | None) -> Self: ...
    def read(self, size: int) -> bytes: ...
    def peek(self, size: int) -> bytes: ...
    def readinto(self, buffer: _Tensor) -> int: ...
    def seek(self, offset: int, whence: int) -> int: ...
    def tell(self) -> int: ...
    def close(self) -> None: ...

@final
class _FileWriter:
    def __new__(cls, path: _Path, engine: Engine | None, durability: str) -> Self: ...
    def write(self, data: _Tensor) -> int: ...
    def tell(self) -> int: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...

_LoadBuffer: TypeAlias = tuple[int, int, list[tuple[int, int]]]

@final
class _HashCosts:
    def __new__(cls, reader: _CheckpointReader) -> Self: ...
    def charge(self, keys: Iterable[object], is_set: bool) -> None: ...

@final
class _CheckpointReader:
    def __new__(
        cls,
        path: _Path,
        engine: Engine | None,
        exact: bool,
        names: list[str] | None = None,
        *,
        unless_covered: bool = False,
        complete: bool = False,
    ) -> Self: ...
    @property
    def format(self) -> str: ...
    @property
    def storage_count(self) -> int: ...
    def read_range(self, extent: int, start: int, target: object) -> None: ...
    @property
    def is_plain(self) -> bool: ...
    @property
    def has_checksums(self) -> bool: ...
    @property
    def coverage(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def described_nbytes(self) -> int: ...
    @property
    def metadata(self) -> list[tuple[str, str]]: ...
    def refuse_packed(self) -> None: ...
    def check(self, fingerprint: tuple[int, int] | None) -> None: ...
    def verify_tensors(self, verify: str) -> None: ...
    def index_crc64(self) -> int: ...
    def tensors(self, numbers: list[int] | None = None) -> list[tuple[str, str, list[int], list[int], int, int]]: ...
    def signs(self) -> list[tuple[int, bool, bool]]: ...
    def storages(self) -> list[tuple[str, int, str, int]]: ...
    def storage_nbytes(self, wanted: list[int]) -> list[int]: ...
    def load_buffers(self, wanted: list[int]) -> list[_LoadBuffer]: ...
    def start(self, buffers: Sequence[tuple[_LoadBuffer, _Tensor]]) -> _Loading: ...
    def direct_reads(
        self, targets: _PlainTargets, missing: set[str], names: list[str] | None
    ) -> tuple[_DirectReads, list[int]]: ...
    def start_direct(self, reads: _DirectReads) -> _Loading: ...
    def build(self, factory: object, storages: list[Any], wanted: list[str] | None) -> Any: ...

@final
class _PlainTargets:
    def __new__(cls, targets: dict[str, torch.Tensor]) -> Self: ...
    def first_shared(self, views: list[tuple[str, int, list[int], list[int], int]]) -> tuple[str, str] | None: ...

@final
class _DirectReads:
    def __len__(self) -> int: ...

@final
class _Loading:
    def is_done(self) -> bool: ...
    def finish(self, verify: str, progress: object) -> None: ...

def _check_pickle(pickle: bytes) -> None: ...
def _pickle_plain(state: object) -> tuple[bytes, list[torch.UntypedStorage]] | None: ...
def _find_set(
    path: str | bytes | PathLike[str] | PathLike[bytes], check: bool
) -> list[tuple[Path, list[str] | None, tuple[int, int] | None]]: ...
def _refuse_list_name(path: str | bytes | PathLike[str] | PathLike[bytes]) -> None: ...
def _is_held(storage: int) -> bool: ...
def _list_state(text: bytes) -> str: ...

_SaveOptions: TypeAlias = dict[str, Any]

@final
class _SaveStaging:
    def __new__(cls, nbytes: int) -> Self: ...
    @property
    def nbytes(self) -> int: ...

@final
class _Saving:
    @property
    def done(self) -> bool: ...
    @property
    def progress(self) -> tuple[int, int]: ...
    def wait_filled(self) -> None: ...
    def wait(self, progress: object, stop_on_signal: bool) -> tuple[int, int, int, int]: ...
    def take_file(self) -> _NewFile: ...
    def discard(self) -> None: ...
    def stop(self) -> None: ...

@final
class _SavePlan:
    @property
    def nbytes(self) -> int: ...
    @property
    def layout_crc64(self) -> int: ...
    @property
    def progress(self) -> tuple[int, int]: ...
    def start(self, private: bool = False) -> _Saving: ...
    def start_into(self, file: str | PathLike[str]) -> _Saving: ...
    def start_shard(self, file: str | PathLike[str], start: int, stop: int, base: int) -> _SaveShard: ...
    def wait_filled(self) -> None: ...
    def release_tensors(self) -> None: ...
    def stop(self) -> None: ...

@final
class _SaveShard:
    def checksums(self) -> bytes: ...
    def finish(self, others: Sequence[bytes]) -> tuple[int, int, int, int]: ...

@final
class _NewFile:
    def __new__(cls, path: str | PathLike[str], nbytes: int, engine: Engine | None) -> Self: ...
    @property
    def temporary(self) -> Path: ...
    def take_mode(self) -> None: ...
    def keep(self) -> None: ...
    def commit(self, sync: bool) -> None: ...
    def discard(self) -> None: ...

@final
class _ReflinkTarget:
    def __new__(
        cls,
        path: _Name,
        tensors: Sequence[tuple[str, str, int]],
        metadata: Sequence[tuple[str, str]],
        checksums: bool,
    ) -> Self: ...
    @property
    def data_offset(self) -> int: ...
    @property
    def private_path(self) -> str: ...
    def fileno(self) -> int: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...

@final
class _PrivateFolder:
    def __new__(cls, path: _Name) -> Self: ...
    @property
    def path(self) -> Path: ...
    def add(self, name: _Name) -> Path: ...
    def commit(self) -> None: ...
    def discard(self) -> None: ...

@final
class _SetReplacement:
    def __new__(
        cls, index: _Name, members: Sequence[tuple[str | PathLike[str], str]], record_at: Sequence[str]
    ) -> Self: ...
    @property
    def members(self) -> list[Path]: ...
    @property
    def names(self) -> list[Path]: ...
    def commit(self, index: str) -> list[Path]: ...
    def discard(self) -> None: ...

@final
class _NewFolder:
    def __new__(cls, parent: str | PathLike[str], name: str) -> Self: ...
    @property
    def path(self) -> Path: ...
    def keep(self) -> None: ...
    def discard(self) -> None: ...

_Settled: TypeAlias = tuple[list[str], list[str], list[str], list[str]]

@final
class _GcPause:
    def __new__(cls) -> Self: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class _History:
    def __new__(cls, folder: str | PathLike[str], keep: int | None, synced: bool) -> Self: ...
    def make(self) -> None: ...
    def read(self) -> str: ...
    @property
    def missing(self) -> list[tuple[int, str]]: ...
    def unlisted(self) -> list[str]: ...
    @property
    def text(self) -> str: ...
    def adopt_shared(self, text: str) -> None: ...
    def claim(self, name: str, group_id: str, is_leader: bool) -> tuple[list[str], bool]: ...
    @property
    def is_claimed(self) -> bool: ...
    def release(self) -> None: ...
    def abandon(self) -> None: ...
    def names_of(self, step: int) -> list[str]: ...
    def reserve(self, step: int, suffix: str, taken: list[str]) -> str: ...
    def release_name(self, name: str) -> None: ...
    def commit(self, entry: str, new: _NewFile, newer: list[int]) -> _Settled: ...
    def publish(self, entry: str) -> None: ...
    def is_committed(self, file: str) -> bool | None: ...
    def settle(self) -> _Settled: ...
    def record_settled(self, placed: list[str], gone: list[str]) -> None: ...

def _checkpoint_paths(folder: Path, text: str) -> list[Path]: ...
def _pack_rows(
    files: Sequence[_Path | _CheckpointReader],
    rows: tuple[Sequence[tuple[int, int, int]], int],
    scales: tuple[Sequence[tuple[int, int, int]], int] | None,
    hot: list[int],
    description: str,
    memory_bytes: int,
    target: _Path,
    report: Callable[[int], object] | None,
    engine: Engine | None,
) -> int: ...
def _packed_block_bytes(row_bytes: int) -> int: ...
def _parse_packed_rows(
    name: str, text: str, tensors: tuple[_Place, _Place | None, _Place | None]
) -> tuple[int, list[int], str, tuple[int, str] | None, tuple[int, int, int, bool], int, list[int], int]: ...
def _remove_leftovers(path: _Name) -> None: ...
def _retire_set(index: _Name, record_at: Sequence[str]) -> list[Path] | None: ...
def _open_regular(path: _Name) -> int: ...
def _make_folders(path: _Name) -> None: ...
def _read_small_file(path: _Name, max_nbytes: int) -> bytes: ...
def _crc64(path: str | bytes | PathLike[str] | PathLike[bytes], offset: int, nbytes: int) -> int: ...
def _crc64_of_all(ranges: Sequence[tuple[Path, int, int]]) -> int: ...
def _end_gc_pauses() -> None: ...
def _shard_ranges(nbytes: int, writers: int) -> list[tuple[int, int]]: ...
def _not_plain(pairs: list[tuple[Any, Any]]) -> list[int]: ...
def _plan_archive(
    path: _Path,
    before: Sequence[tuple[str, object]],
    storages: Sequence[torch.UntypedStorage],
    after: Sequence[tuple[str, object]],
    options: _SaveOptions,
) -> _SavePlan: ...
def _plan_safetensors(
    path: _Path,
    tensors: Sequence[tuple[str, torch.Tensor]],
    metadata: list[tuple[str, str]],
    options: _SaveOptions,
) -> _SavePlan: ...
def default_engine() -> Engine:
    """Return the engine of the module-level functions. It is created on first use.

    There is one per process, and a forked process gets its own. It has the settings of the file that the environment
    variable ``DEEPNVME_CONFIG`` names, or the defaults.

    Returns:
        An ``Engine``.

    Raises:
        FileNotFoundError, ValueError: the file of ``DEEPNVME_CONFIG`` does not exist or has invalid settings.

    Example:
        >>> deepnvme.default_engine().block_bytes
        2097152
    """

def read(tensor: _Tensor, path: _Path, offset: int = 0) -> int:
    """Read ``tensor.nbytes`` bytes of a file into a tensor, and wait for them.

    Any size, offset and memory alignment works. The call releases the GIL and handles signals (Ctrl-C).

    Args:
        tensor: the tensor to fill: a torch tensor (any shape, dtype and strides, on the CPU or a CUDA device), a
            numpy array, or a writable object with the buffer protocol or DLPack.
        path: ``str``, ``bytes``, ``os.PathLike``, an open file descriptor (it stays open, and its position
            unchanged) or a ``StripeSet``.
        offset: position in the file, in bytes. Default 0.

    Returns:
        The number of bytes read, which is ``tensor.nbytes``.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.EndOfFileError: the file ends inside the range. The contents of the tensor are undefined then.
        TypeError, ValueError: the tensor cannot be filled (read-only, sparse, overlapping elements).
        deepnvme.Error: any other failure, with ``errno``, ``filename`` and ``offset``.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.write(tensor, "weights.bin")
        4096
        >>> deepnvme.read(torch.empty_like(tensor), "weights.bin")
        4096
    """

def write(tensor: _Tensor, path: _Path, offset: int | None = None, *, durability: _Durability = "none") -> int:
    """Write the bytes of a tensor to a file, and wait for them.

    Without ``offset``, the file becomes exactly the tensor: a longer file is truncated, a missing one created. With
    ``offset``, only that range changes, and the file grows if the range ends beyond it. Elements are written in
    row-major order, as in ``tensor.contiguous()``.

    Args:
        tensor: the tensor to write, of the kinds that ``read`` takes. It may be read-only, and its elements may
            overlap.
        path: as for ``read``. A missing file is created; its folder must exist.
        offset: position in the file, in bytes; ``None`` (default) writes the whole file.
        durability: data that survives a power cut once this returns: ``"none"`` (default) none, ``"data"`` the bytes
            and the size, ``"full"`` also the file's name in its folder.

    Returns:
        The number of bytes written, which is ``tensor.nbytes``.

    Raises:
        deepnvme.Error: the write failed; a full disk gives ``errno.ENOSPC``. A new file may stay, empty or half written:
            for all-or-nothing files, use ``deepnvme.open(path, "wb")``.
        TypeError, ValueError: the tensor cannot be written (sparse, without memory), or an argument is invalid.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.write(tensor, "weights.bin", durability="full")
        4096
    """

def start_read(tensor: _Tensor, path: _Path, offset: int = 0) -> Transfer:
    """Start a ``read`` and return at once, whatever the size.

    Don't use the tensor until the transfer is done.

    Args:
        tensor: as for ``read``.
        path: as for ``read``.
        offset: as for ``read``. Default 0.

    Returns:
        A ``Transfer``. Its ``result()`` waits, and returns the number of bytes.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        TypeError, ValueError: as from ``read``. Failures of the transfer itself are raised by ``Transfer.result``.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.write(tensor, "weights.bin")
        4096
        >>> transfer = deepnvme.start_read(tensor, "weights.bin")
        >>> transfer.result()
        4096
    """

def start_write(
    tensor: _Tensor, path: _Path, offset: int | None = None, *, durability: _Durability = "none"
) -> Transfer:
    """Start a ``write`` and return at once, whatever the size.

    Don't change the tensor until the transfer is done.

    Args:
        tensor: as for ``write``.
        path: as for ``write``.
        offset: as for ``write``. Default ``None``, which writes the whole file.
        durability: as for ``write``. Default ``"none"``.

    Returns:
        A ``Transfer``. Its ``result()`` waits, and returns the number of bytes.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        TypeError, ValueError: as from ``write``. Failures of the transfer itself are raised by ``Transfer.result``.

    Example:
        >>> transfer = deepnvme.start_write(torch.ones(1024), "weights.bin")
        >>> transfer.result()
        4096
    """

def read_batch(items: Iterable[tuple[_Path, int, _Tensor]]) -> int:
    """Read many tensors as one request, and wait for them.

    Adjacent ranges of a file are merged into large ops. Thousands of small tensors are then about as fast as one
    tensor of the same size.

    Args:
        items: tuples ``(path, offset, tensor)``, each as for ``read``; offsets are in bytes.

    Returns:
        The number of bytes of all tensors.

    Raises:
        TypeError, ValueError: an item is invalid (the message says which), or two tensors share memory.
        deepnvme.Error: as from ``read``; ``filename`` and ``offset`` say where.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.write(tensor, "weights.bin")
        4096
        >>> deepnvme.read_batch([("weights.bin", 0, tensor[:512]), ("weights.bin", 2048, tensor[512:])])
        4096
    """

def write_batch(items: Iterable[tuple[_Path, int | None, _Tensor]], *, durability: _Durability = "none") -> int:
    """Write many tensors as one request, and wait for them.

    Args:
        items: tuples ``(path, offset, tensor)``. Offsets are in bytes, and are all given or all ``None``: with
            ``None``, every file becomes exactly its tensor.
        durability: as for ``write``, for all files. Default ``"none"``.

    Returns:
        The number of bytes of all tensors.

    Raises:
        TypeError, ValueError: an item is invalid, or two ranges overlap.
        deepnvme.Error: as from ``write``.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.write_batch([("parts.bin", 0, tensor[:512]), ("parts.bin", 2048, tensor[512:])])
        4096
    """

def start_read_batch(items: Iterable[tuple[_Path, int, _Tensor]]) -> Transfer:
    """Start a ``read_batch`` and return at once.

    Don't use the tensors until the transfer is done.

    Args:
        items: as for ``read_batch``.

    Returns:
        One ``Transfer`` for the whole batch.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        TypeError, ValueError: as from ``read_batch``. Failures of the transfer are raised by ``Transfer.result``.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.write(tensor, "weights.bin")
        4096
        >>> deepnvme.start_read_batch([("weights.bin", 0, tensor[:512])]).result()
        2048
    """

def start_write_batch(
    items: Iterable[tuple[_Path, int | None, _Tensor]], *, durability: _Durability = "none"
) -> Transfer:
    """Start a ``write_batch`` and return at once.

    Don't change the tensors until the transfer is done.

    Args:
        items: as for ``write_batch``.
        durability: as for ``write``, for all files. Default ``"none"``.

    Returns:
        One ``Transfer`` for the whole batch.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        TypeError, ValueError: as from ``write_batch``. Failures of the transfer are raised by ``Transfer.result``.

    Example:
        >>> tensor = torch.ones(1024)
        >>> deepnvme.start_write_batch([("a.bin", None, tensor), ("b.bin", None, tensor)]).result()
        8192
    """

def stats() -> Stats:
    """Return the engine's counters since it was created.

    Returns:
        A ``Stats`` of this moment. Later work does not change it.

    Example:
        >>> before = deepnvme.stats().requests
        >>> deepnvme.write(torch.ones(1024), "weights.bin")
        4096
        >>> deepnvme.stats().requests - before
        1
    """

def trace(path: _Name) -> Trace:
    """Record the engine's work during a ``with`` block, and write it to a file.

    The file appears complete when the block ends, even if the block raises. Several timelines may be recorded at
    once. Each has all events that end meanwhile, up to 262,144; further events are only counted. While none is
    recorded, this costs nothing.

    Args:
        path: output file: ``*.json`` for https://ui.perfetto.dev and ``chrome://tracing``, ``*.html`` for a
            self-contained page.

    Returns:
        A ``Trace``, which records while its ``with`` block runs.

    Raises:
        deepnvme.Error: the file cannot be written; raised when the block begins.
        ValueError: the suffix is unknown; raised when the block begins.

    Example:
        >>> with deepnvme.trace("timeline.html") as trace:
        ...     deepnvme.write(torch.ones(1024), "weights.bin")
        4096
        >>> trace.summary()["requests"] >= 1
        True
    """

def span(name: str, lane: str, start_ns: int, end_ns: int) -> None:
    """Add a bar, for example for computation or a wait, to the timelines that the engine records now.

    While no timeline is recorded, this does nothing.

    Args:
        name: label of the bar.
        lane: name of the band of the timeline; bars of the same lane share it.
        start_ns: start time, as ``time.monotonic_ns()`` gives it.
        end_ns: end time, on the same clock.

    Raises:
        ValueError: the bar ends before it starts.

    Example:
        >>> import time
        >>> with deepnvme.trace("timeline.json"):
        ...     started = time.monotonic_ns()
        ...     deepnvme.span("step 1", "training", started, time.monotonic_ns())
    """

def probe() -> Probe:
    """Report the backends that work on this machine, and the reason for the engine's choice.

    Returns:
        A ``Probe`` with a result for each backend.

    Example:
        >>> deepnvme.probe().threads.works
        True
    """

def _command_result(arguments: list[str]) -> tuple[str, str]: ...
def _python_command(arguments: list[str]) -> tuple[str, str] | None: ...
def _run_command(arguments: list[str]) -> int: ...
def _at_exit() -> None: ...
def _pinned_capsule(nbytes: int) -> object: ...
def _exchange_capture_mode(mode: int) -> int | None: ...
def _call_with_params(
    groups: Sequence[dict[str, Any]], params: Sequence[list[Any]], function: Callable[[], Any]
) -> Any: ...

@final
class _StoredTensor: ...

def _packed_tensors(reader: _CheckpointReader, file: int) -> list[tuple[str, str, list[int], _StoredTensor]]: ...

# Parts of a stored tensor (first byte, bytes), or of a file (index, offset, bytes, type).
_StoredRange: TypeAlias = tuple[_StoredTensor, int, int] | tuple[int, int, int, str]
_RowLocations: TypeAlias = tuple[int, int] | list[list[tuple[int, int, int]]] | tuple[list[_StoredRange], str]

@final
class _Streamer:
    def __new__(
        cls,
        files: Sequence[str | StripeSet],
        groups: list[tuple[int, list[tuple[int, int, int, int]]]],
        classes: list[tuple[int, int, int, bool]],
        arena: _Tensor,
        engine: Engine | None,
        conversions: list[list[tuple[_StoredRange, int, str]]] | None = None,
        cache_bytes_max: int = 0,
    ) -> Self: ...
    @property
    def conversion_bytes_max(self) -> int: ...
    @property
    def cache_bytes(self) -> int: ...
    def warm_up(self) -> None: ...
    def acquire(self, group: int) -> int: ...
    def release(self, group: int, stream: torch.cuda.Stream | None = None) -> bool: ...
    def stats(self) -> dict[str, float]: ...
    def close(self) -> None: ...

def _parse_bytes(value: object, name: str) -> int: ...
def _row_page_bytes(row_bytes: int) -> int: ...
def _sees_used_pages() -> bool: ...
def _cacheable_bytes(conversions: list[list[tuple[_StoredRange, int, str]]]) -> tuple[int, int]: ...

@final
class _SparseRowCache:
    def __new__(
        cls,
        files: Sequence[str | StripeSet],
        tensors: list[tuple[int, int, int, int, int, _RowLocations]],
        nbytes: int,
        bytes_max: int,
        engine: Engine | None,
    ) -> Self: ...
    def capsule(self) -> object: ...
    def acquire(self, rows: list[int]) -> None: ...
    def was_missing_row_used(self, row: int) -> bool: ...
    def release(self, rows: list[int]) -> None: ...
    def stats(self) -> dict[str, float]: ...

@final
class _RowStore:
    def __new__(
        cls,
        files: Sequence[_Path | _CheckpointReader],
        rows: tuple[Sequence[tuple[int, int, int]], int] | tuple[str, tuple[_Place, _Place | None, _Place | None]],
        scales: tuple[tuple[int, int] | tuple[Sequence[tuple[int, int, int]], int], str] | None,
        memory_bytes: int,
        engine: Engine | None,
    ) -> Self: ...
    def gather(
        self, wanted: tuple[_Tensor, tuple[bool, int], _Tensor, tuple[str, str, float | None] | None]
    ) -> None: ...
    def start_gather(
        self, wanted: tuple[_Tensor, tuple[bool, int], _Tensor, tuple[str, str, float | None] | None]
    ) -> _Gather: ...
    def prefetch(self, ids: _Tensor, id_type: tuple[bool, int], deadline_s: float | None) -> None: ...
    def keep(self, ids: _Tensor, id_type: tuple[bool, int]) -> None: ...
    def verify(self) -> int: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

@final
class _Gather:
    def wait(self, timeout: float | None = None) -> bool: ...
    def is_done(self) -> bool: ...
    def cancel(self) -> None: ...

@final
class _Swapper:
    def __new__(
        cls,
        folders: Sequence[str | bytes | PathLike[str]],
        memory_bytes: int,
        prefetch_bytes: int | None,
        headroom_bytes: int | None,
        checksums: bool,
        named: bool,
        stripe_bytes: int | None,
        engine: Engine | None,
    ) -> Self: ...
    @property
    def pinning_error(self) -> str | None: ...
    @property
    def is_closed(self) -> bool: ...
    def check_open(self) -> None: ...
    def capsule(self) -> object: ...
    def create(self, key: str, nbytes: int) -> _Borrowed: ...
    def borrow(self, key: str, exclusive: bool) -> _Borrowed: ...
    def access(self, key: str, exclusive: bool) -> _Borrowed: ...
    def prefetch(self, keys: list[str]) -> None: ...
    def schedule(self, keys: list[str], repeat: bool) -> None: ...
    def delete(self, key: str) -> None: ...
    def flush(self, keys: list[str] | None = None) -> None: ...
    def attach(
        self, key: str, path: str | StripeSet, file_range: tuple[int, int], element_bytes: int, label: str
    ) -> None: ...
    def extents(self, key: str) -> list[tuple[str, int, int, int]]: ...
    def export(self, key: str, fd: int, offset: int) -> dict[str, int]: ...
    def import_(self, key: str, fd: int, offset: int, nbytes: int, label: str) -> dict[str, int]: ...
    def contains(self, key: str) -> bool: ...
    def keys(self) -> list[str]: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

@disjoint_base
class _SavedHooksScope:
    def __new__(cls, *arguments: Any, **options: Any) -> Self: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...

@disjoint_base
class _BorrowScope:
    def __new__(cls, *arguments: Any, **options: Any) -> Self: ...
    _held: _Borrowed | None
    _filled: str | None
    _lent: tuple[str, object, int] | None
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
    def _release(self) -> None: ...

@final
class _Borrowed:
    @property
    def label(self) -> str: ...
    @property
    def offset(self) -> int | None: ...
    @property
    def nbytes(self) -> int: ...
    def mark_clean(self) -> None: ...
    def mark_dirty(self) -> None: ...
    def read_at(self, start: int, tensor: _Tensor) -> None: ...
    def write_at(self, start: int, tensor: _Tensor) -> None: ...
    def release(self) -> None: ...
    def commit(self, label: str) -> None: ...

@final
class _DevicePin:
    @property
    def refusal(self) -> str | None: ...

def _pin_device(engine: Engine, tensor: torch.Tensor) -> _DevicePin: ...

_Moment: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# Weights, gradient, moments, copy of the weights, position of the first element.
_Part: TypeAlias = tuple[torch.Tensor, torch.Tensor, Sequence[_Moment], torch.Tensor | None, int]

@final
class StepRecord:
    """The parameter slices that a step has changed, by the position of their first element, and the counted parameters."""

    def __new__(cls) -> Self: ...
    def __contains__(self, first_index: int, /) -> bool: ...
    def __len__(self) -> int: ...
    def count_of(self, number: int) -> int | None:
        """Return the step count of a parameter, by its number; None if this step is not counted yet."""
    def note_count(self, number: int, count: int) -> None:
        """Note the step count of a parameter."""
    @property
    def is_empty(self) -> bool:
        """Whether nothing was changed or counted yet."""

@final
class StepPlan:
    """Remember the parameters of all param groups, and where their state is.

    ``groups`` has their parameters. ``places`` has the number of each one and the position of its first element.
    ``names`` has the moments of each group in the kernel's order, each followed by its scales if it has some.
    ``moments`` is their format. With ``in_memory``, the state is in the optimizer's own ``state``; otherwise it is in
    memory that is passed to ``Kernel.update``.
    """

    def __new__(
        cls,
        groups: Sequence[Sequence[torch.Tensor]],
        places: Sequence[Sequence[tuple[int, int]]],
        names: Sequence[Sequence[str]],
        *,
        moments: str,
        in_memory: bool,
    ) -> Self: ...
    def is_of(self, groups: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Whether the plan is of these parameters in this order."""
    def prepare(self, group: int, members: Sequence[int], counts: Sequence[int | None]) -> None:
        """Note that the state of members of a group is initialised. ``counts`` has the number of the next step of each, or
        None if its state counts steps.
        """
    def set_batches(self, group: int, batches: Sequence[Sequence[tuple[int, int, int, Sequence[int]]]]) -> None:
        """Set where the state of a group is. A batch has placements ``(member, begin, end, offsets)``: elements of a
        member, and the first byte of each kind of their state in the memory of the batch.
        """

@final
class StepGradients:
    """The gradients of one step that it can use as they are in memory; ``indirect`` lists the others.

    They stay alive until ``release``. Then only weak references are left, for ``is_same``.
    """

    def __new__(cls, plan: StepPlan, state: dict[torch.Tensor, Any]) -> Self: ...
    @property
    def indirect(self) -> list[list[int]]:
        """Members of each group whose gradients a step cannot use as they are in memory."""
    @property
    def counts(self) -> list[int]:
        """The number of the others in each group."""
    def stale(self, group: int) -> list[int]:
        """List the members of a group whose gradients were noted, but whose state is not known to be initialised."""
    def is_due(self, group: int, batch: int, record: StepRecord) -> bool:
        """Whether a batch has elements that this step is yet to change."""
    def refresh(self, state: dict[torch.Tensor, Any]) -> None:
        """Look up the state of all parameters again."""
    def is_same(self) -> bool:
        """Whether all gradients that still exist are the ones that were noted, and unchanged."""
    def release(self) -> None:
        """Stop keeping gradients alive."""

@final
class Kernel:
    """Run optimizer steps on threads, for :class:`deepnvme.optim.AdamW` and the others.

    ``sqrt_mode`` selects the rounding of square roots: ``"exact"``, or torch's own rounding on some CPUs,
    ``"two-step"``, ``"two-step-fused"`` and ``"one-step"``. ``threads=0`` starts one thread per CPU.
    """

    def __new__(cls, *, threads: int = 0, sqrt_mode: str = "exact") -> Self: ...
    @property
    def threads(self) -> int:
        """The number of threads."""
    @property
    def sqrt_mode(self) -> str:
        """The rounding of square roots."""
    @staticmethod
    def sqrt_modes() -> list[str]:
        """The roundings that this CPU supports."""
    def sqrt_(self, tensor: torch.Tensor) -> None:
        """Take the square roots of an fp32 tensor in place, as a step does."""
    def step(
        self,
        algorithm: str,
        settings: dict[str, float],
        parts: Sequence[_Part],
        *,
        step: int,
        unscale: float = 1.0,
        clip: float = 1.0,
        stochastic: bool = False,
        seed: int = 0,
        record: StepRecord | None = None,
    ) -> None:
        """Run one step of an algorithm: ``"adam"``, ``"adamw"``, ``"lion"``, ``"sgd"`` or ``"adagrad"``.

        A part is ``(weights, grad, moments, out, index)``. The step changes ``weights`` and ``moments``, and copies the
        new weights to ``out`` unless it is None. Weights and gradients are fp32, bf16 or fp16. A moment is an fp32 or
        bf16 tensor, or a pair of codes (uint8) and scales (fp32, one per 128 codes). ``index`` is the position of the
        first element, for stochastic rounding. ``record`` receives the positions of all parts as soon as they are
        changed. No Python signal is handled between the two.
        """
    def update(
        self,
        gradients: StepGradients,
        group: int,
        algorithm: str,
        settings: dict[str, float],
        *,
        unscale: float,
        clip: float,
        stochastic: bool,
        seed: int,
        record: StepRecord,
        batch: tuple[int, torch.Tensor | None] | None = None,
    ) -> list[int]:
        """Run one step for all gradients of a param group, or for those in one ``batch``: its number, and the memory that
        has its state.

        Steps are counted in the state. Members whose state is not initialised, or does not fit, are left as they are.
        Returns them. ``record`` receives everything else as soon as it is changed and counted. No Python signal is
        handled between the two. Members in the record are not changed again.
        """
    @staticmethod
    def unpack(moment: _Moment, out: torch.Tensor, squares: bool) -> None:
        """Decode a moment into an fp32 tensor. Pass ``squares`` for a second moment, which is unsigned."""
    @staticmethod
    def pack(values: torch.Tensor, moment: _Moment, squares: bool) -> None:
        """Encode an fp32 tensor as a moment, rounding to nearest. A tensor from ``unpack`` is encoded exactly."""
    def accumulate(self, sum: torch.Tensor, new: torch.Tensor) -> None:
        """Add ``new`` to ``sum`` in fp32, rounded to the type of ``sum``."""
    def measure_all(
        self, gradients: StepGradients, others: Sequence[tuple[int, int, torch.Tensor]], unscale: float
    ) -> tuple[float, bool]:
        """As ``measure``, for all gradients of a step: those that were gathered, and ``others``, which are
        ``(group, member, gradient)``.
        """
    def measure(self, grads: Sequence[torch.Tensor], *, unscale: float = 1.0) -> tuple[float, bool]:
        """Sum the squares of all elements, each multiplied by ``unscale``. Returns the sum, and whether all are finite."""
