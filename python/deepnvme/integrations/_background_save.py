"""Background saves of files, for libraries that choose the file names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deepnvme._checkpoint.background_save import BackgroundSaves
from deepnvme._checkpoint.nested_states import local_nbytes
from deepnvme._checkpoint.save import SaveOptions, start_archive
from deepnvme._checkpoint.save_start import staging_for_state
from deepnvme._utils.interrupts import make_lock

if TYPE_CHECKING:
    import os
    from collections.abc import Callable


class BackgroundFileSaver:
    """Saves torch archives in the background, one at a time.

    Args:
        options: how to write the files.
        memory: bytes of pinned memory. Default: the size of the largest state, at most a quarter of the available
            memory.
    """

    def __init__(self, options: SaveOptions, memory: int | None = None) -> None:
        self._options = options
        self._memory = memory
        self._background = BackgroundSaves()
        self._largest_bytes = -1
        self._lock = make_lock()
        self._is_busy = False
        self._actions: list[Callable[[], None]] = []

    def save(self, obj: object, path: str | os.PathLike[str]) -> None:
        """Save an object. When this returns, its tensors may change. Raises the error of the previous save."""
        self.wait()
        self._provide_staging(obj)
        saving = start_archive(obj, path, self._options)
        try:
            self._is_busy = True
            self._background.start(saving, lambda _saved, _check_wanted: self._run_actions())
            self._background.wait_last_read()
        except BaseException:
            # An interrupt has ended the save.
            self._drop_actions()
            raise

    def after_save(self, action: Callable[[], None]) -> None:
        """Run an action once the current save is on disk, or now if none is running.

        If the save fails, the action is dropped.
        """
        with self._lock:
            if self._is_busy:
                self._background.check_process()
                self._actions.append(action)
                return
        action()

    def wait(self) -> None:
        """Wait for the current save, and raise its error."""
        self.wait_over()
        self.raise_failure()

    def wait_over(self) -> None:
        """Wait for the current save. After an interrupt it goes on, with its actions."""
        self._background.wait_over()

    def raise_failure(self) -> None:
        """Raise the error of the last save, once."""
        try:
            self._background.raise_failure()
        finally:
            # Not earlier: no action may run for a save whose error nobody has seen.
            self._drop_actions()

    def close(self) -> None:
        """Wait for the current save, free the memory, and raise the error of the save."""
        self.wait_over()
        self._options = replace(self._options, staging=None)
        self.raise_failure()

    def _drop_actions(self) -> None:
        """Drop the actions if no save is running. It has failed then, or it has run them."""
        if not self._background.is_running:
            self._is_busy = False
            self._actions.clear()

    def _provide_staging(self, obj: object) -> None:
        nbytes = local_nbytes(obj)
        is_enough = self._memory is not None or nbytes <= self._largest_bytes
        if self._options.staging is None or not is_enough:
            # Free the old memory before allocating the new.
            self._options = replace(self._options, staging=None)
            self._options = replace(self._options, staging=staging_for_state(obj, self._memory))
            self._largest_bytes = nbytes

    def _run_actions(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            self._is_busy = bool(self._actions)
            return self._actions.pop(0) if self._actions else None
