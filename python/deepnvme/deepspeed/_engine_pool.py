"""Engines for handles: made at the first transfer, lent to one handle at a time, kept for the next one.

Programs make handles often, while an engine owns threads, a queue in the kernel and bounce memory. So a handle costs
nothing until its first transfer; then it borrows an engine with its settings, for itself alone, so that two handles
never queue behind one another. When the handle goes, its engine waits on a short pool for the next handle.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Literal, NamedTuple

import deepnvme

BLOCK_BYTES_MIN = 4 << 10
BLOCK_BYTES_MAX = 64 << 20
QUEUE_DEPTH_MAX = 4096
WORKERS_MAX = 64
# Bounce memory of one engine: enough to keep a device busy; only unaligned transfers pass through it.
POOL_BYTES_MAX = 32 << 20
# Idle engines that are kept, each of other settings. A program rarely uses more than one or two settings.
IDLE_MAX = 2


class EngineSettings(NamedTuple):
    """What an engine is made with; the key of the pool."""

    workers: int
    queue_depth: int
    block_bytes: int
    submit: Literal["batch", "single"]
    gds: Literal["preferred", "disabled"] = "disabled"

    @classmethod
    def of(cls, *, block_size: int, queue_depth: int, single_submit: bool, intra_op_parallelism: int) -> EngineSettings:
        """The nearest settings that an engine takes; all arguments are 1 or more."""
        whole_pages = -(-block_size // BLOCK_BYTES_MIN) * BLOCK_BYTES_MIN
        return cls(
            workers=min(intra_op_parallelism, WORKERS_MAX),
            queue_depth=min(queue_depth, QUEUE_DEPTH_MAX),
            block_bytes=min(whole_pages, BLOCK_BYTES_MAX),
            submit="single" if single_submit else "batch",
        )

    @property
    def pool_bytes(self) -> int:
        """The bound of the bounce memory: at least a block per worker, as an engine asks for."""
        asked = self.workers * self.queue_depth * self.block_bytes
        return max(min(asked, POOL_BYTES_MAX), self.workers * self.block_bytes)


class EnginePool:
    """The idle engines. Every method may be called from any thread, and from a finalizer at any moment."""

    def __init__(self) -> None:
        # Re-entrant, since a finalizer may give an engine back while this thread is inside `take`.
        self._lock = threading.RLock()
        self._idle: dict[EngineSettings, deepnvme.Engine] = {}

    def acquire(self, settings: EngineSettings) -> deepnvme.Engine:
        """An engine with these settings that nobody else has."""
        with self._lock:
            engine = self._idle.pop(settings, None)
        if engine is not None:
            return engine
        return deepnvme.Engine(
            workers=settings.workers,
            queue_depth=settings.queue_depth,
            block_bytes=settings.block_bytes,
            submit=settings.submit,
            gds=settings.gds,
            pool_bytes=settings.pool_bytes,
        )

    def release(self, settings: EngineSettings, engine: deepnvme.Engine) -> None:
        """Keeps an engine that has nothing in flight for the next handle; the oldest idle ones are closed."""
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
        """Closes all idle engines."""
        with self._lock:
            idle = list(self._idle.values())
            self._idle.clear()
        for engine in idle:
            engine.close()

    def reset_after_fork(self) -> None:
        """Forgets, in a child process, the engines of its parent."""
        leak_inherited(self._idle)
        self._lock = threading.RLock()
        self._idle = {}


# Engines of the parent process, never dropped here: their threads do not exist in this process.
_inherited: list[object] = []


def leak_inherited(inherited: object) -> None:
    """Keeps what came over a fork from ever being dropped here."""
    _inherited.append(inherited)


pool = EnginePool()
os.register_at_fork(after_in_child=pool.reset_after_fork)
atexit.register(pool.clear)
