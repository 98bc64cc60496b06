"""Saves that run in the background, one after the other, their errors, and the waits of optimizers for them."""

from __future__ import annotations

import _thread
import errno
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from deepnvme._utils.interrupts import POLL_INTERVAL_S, SignalSafeEvent
from deepnvme.errors import CancelledError, ClosedError, Error

if TYPE_CHECKING:
    import torch

# Of a saved file: size in bytes, and offset, size and CRC-64 of its index.
SaveResult: TypeAlias = tuple[int, int, int, int]
Commit: TypeAlias = Callable[[SaveResult, Callable[[], None]], None]


class RunningSave(Protocol):
    """A running save, of one process or of several."""

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes written, and bytes in total."""

    def wait_filled(self) -> None:
        """Wait until the tensors have been read, and may change."""

    def wait(self, progress: Any, stop_on_signal: bool) -> SaveResult:
        """Wait until the save is over."""

    def stop(self) -> None:
        """Make the save end soon, with an exception."""

    def discard(self) -> None:
        """Delete the files of a save that is over, unless a manifest lists them."""


class BackgroundSaves:
    """The running saves: one, or several if a signal handler saves during a save."""

    def __init__(self) -> None:
        self._running: list[_BackgroundSave] = []
        self._failures: deque[BaseException] = deque()
        # How many saves were begun. From then on, each ends by itself, even after an error in `start`.
        self.begun = 0
        # Also at the end of the program, once its threads have ended.
        weakref.finalize(self, _report_unraised, self._failures, os.getpid())

    def start(self, saving: RunningSave, commit: Commit, *, waits_for_caller: bool = False) -> None:
        """Wait for a save in a thread of its own, and call ``commit`` once the file is on disk.

        Args:
            saving: the save.
            commit: gets its result, and a function that raises ``CancelledError`` if the save was abandoned.
            waits_for_caller: whether the commit waits until :meth:`wait_with_progress` has reported all bytes.
        """
        current = _BackgroundSave(saving, commit, self._failures.append, waits_for_caller=waits_for_caller)
        with self._abandon_on_error(current):
            self.begun += 1
            current.start()
            self._running.append(current)
            self._drop_finished()

    def abandon_waiting(self) -> None:
        """Abandon the saves whose commit waits for a caller. Ctrl-C may have come before that caller waited."""
        for current in list(self._running):
            if not current.may_commit:
                current.abandon()
        self._drop_finished()

    @property
    def holds_tensors(self) -> bool:
        """Whether a save may still read tensors."""
        return any(not current.are_tensors_read for current in self._running)

    def wait_all_read(self) -> None:
        """Wait until no save reads tensors any more: they may change then. An interrupt abandons no save."""
        for current in list(self._running):
            current.wait_read()

    def wait_last_read(self) -> None:
        """Wait until the last save has read its tensors. An interrupt abandons that save."""
        current = self._last
        if current is not None:
            with self._abandon_on_error(current):
                current.wait_read()

    def wait_with_progress(self, report: Callable[[int, int], object] | None) -> None:
        """Wait until the last save is over, and report its progress.

        An interrupt, or an error of ``report``, abandons the save.
        """
        current = self._last
        if current is not None:
            with self._abandon_on_error(current):
                while not current.is_written:
                    current.wait_written(POLL_INTERVAL_S)
                    if report is not None:
                        report(*current.saving.progress)
                current.allow_commit()
                current.join()
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
            # The caller sees an exception, so it may change the tensors now.
            current.abandon()
            self._drop_finished()
            raise

    @property
    def is_running(self) -> bool:
        """Whether a save is running."""
        return any(current.is_running for current in self._running)

    def wait(self) -> None:
        """Wait until no save is running, and raise the first error."""
        self.wait_over()
        self.raise_failure()

    def wait_over(self) -> None:
        """Wait until no save is running. Errors of saves are kept."""
        while (current := next(iter(self._running), None)) is not None:
            current.join()
            self._drop_finished()

    def check_process(self) -> None:
        """Raise ``ClosedError`` in a forked child if a save of the parent was running at the fork."""
        for current in list(self._running):
            if current.is_running:
                current.check_process()

    def raise_failure(self) -> None:
        """Raise the oldest error, once."""
        try:
            failed = self._failures.popleft()
        except IndexError:
            return
        raise failed

    def add_failure(self, error: BaseException) -> None:
        """Keep an error for the next call to raise."""
        self._failures.append(error)

    def _drop_finished(self) -> None:
        # Finished saves refer to the Checkpointer, and would keep it from being freed.
        self._running[:] = [current for current in self._running if current.is_running]


@contextmanager
def before_each_step(optimizers: tuple[torch.optim.Optimizer, ...], wait: Callable[[], None]) -> Iterator[None]:
    """Call ``wait`` before each step of these optimizers, and at the end of the block."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "register_step_pre_hook"):
            raise TypeError(f"overlap takes optimizers of torch, not {type(optimizer).__name__}")
    hooks = [optimizer.register_step_pre_hook(lambda *_: wait()) for optimizer in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        wait()


def _report_unraised(failures: deque[BaseException], process: int) -> None:
    """Print the errors that no call has raised."""
    if process == os.getpid() and sys.stderr is not None:
        for error in failures:
            sys.stderr.write(
                f"deepnvme: a background save has failed, and no later call has raised its error: {error}\n"
            )


class _BackgroundSave:
    def __init__(
        self,
        saving: RunningSave,
        commit: Commit,
        add_failure: Callable[[BaseException], None],
        *,
        waits_for_caller: bool,
    ) -> None:
        self.saving = saving
        self.are_tensors_read = False
        self._process = os.getpid()
        self._caller = threading.current_thread()
        self._commit: Commit | None = commit
        self._written = SignalSafeEvent()
        self._commit_allowed = SignalSafeEvent()
        if not waits_for_caller:
            self._commit_allowed.set()
        self._add_failure = add_failure
        self._is_abandoned = False
        # Before Python 3.13, a thread counts as dead after an interrupted `join`.
        self._finished = SignalSafeEvent()
        self._launched = SignalSafeEvent()
        # The thread that starts the thread of the save.
        self._starters: list[int] = []
        self._refusal: RuntimeError | None = None

    def start(self) -> None:
        """Start the thread. A program that is ending cannot, and saves here."""
        if not threading.main_thread().is_alive():
            self._run()
            return
        # `Thread.start` waits for its thread. Ctrl-C there leaves a lock that the thread needs. In another thread no
        # signal handler runs. `map` runs no bytecode between the call and the append, where one could.
        try:
            self._starters.extend(map(_thread.start_new_thread, [self._launch], [()]))
            while not self._launched.wait(POLL_INTERVAL_S):
                self.check_process()
            if self._refusal is not None:
                raise self._refusal
        except RuntimeError as error:
            text = f"start a thread: {error}; raise the limit on threads (`ulimit -u`, or `pids.max` of the container)"
            raise Error(errno.EAGAIN, f"{text}, or save with async_=False") from error

    def _launch(self) -> None:
        try:
            # Not a daemon, as this thread is: the program finishes the save before it exits.
            threading.Thread(target=self._run, name="deepnvme-checkpointer", daemon=False).start()
        except RuntimeError as error:
            self._refusal = error
        finally:
            self._launched.set()

    def _run(self) -> None:
        # The finished save does not keep the Checkpointer alive.
        commit, self._commit = self._commit, None
        try:
            assert commit is not None
            saved = self.saving.wait(None, False)
            self._written.set()
            while not self._commit_allowed.wait(POLL_INTERVAL_S):
                if not self._caller.is_alive():
                    # The calling thread ended without abandoning the save.
                    self._is_abandoned = True
                    break
            commit(saved, self._check_wanted)
        except BaseException as error:  # noqa: BLE001
            # Not later: an exception whose traceback refers to the save may live long.
            with suppress(Exception):
                self.saving.discard()
            if not self._is_abandoned:
                self._add_failure(error)
        finally:
            self.are_tensors_read = True
            self._written.set()
            self._finished.set()

    def _check_wanted(self) -> None:
        if self._is_abandoned:
            msg = "the call that saved was interrupted, or its progress function has failed"
            raise CancelledError(msg)

    @property
    def is_running(self) -> bool:
        """Whether the save is not over yet."""
        return not self._finished.is_set

    @property
    def is_written(self) -> bool:
        """Whether all bytes are in the file, or the save has failed."""
        return self._written.is_set

    def wait_written(self, seconds: float) -> None:
        """Wait until all bytes are in the file, or for this time."""
        self.check_process()
        self._written.wait(seconds)

    @property
    def may_commit(self) -> bool:
        """Whether the commit may begin."""
        return self._commit_allowed.is_set

    def allow_commit(self) -> None:
        """Let the commit begin."""
        self._commit_allowed.set()

    def check_process(self) -> None:
        """Raise ``ClosedError`` in a forked child."""
        if self._process != os.getpid():
            msg = "the save runs in the parent of this forked process, and never ends here"
            raise ClosedError(msg)

    def wait_read(self) -> None:
        """Wait until this save has read its tensors."""
        if not self.are_tensors_read:
            self.check_process()
            self.saving.wait_filled()
            self.are_tensors_read = True

    def abandon(self) -> None:
        """Stop the save, and keep no error. In a forked child, the parent's save goes on."""
        if self._process != os.getpid():
            return
        self._is_abandoned = True
        self.saving.stop()
        self._commit_allowed.set()
        while self._starters and not self._launched.wait(POLL_INTERVAL_S):
            pass
        if self._starters and self._refusal is None:
            self.join()
            return
        # The thread did not start. The file is no longer written to once this returns.
        with suppress(Exception):
            self.saving.wait(None, False)
        with suppress(Exception):
            self.saving.discard()

    def join(self) -> None:
        """Wait until the save is over."""
        # Ctrl-C would not interrupt a wait without a timeout.
        while not self._finished.wait(POLL_INTERVAL_S):
            self.check_process()
