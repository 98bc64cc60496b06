"""Saves that go on by themselves: one at a time, and what went wrong with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from deepnvme._checkpoint.names import tensors_of
from deepnvme._deepnvme import _SaveStaging

# What a file that was saved has: its size, and where its index is, how long, and of which sum.
Saved: TypeAlias = tuple[int, int, int, int]

# Of the memory that is available, the part that staging takes at the most, unless it is told.
_MEMORY_SHARE = 4
# What a file has besides its tensors.
_REST_BYTES = 4 << 20
# How often whoever waits looks for Ctrl-C.
_SLICE_S = 0.05


class Saving(Protocol):
    """A save that is under way, of this process or of several."""

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes written, and in all."""

    def wait_filled(self) -> None:
        """Wait until the tensors may change."""

    def wait(self, progress: Any, stop_on_signal: bool) -> Saved:
        """Wait until it is over."""

    def stop(self) -> None:
        """Have it end soon, with an exception."""


class Background:
    """The save that is under way, if there is one."""

    def __init__(self) -> None:
        self._current: _Current | None = None
        self._failed: BaseException | None = None

    def start(self, saving: Saving, then: Callable[[Saved], None]) -> None:
        """Have somebody wait for a save, and call ``then`` when the file has its name."""
        self._current = _Current(self, saving, then)
        with self._or_no_save():
            self._current.begin()

    @property
    def holds_tensors(self) -> bool:
        """Whether tensors may be read still."""
        return self._current is not None and not self._current.is_filled

    def wait_for_tensors(self) -> None:
        """Wait until the tensors may change."""
        if self._current is not None and not self._current.is_filled:
            self._current.saving.wait_filled()
            self._current.is_filled = True

    def wait_for_copies(self) -> None:
        """Wait until the tensors have been copied; where that is interrupted, there is no save."""
        with self._or_no_save():
            self.wait_for_tensors()

    def watch(self, tell: Callable[[int, int], object] | None) -> None:
        """Wait until the save is over, and say how far it is; where that is interrupted, there is no save."""
        with self._or_no_save():
            while self._current is not None and self._current.is_running:
                self._current.join(_SLICE_S)
                if tell is not None:
                    tell(*self._current.saving.progress)
        self.check()

    @contextmanager
    def _or_no_save(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Whoever made the call may change the tensors now, and has not been told of a save.
            if self._current is not None:
                self._current.saving.stop()
                self._current.join()
            self._failed = None
            raise

    def wait(self) -> None:
        """Wait until nothing is under way, and raise what went wrong."""
        if self._current is not None:
            self._current.join()
        self.check()

    def check(self) -> None:
        """Raise what went wrong, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def note_failure(self, error: BaseException) -> None:
        """Keep an error for the next call."""
        self._failed = error


class _Current:
    def __init__(self, owner: Background, saving: Saving, then: Callable[[Saved], None]) -> None:
        self.saving = saving
        self.is_filled = False
        self._owner = owner
        self._then = then
        # Not a daemon: at the end of the program the save is finished.
        self._thread = threading.Thread(target=self._run, name="deepnvme-checkpointer")
        # A thread whose `join` was interrupted passes for dead before Python 3.13.
        self._over = threading.Event()

    def begin(self) -> None:
        """Start to wait."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._then(self.saving.wait(None, False))
        except BaseException as error:  # noqa: BLE001
            self._owner.note_failure(error)
        finally:
            self._over.set()

    @property
    def is_running(self) -> bool:
        """Whether it is not over yet."""
        return not self._over.is_set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it is over, or so long."""
        if seconds is not None:
            self._over.wait(seconds)
            return
        # A wait without end would not be woken by Ctrl-C.
        while not self._over.wait(_SLICE_S):
            pass


def staging_for(state: Any, nbytes: int | None) -> _SaveStaging:
    """Make the memory that takes the bytes of a state before the disk does."""
    # Tensors that share memory count each: too much is no harm.
    return staging_of(sum(tensor.nbytes for _, tensor in tensors_of(state)), nbytes)


def staging_of(tensors_nbytes: int, nbytes: int | None, neighbours: int = 1) -> _SaveStaging:
    """Make that memory for so many bytes of tensors, on a machine where so many processes do."""
    if nbytes is None:
        nbytes = min(tensors_nbytes + _REST_BYTES, _available() // _MEMORY_SHARE // neighbours)
    return _SaveStaging(nbytes)


def _available() -> int:
    """Bytes of memory that programs can have without swapping."""
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 30
