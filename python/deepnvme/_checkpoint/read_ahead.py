"""Storages of a lazy state: read one by one or, where they are used in the order of the file, many at a time ahead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deepnvme._checkpoint.load_memory import LoadBuffers
from deepnvme._checkpoint.source_files import storage_entries
from deepnvme._utils.interrupts import is_of_handler, make_lock
from deepnvme.errors import Error

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from deepnvme._checkpoint.load_request import LoadRequest
    from deepnvme._deepnvme import _CheckpointReader

# Read-ahead begins with this, doubles while the order holds, and ends at the larger size.
_WINDOW_BYTES_MIN = 1 << 20
WINDOW_BYTES_MAX = 16 << 20
# Storages that follow each other before any is read ahead: the weight and the bias of one layer are no sign of more.
_IN_ORDER_MIN = 2


class ReadAhead:
    """Reads the storages of a file. Threads may share it.

    One that is used out of order is read alone. Once three are used in the order of the file, those behind them are
    read in the same request, and the next request starts when the first of them is used. Storages that were read and
    not used take two windows at most: older ones are given up, and read again if they are used after all. Errors are
    reported when their storage is used.
    """

    def __init__(self, request: LoadRequest, reader: _CheckpointReader, wanted: Iterable[int]) -> None:
        self._request, self._reader = request, reader
        self._wanted = [*wanted]
        self._process = os.getpid()
        self._lock = make_lock()
        # Made at the first read: most lazy states are read in part, and many never.
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._sizes: list[int] = []
        self._started: set[int] = set()
        self._ahead: dict[int, _Window] = {}
        # Those that have storages in `_ahead`, the oldest first.
        self._windows: list[_Window] = []
        self._next = -1
        # How many were used in order, one after the other.
        self._in_order = 0
        self._window_bytes = 0

    def read(self, index: int) -> torch.UntypedStorage:
        """Read a storage."""
        if os.getpid() != self._process:
            # In a forked child, no read of the parent arrives, and nobody releases a lock that was held at the fork.
            return self._read_alone(index)
        with self._lock:
            if not self._positions:
                self._sort()
            window = self._ahead.pop(index, None) or self._miss(index)
            if not window.is_used:
                window.is_used = True
                self._start_next()
        try:
            if (found := window.storage(index)) is not None:
                return found
        except (Error, OSError) as error:
            if is_of_handler(error):
                raise
            if len(window.indices) == 1:
                raise
        # The window's error may be that of a neighbour.
        return self._read_alone(index)

    def _read_alone(self, index: int) -> torch.UntypedStorage:
        alone = self._window([index]).storage(index)
        assert alone is not None
        return alone

    def _sort(self) -> None:
        storages = storage_entries(self._reader)
        self._order = sorted({*self._wanted}, key=lambda index: storages[index].offset)
        self._positions = {index: position for position, index in enumerate(self._order)}
        self._sizes = [storages[index].nbytes for index in self._order]

    def _miss(self, index: int) -> _Window:
        """Start to read a storage that was not read ahead."""
        position = self._positions.get(index)
        if position is None:
            return self._window([index])
        self._in_order = self._in_order + 1 if position == self._next else 0
        is_ahead = self._in_order >= _IN_ORDER_MIN
        self._window_bytes = min(max(self._window_bytes * 2, _WINDOW_BYTES_MIN), WINDOW_BYTES_MAX) if is_ahead else 0
        window = self._start(position)
        self._keep(window, window.indices[1:])
        return window

    def _start_next(self) -> None:
        """Start the next window, while those before it are used."""
        if self._window_bytes and 0 <= self._next < len(self._order) and self._fits(self._next, 0):
            self._window_bytes = min(self._window_bytes * 2, WINDOW_BYTES_MAX)
            try:
                window = self._start(self._next)
            except (Error, OSError, MemoryError) as error:
                if is_of_handler(error):
                    raise
                # Nobody has asked for it: those who do get the error.
                self._window_bytes = 0
                return
            self._keep(window, window.indices)

    def _keep(self, window: _Window, indices: list[int]) -> None:
        """Keep a window for the uses to come. Give up the oldest ones that are too much then."""
        self._windows = [
            kept for kept in self._windows if any(self._ahead.get(index) is kept for index in kept.indices)
        ]
        if not indices:
            return
        self._windows.append(window)
        self._ahead.update(dict.fromkeys(indices, window))
        while len(self._windows) > 1 and sum(kept.nbytes for kept in self._windows) > 2 * WINDOW_BYTES_MAX:
            oldest = self._windows.pop(0)
            for index in oldest.indices:
                if self._ahead.get(index) is oldest:
                    del self._ahead[index]
                    self._started.discard(index)

    def _start(self, position: int) -> _Window:
        indices, nbytes = [self._order[position]], self._sizes[position]
        position += 1
        while position < len(self._order) and self._fits(position, nbytes):
            indices.append(self._order[position])
            nbytes += self._sizes[position]
            position += 1
        self._next = position
        self._started.update(indices)
        return self._window(indices, nbytes)

    def _fits(self, position: int, nbytes: int) -> bool:
        return nbytes + self._sizes[position] <= self._window_bytes and self._order[position] not in self._started

    def _window(self, indices: list[int], nbytes: int = 0) -> _Window:
        buffers = LoadBuffers(self._reader, indices, self._request.device, pin_memory=self._request.pin_memory)
        return _Window(indices, nbytes, buffers, self._request)


class _Window:
    """Storages that are read together."""

    def __init__(self, indices: list[int], nbytes: int, buffers: LoadBuffers, request: LoadRequest) -> None:
        self.indices, self.nbytes = indices, nbytes
        self.is_used = False
        self._buffers, self._request = buffers, request
        self._lock = make_lock()
        self._is_finished = self._is_whole = False

    def storage(self, index: int) -> torch.UntypedStorage | None:
        """Wait for all of them, and return one. ``None`` if an earlier call has failed."""
        with self._lock:
            if not self._is_finished:
                self._is_finished = True
                self._buffers.finish(self._request.verify, None)
                self._is_whole = True
            return self._buffers.storage(index, self._request.device) if self._is_whole else None
