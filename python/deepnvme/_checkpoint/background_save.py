"""Saves that go on by themselves: one after the other, and what went wrong with them."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeAlias

from deepnvme.errors import Error

# What a file that was saved has: its size, and where its index is, how long, and of which sum.
SaveResult: TypeAlias = tuple[int, int, int, int]

# How often whoever waits looks for Ctrl-C.
_SLICE_S = 0.05


class RunningSave(Protocol):
    """A save that is under way, of this process or of several."""

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes written, and in all."""

    def wait_filled(self) -> None:
        """Wait until the tensors may change."""

    def wait(self, progress: Any, stop_on_signal: bool) -> SaveResult:
        """Wait until it is over."""

    def stop(self) -> None:
        """Have it end soon, with an exception."""


class SignalSafeEvent:
    """Something to wait for, also in a signal handler that interrupted a wait for it.

    An ``Event`` has a lock that its waiter holds for moments: a handler in such a moment would wait for ever.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let everybody go on. Once is enough."""
        if not self.is_set:
            self.is_set = True
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for at most so long; whether it is open."""
        if not self.is_set and self._lock.acquire(timeout=seconds):
            self._lock.release()
        return self.is_set


class BackgroundSaves:
    """The saves that are under way: one, or more where a signal handler saves during a save."""

    def __init__(self) -> None:
        self._running: list[_BackgroundSave] = []
        self._failures: deque[BaseException] = deque()

    def start(self, saving: RunningSave, on_done: Callable[[SaveResult], None]) -> None:
        """Have somebody wait for a save, and call ``on_done`` when the file is on the disk."""
        current = _BackgroundSave(saving, on_done, self._failures.append)
        with self._abandon_on_error(current):
            current.start()
            self._running.append(current)
            self._drop_finished()

    @property
    def holds_tensors(self) -> bool:
        """Whether tensors may be read still."""
        return any(not current.is_filled for current in self._running)

    def wait_for_tensors(self) -> None:
        """Wait until the tensors may change."""
        for current in list(self._running):
            current.wait_filled()

    def wait_for_copies(self) -> None:
        """Wait until the tensors of the last save have been copied; where that is interrupted, there is no save."""
        current = self._last
        if current is not None:
            with self._abandon_on_error(current):
                current.wait_filled()

    def wait_with_progress(self, report: Callable[[int, int], object] | None) -> None:
        """Wait until the last save is over, and say how far it is; where that is interrupted, there is no save."""
        current = self._last
        if current is not None:
            with self._abandon_on_error(current):
                while current.is_running:
                    current.join(_SLICE_S)
                    if report is not None:
                        report(*current.saving.progress)
        self._drop_finished()
        self.raise_failure()

    @property
    def _last(self) -> _BackgroundSave | None:
        return self._running[-1] if self._running else None

    @contextmanager
    def _abandon_on_error(self, current: _BackgroundSave) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Whoever made the call may change the tensors now, and has not been told of a save.
            current.abandon()
            self._drop_finished()
            raise

    @property
    def is_running(self) -> bool:
        """Whether a save is under way."""
        return any(current.is_running for current in self._running)

    def wait(self) -> None:
        """Wait until nothing is under way, and raise what went wrong."""
        while (current := next(iter(self._running), None)) is not None:
            current.join()
            self._drop_finished()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise what went wrong, once."""
        try:
            failed = self._failures.popleft()
        except IndexError:
            return
        raise failed

    def add_failure(self, error: BaseException) -> None:
        """Keep an error for the next call."""
        self._failures.append(error)

    def _drop_finished(self) -> None:
        # What is over refers to whoever saved, and would keep it from being freed.
        self._running[:] = [current for current in self._running if current.is_running]


class _BackgroundSave:
    def __init__(
        self, saving: RunningSave, on_done: Callable[[SaveResult], None], add_failure: Callable[[BaseException], None]
    ) -> None:
        self.saving = saving
        self.is_filled = False
        self._on_done: Callable[[SaveResult], None] | None = on_done
        self._add_failure = add_failure
        self._is_abandoned = False
        # Not a daemon: at the end of the program the save is finished.
        self._thread = threading.Thread(target=self._run, name="deepnvme-checkpointer")
        # A thread whose `join` was interrupted passes for dead before Python 3.13.
        self._finished = SignalSafeEvent()

    def start(self) -> None:
        """Start to wait."""
        try:
            self._thread.start()
        except RuntimeError as error:
            text = f"start a thread: {error}; raise the limit on threads (`ulimit -u`, or `pids.max` of the container)"
            raise Error(errno.EAGAIN, f"{text}, or save with async_=False") from error

    def _run(self) -> None:
        # Whoever saves is not kept alive by a save that is over.
        on_done, self._on_done = self._on_done, None
        try:
            assert on_done is not None
            on_done(self.saving.wait(None, False))
        except BaseException as error:  # noqa: BLE001
            if not self._is_abandoned:
                self._add_failure(error)
        finally:
            self.is_filled = True
            self._finished.set()

    @property
    def is_running(self) -> bool:
        """Whether it is not over yet."""
        return not self._finished.is_set

    def wait_filled(self) -> None:
        """Wait until the tensors may change."""
        if not self.is_filled:
            self.saving.wait_filled()
            self.is_filled = True

    def abandon(self) -> None:
        """Stop it, and have nobody told."""
        self._is_abandoned = True
        self.saving.stop()
        if self._thread.ident is not None:
            self.join()
            return
        # There was no thread to be had; the file is not written to any more when this returns.
        with suppress(Exception):
            self.saving.wait(None, False)

    def join(self, seconds: float | None = None) -> None:
        """Wait until it is over, or so long."""
        if seconds is not None:
            self._finished.wait(seconds)
            return
        # A wait without end would not be woken by Ctrl-C.
        while not self._finished.wait(_SLICE_S):
            pass
