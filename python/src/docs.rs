//! Documentation of the functions that exist twice: as a method of `Engine`, and in the package, on the default engine.
//!
//! Python shows these texts in `help`, and `scripts/stubs.py` copies them into the stub file.

/// Expand to the documentation of a function.
macro_rules! docs {
    (read) => {
        r#"Read ``tensor.nbytes`` bytes of a file into a tensor, and wait for them.

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
    4096"#
    };
    (write) => {
        r#"Write the bytes of a tensor to a file, and wait for them.

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
    4096"#
    };
    (start_read) => {
        r#"Start a ``read`` and return at once, whatever the size.

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
    4096"#
    };
    (start_write) => {
        r#"Start a ``write`` and return at once, whatever the size.

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
    4096"#
    };
    (read_batch) => {
        r#"Read many tensors as one request, and wait for them.

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
    4096"#
    };
    (write_batch) => {
        r#"Write many tensors as one request, and wait for them.

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
    4096"#
    };
    (start_read_batch) => {
        r#"Start a ``read_batch`` and return at once.

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
    2048"#
    };
    (start_write_batch) => {
        r#"Start a ``write_batch`` and return at once.

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
    8192"#
    };
    (stats) => {
        r#"Return the engine's counters since it was created.

Returns:
    A ``Stats`` of this moment. Later work does not change it.

Example:
    >>> before = deepnvme.stats().requests
    >>> deepnvme.write(torch.ones(1024), "weights.bin")
    4096
    >>> deepnvme.stats().requests - before
    1"#
    };
    (trace) => {
        r#"Record the engine's work during a ``with`` block, and write it to a file.

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
    True"#
    };
    (span) => {
        r#"Add a bar, for example for computation or a wait, to the timelines that the engine records now.

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
    ...     deepnvme.span("step 1", "training", started, time.monotonic_ns())"#
    };
    (probe) => {
        r#"Report the backends that work on this machine, and the reason for the engine's choice.

Returns:
    A ``Probe`` with a result for each backend.

Example:
    >>> deepnvme.probe().threads.works
    True"#
    };
}
pub(crate) use docs;
