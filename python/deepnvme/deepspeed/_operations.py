"""The operations of one handle: submitted, counted, waited for.

`start` never waits for `wait`: the lock guards two lists and is never held during I/O. Every operation is counted by
exactly one `wait`, but a `wait` also stays until the operations that another thread is waiting for are done, since the
caller's own may be among them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from typing import Literal

import torch

import deepnvme
from deepnvme._deepnvme import _pin_device

from . import _engine_pool
from ._arguments import Name
from ._byte_ranges import ByteRanges


class Operation:
    """One transfer in flight, and what is still to be checked when it is done."""

    __slots__ = ("_check", "_pending", "file")

    def __init__(self, pending: deepnvme.Pending, file: Hashable, check: Callable[[], None] | None) -> None:
        self._pending = pending
        self._check = check
        self.file = file

    def wait_quietly(self) -> None:
        """Waits until the bytes have been moved or not; says nothing about which."""
        with suppress(Exception):
            self._pending.wait()

    def finish(self) -> None:
        """Waits, and raises what went wrong."""
        self._pending.wait()
        if self._check is not None:
            self._check()

    def failure(self) -> Exception | None:
        """Waits, and returns what went wrong."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - whatever it is, it waits until the other operations are done
            # Without the frames, which would hold the list that this goes to, and all operations.
            return error.with_traceback(None)
        return None


class Batch:
    """Operations that the same `wait` counts."""

    __slots__ = ("operations", "ranges")

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.ranges = ByteRanges()


class Operations:
    """The operations of one handle and, from the first one on, the engine that carries them out."""

    def __init__(self, settings: _engine_pool.EngineSettings) -> None:
        self._settings = settings
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._engine: deepnvme.Engine | None = None
        # Batches that no `wait` has taken yet (new operations join the last), and those being waited for.
        self._unclaimed = [Batch()]
        self._claimed: list[Batch] = []

    def start(
        self,
        kind: Literal["read", "write"],
        tensor: torch.Tensor,
        target: Name | int,
        offset: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Submits one transfer. What is wrong with the arguments is raised here, and nothing queued."""
        operation, end = self._submit(kind, tensor, target, offset, check)
        with self._lock:
            batch = self._unclaimed[-1]
            batch.operations.append(operation)
            batch.ranges.add(target, offset, end, writes=kind == "write")

    def run(
        self,
        kind: Literal["read", "write"],
        tensor: torch.Tensor,
        target: Name | int,
        offset: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Carries out one transfer, whatever else is pending, and raises what went wrong."""
        engine = self._borrowed_engine()
        self._await_overlapping(target, offset, offset + tensor.nbytes, writes=kind == "write")
        # Waited for at once, a small transfer is made by this very thread, which no `start` and `wait` can match.
        transfer = engine.write if kind == "write" else engine.read
        transfer(tensor, target, offset)
        if check is not None:
            check()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is pending, so that a `wait` would find nothing to wait for or to count."""
        return not self._claimed and not any(batch.operations for batch in self._unclaimed)

    def wait(self) -> int:
        """Waits for everything submitted so far; the number of operations that no other `wait` has counted.

        Raises the first error, in the order of submission, once all are done; the count starts at zero again.
        Interrupted by `KeyboardInterrupt`, it has counted nothing.
        """
        count, failure = self._await_all()
        if failure is not None:
            try:
                raise failure
            finally:
                # The exception holds this frame, and must not be held by it.
                del failure
        return count

    def close(self) -> None:
        """Finishes what is pending and returns the engine; raises the first error that no `wait` has seen."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if os.getpid() != self._process:
            _engine_pool.leak_inherited((engine, self._unclaimed, self._claimed))
            return
        try:
            self.wait()
        finally:
            _engine_pool.pool.release(self._settings, engine)

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
        return sum(len(batch.operations) for batch in mine), failure

    def _submit(
        self,
        kind: Literal["read", "write"],
        tensor: torch.Tensor,
        target: Name | int,
        offset: int,
        check: Callable[[], None] | None,
    ) -> tuple[Operation, int]:
        engine = self._borrowed_engine()
        end = offset + tensor.nbytes
        self._await_overlapping(target, offset, end, writes=kind == "write")
        # A detached alias keeps this memory alive even when the caller points `tensor.data` elsewhere meanwhile.
        memory = tensor.detach()
        submit = engine.start_write if kind == "write" else engine.start_read
        return Operation(submit(memory, target, offset), target, check), end

    def pin(self, tensor: torch.Tensor) -> object:
        """Registers contiguous memory of a GPU with cuFile until the answer is dropped; does not keep the tensor."""
        return _pin_device(self._borrowed_engine(), tensor)

    def _borrowed_engine(self) -> deepnvme.Engine:
        self._check_process()
        engine = self._engine
        if engine is not None:
            return engine
        with self._lock:
            if self._engine is None:
                self._engine = _engine_pool.pool.acquire(self._settings)
            return self._engine

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            msg = (
                f"this handle belongs to process {self._process}, and a fork does not copy its threads; "
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
            operation.wait_quietly()
        with self._lock:
            for batch in batches:
                batch.ranges.forget(file)


def first_failure(operations: Iterable[Operation]) -> Exception | None:
    """Waits for all operations, in order; what went wrong first."""
    failures = [operation.failure() for operation in operations]
    return next((failure for failure in failures if failure is not None), None)
