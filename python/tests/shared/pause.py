"""A point at which a thread of a test waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LIMIT_S = 30


class Pause:
    """A point at which another thread waits."""

    def __init__(self) -> None:
        self._is_reached, self._is_over = threading.Event(), threading.Event()

    def wait(self) -> None:
        """Wait until the block of :meth:`of` ends."""
        self._is_reached.set()
        assert self._is_over.wait(_LIMIT_S)

    @contextmanager
    def of(self, work: Callable[[], object]) -> Iterator[None]:
        """Run ``work`` in a thread, which waits here until the block ends, and then finish it."""
        thread = threading.Thread(target=work)
        thread.start()
        assert self._is_reached.wait(_LIMIT_S)
        try:
            yield
        finally:
            self._is_over.set()
            thread.join(_LIMIT_S)
