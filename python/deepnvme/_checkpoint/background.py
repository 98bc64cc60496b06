"""Saves that go on by themselves: one at a time, and what went wrong with it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.names import tensors_of
from deepnvme._deepnvme import _SaveStaging

if TYPE_CHECKING:
    from collections.abc import Callable

    from deepnvme._deepnvme import _Saving

    _Saved = tuple[int, int, int, int]

# Of the memory that is available, the part that staging takes at the most, unless it is told.
_MEMORY_SHARE = 4
# What a file has besides its tensors.
_REST_BYTES = 4 << 20


class Background:
    """The save that is under way, if there is one."""

    def __init__(self) -> None:
        self._current: _Current | None = None
        self._failed: BaseException | None = None

    def start(self, saving: _Saving, then: Callable[[_Saved], None]) -> None:
        """Have somebody wait for a save, and call ``then`` when the file has its name."""
        self._current = _Current(self, saving, then)

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
        try:
            self.wait_for_tensors()
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
    def __init__(self, owner: Background, saving: _Saving, then: Callable[[_Saved], None]) -> None:
        self.saving = saving
        self.is_filled = False
        self._owner = owner
        self._then = then
        # Not a daemon: at the end of the program the save is finished.
        self._thread = threading.Thread(target=self._run, name="deepnvme-checkpointer")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._then(self.saving.wait(None, False))
        except BaseException as error:  # noqa: BLE001
            self._owner.note_failure(error)

    def join(self) -> None:
        """Wait until it is over."""
        while self._thread.is_alive():
            # A wait without end would not be woken by Ctrl-C.
            self._thread.join(0.05)


def staging_for(state: Any, nbytes: int | None) -> _SaveStaging:
    """Make the memory that takes the bytes of a state before the disk does."""
    if nbytes is None:
        # Tensors that share memory count each: too much is no harm.
        wanted = sum(tensor.nbytes for _, tensor in tensors_of(state)) + _REST_BYTES
        nbytes = min(wanted, _available() // _MEMORY_SHARE)
    return _SaveStaging(nbytes)


def _available() -> int:
    """Bytes of memory that programs can have without swapping."""
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 30
