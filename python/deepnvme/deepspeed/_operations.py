"""Operations of one handle: submitted to an engine from a pool, counted, and waited for in the order of their bytes.

`start` never waits for `wait`: the lock guards two lists and the engine. It is held while the engine is created and
while a transfer is submitted, and never during a transfer. Exactly one `wait` counts each operation. A `wait` also
waits for operations that another thread is waiting for, since they may include the caller's.

DeepSpeed runs the operations of a handle one after another. Here they run concurrently. The difference shows only where
one operation accesses bytes that another one writes, so those keep the order of submission.

Programs create handles often, but an engine owns threads, a kernel queue and bounce memory. So a handle costs nothing
until its first transfer. Then it takes an engine with its settings for exclusive use, so that handles never queue
behind one another. When the handle is dropped, its engine waits in a small pool for the next one.
"""

from __future__ import annotations

import atexit
import os
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable
from itertools import starmap
from typing import Literal, NamedTuple

import torch

from deepnvme._deepnvme import Engine, Transfer, _pin_device
from deepnvme._utils.interrupts import is_of_handler, make_lock

from ._checks import Name

BLOCK_BYTES_MIN = 4 << 10
BLOCK_BYTES_MAX = 64 << 20
QUEUE_DEPTH_MAX = 4096
WORKERS_MAX = 64
# Bounce memory of one engine: enough to saturate a device. Only unaligned transfers use it.
POOL_BYTES_MAX = 32 << 20
# Idle engines to keep, each with different settings. A program rarely uses more than two settings.
IDLE_MAX = 2


class Request(NamedTuple):
    """One transfer to make, and the check to run when it is done."""

    kind: Literal["read", "write"]
    tensor: torch.Tensor
    target: Name | int
    offset: int
    check: Callable[[], None] | None = None

    @property
    def is_write(self) -> bool:
        """Whether it writes to the file."""
        return self.kind == "write"


class Operation:
    """One transfer, and the check to run when it is done. Without its transfer, it counts as never made."""

    __slots__ = ("_check", "_failure", "_lock", "_transfers", "file")

    def __init__(self, file: Hashable, check: Callable[[], None] | None) -> None:
        self._transfers: list[Transfer] = []
        self._check = check
        self._failure: Exception | None = None
        # Held during the check, so that nobody changes the bytes meanwhile.
        self._lock = None if check is None else make_lock()
        self.file = file

    def submit(self, start: Callable[..., Transfer], *arguments: object) -> None:
        """Start the transfer. An interrupt comes before it or after it: no transfer goes on that is not counted."""
        # One native call starts it and keeps it. Python handles signals between calls only.
        self._transfers.extend(starmap(start, (arguments,)))

    @property
    def is_started(self) -> bool:
        """Whether it has its transfer."""
        return bool(self._transfers)

    def settle(self) -> None:
        """Wait until the transfer has ended, and check it, before its bytes change. Its error is kept."""
        try:
            self._finish()
        except Exception as error:  # `failure` reports it
            if is_of_handler(error):
                raise

    def failure(self) -> Exception | None:
        """Wait, and return the error."""
        try:
            self._finish()
        except Exception as error:  # whatever it is, it waits until the other operations are done
            if is_of_handler(error):
                raise
            # Without frames, which would keep this list and all operations alive.
            return error.with_traceback(None)
        return self._failure

    def _finish(self) -> None:
        for transfer in self._transfers:
            transfer.result()
            self._run_check()

    def _run_check(self) -> None:
        """Run the check, once."""
        if self._lock is None:
            return
        with self._lock:
            if self._check is None:
                return
            try:
                self._check()
            except Exception as error:  # as above
                if is_of_handler(error):
                    raise
                self._failure = error.with_traceback(None)
            self._check = None


class Batch:
    """Operations that the same `wait` counts."""

    __slots__ = ("operations", "ranges")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.ranges = ByteRanges()


class Operations:
    """The operations of one handle, and its engine from the first operation on."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._process = os.getpid()
        self._lock = make_lock()
        self._engine: Engine | None = None
        # Batches that no `wait` has taken yet (new operations join the last), and those being waited for.
        self._unclaimed = [Batch()]
        self._claimed: list[Batch] = []

    def start(self, request: Request) -> None:
        """Submit one transfer. Invalid arguments raise here, and nothing is queued."""
        engine = self._borrowed_engine()
        target, offset = request.target, request.offset
        end = offset + request.tensor.nbytes
        self._await_overlapping(target, offset, end, writes=request.is_write)
        # A detached alias keeps this memory alive even if the caller reassigns `tensor.data`.
        memory = request.tensor.detach()
        operation = Operation(target, request.check)
        with self._lock:
            batch = self._unclaimed[-1]
            batch.operations.append(operation)
            batch.ranges.add(target, offset, end, writes=request.is_write)
            operation.submit(engine.start_write if request.is_write else engine.start_read, memory, target, offset)

    def run(self, request: Request) -> None:
        """Run one transfer, whatever else is pending, and raise its error."""
        engine = self._borrowed_engine()
        end = request.offset + request.tensor.nbytes
        self._await_overlapping(request.target, request.offset, end, writes=request.is_write)
        # A small blocking transfer runs on this thread, which is faster than `start` and `wait`.
        transfer = engine.write if request.is_write else engine.read
        transfer(request.tensor, request.target, request.offset)
        if request.check is not None:
            request.check()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, so that a `wait` would return 0 at once."""
        operations = (operation for batch in self._unclaimed for operation in batch.operations)
        return not self._claimed and not any(operation.is_started for operation in operations)

    def wait(self) -> int:
        """Wait for everything submitted so far. Return the number of operations that no other `wait` has counted.

        Raises the first error, in order of submission, once all are done. The count restarts at zero. A wait that is
        interrupted by `KeyboardInterrupt` counts nothing.
        """
        count, failure = self._await_all()
        if failure is not None:
            try:
                raise failure
            finally:
                # The exception refers to this frame, so the frame must not refer to it.
                del failure
        return count

    def close(self) -> None:
        """Finish pending operations and return the engine. Raises the first error that no `wait` has raised."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if os.getpid() != self._process:
            leak_inherited((engine, self._unclaimed, self._claimed))
            return
        try:
            self.wait()
        finally:
            pool.release(self._settings, engine)

    def _await_all(self) -> tuple[int, Exception | None]:
        self._check_process()
        with self._lock:
            mine, self._unclaimed = self._unclaimed, [Batch()]
            self._claimed.extend(mine)
            batches = list(self._claimed)
        counted = False
        try:
            failure = first_failure(operation for batch in batches for operation in batch.operations)
            counted = True
        finally:
            with self._lock:
                self._claimed = [batch for batch in self._claimed if batch not in mine]
                if not counted:
                    self._unclaimed = mine + self._unclaimed
        return sum(operation.is_started for batch in mine for operation in batch.operations), failure

    def pin(self, tensor: torch.Tensor) -> object:
        """Register contiguous GPU memory with cuFile until the result is dropped. Does not keep the tensor alive."""
        return _pin_device(self._borrowed_engine(), tensor)

    def _borrowed_engine(self) -> Engine:
        self._check_process()
        engine = self._engine
        if engine is not None:
            return engine
        with self._lock:
            if self._engine is None:
                self._engine = pool.acquire(self._settings)
            return self._engine

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            msg = (
                f"this handle belongs to process {self._process}, and its threads do not survive a fork; "
                f"make a new handle in process {os.getpid()}"
            )
            raise RuntimeError(msg)

    def _await_overlapping(self, file: Hashable, start: int, end: int, *, writes: bool) -> None:
        if self.is_idle:
            return
        with self._lock:
            batches = [
                batch
                for batch in (*self._claimed, *self._unclaimed)
                if batch.ranges.conflicts(file, start, end, writes=writes)
            ]
            earlier = [operation for batch in batches for operation in batch.operations if operation.file == file]
        if not earlier:
            return
        for operation in earlier:
            operation.settle()
        done = {id(operation) for operation in earlier}
        with self._lock:
            for batch in batches:
                # Another thread may have added one meanwhile, which is in flight.
                if all(id(one) in done for one in batch.operations if one.file == file):
                    batch.ranges.forget(file)


def first_failure(operations: Iterable[Operation]) -> Exception | None:
    """Wait for all operations in order. Return the first error."""
    failures = [operation.failure() for operation in operations]
    return next((failure for failure in failures if failure is not None), None)


class _FileRanges:
    """The ranges of one file: written ones, disjoint and sorted, and the hull of those read."""

    __slots__ = ("read_end", "read_start", "write_ends", "write_starts")

    def __init__(self) -> None:
        self.write_starts: list[int] = []
        self.write_ends: list[int] = []
        self.read_start = 0
        self.read_end = 0

    def overlaps_write(self, start: int, end: int) -> bool:
        # Disjoint and sorted, so only the last one that starts before `end` can extend beyond `start`.
        index = bisect_left(self.write_starts, end)
        return index > 0 and self.write_ends[index - 1] > start

    def overlaps_read(self, start: int, end: int) -> bool:
        return self.read_start < end and start < self.read_end


class ByteRanges:
    """The byte ranges that a set of pending operations reads and writes."""

    __slots__ = ("_files",)

    def __init__(self) -> None:
        self._files: dict[Hashable, _FileRanges] = {}

    def conflicts(self, file: Hashable, start: int, end: int, *, writes: bool) -> bool:
        """Whether an operation on these bytes must wait for the set. Reads do not wait for reads."""
        ranges = self._files.get(file)
        if ranges is None or start >= end:
            return False
        return ranges.overlaps_write(start, end) or (writes and ranges.overlaps_read(start, end))

    def add(self, file: Hashable, start: int, end: int, *, writes: bool) -> None:
        """Record an operation that conflicts with none of the set."""
        if start >= end:
            return
        ranges = self._files.setdefault(file, _FileRanges())
        if writes:
            insort(ranges.write_starts, start)
            insort(ranges.write_ends, end)
        elif ranges.read_start == ranges.read_end:
            ranges.read_start, ranges.read_end = start, end
        else:
            ranges.read_start = min(ranges.read_start, start)
            ranges.read_end = max(ranges.read_end, end)

    def forget(self, file: Hashable) -> None:
        """Forget a file: all operations of the set on it are done."""
        self._files.pop(file, None)


class EngineSettings(NamedTuple):
    """Settings of an engine; the key of the pool."""

    workers: int
    queue_depth: int
    block_bytes: int
    submit: Literal["batch", "single"]
    gds: Literal["preferred", "disabled"] = "disabled"

    @classmethod
    def of(cls, *, block_size: int, queue_depth: int, single_submit: bool, intra_op_parallelism: int) -> EngineSettings:
        """Return the nearest settings that an engine accepts. All arguments are 1 or more."""
        whole_pages = -(-block_size // BLOCK_BYTES_MIN) * BLOCK_BYTES_MIN
        return cls(
            workers=min(intra_op_parallelism, WORKERS_MAX),
            queue_depth=min(queue_depth, QUEUE_DEPTH_MAX),
            block_bytes=min(whole_pages, BLOCK_BYTES_MAX),
            submit="single" if single_submit else "batch",
        )

    @property
    def pool_bytes(self) -> int:
        """Limit of the bounce memory: at least a block per worker, as an engine requires."""
        asked = self.workers * self.queue_depth * self.block_bytes
        return max(min(asked, POOL_BYTES_MAX), self.workers * self.block_bytes)


class EnginePool:
    """The idle engines. Methods may be called from any thread, and from finalisers at any time."""

    def __init__(self) -> None:
        # Re-entrant: a finaliser may release an engine while this thread is inside `acquire`.
        self._lock = make_lock()
        self._idle: dict[EngineSettings, Engine] = {}

    def acquire(self, settings: EngineSettings) -> Engine:
        """Return an engine with these settings for exclusive use."""
        with self._lock:
            engine = self._idle.pop(settings, None)
        if engine is not None:
            return engine
        return Engine(
            workers=settings.workers,
            queue_depth=settings.queue_depth,
            block_bytes=settings.block_bytes,
            submit=settings.submit,
            gds=settings.gds,
            pool_bytes=settings.pool_bytes,
        )

    def release(self, settings: EngineSettings, engine: Engine) -> None:
        """Keep an idle engine for the next handle, and close the oldest surplus ones."""
        surplus = []
        with self._lock:
            replaced = self._idle.pop(settings, None)
            if replaced is not None:
                surplus.append(replaced)
            self._idle[settings] = engine
            for key in list(self._idle)[:-IDLE_MAX]:
                oldest = self._idle.pop(key, None)
                if oldest is not None:
                    surplus.append(oldest)
        for unused in surplus:
            unused.close()

    def clear(self) -> None:
        """Close all idle engines."""
        with self._lock:
            idle = list(self._idle.values())
            self._idle.clear()
        for engine in idle:
            engine.close()

    def reset_after_fork(self) -> None:
        """Forget the parent's engines in a child process."""
        leak_inherited(self._idle)
        self._idle = {}


# Engines of the parent process. They are never dropped here, since their threads do not exist in this process.
_inherited: list[object] = []


def leak_inherited(inherited: object) -> None:
    """Keep an object inherited over a fork from being dropped."""
    _inherited.append(inherited)


pool = EnginePool()
os.register_at_fork(after_in_child=pool.reset_after_fork)
atexit.register(pool.clear)
