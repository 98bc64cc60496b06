"""Pool I/O engines for handles: created at the first transfer, used by one handle at a time, reused by the next.

Programs create handles often, but an engine owns threads, a kernel queue and bounce memory. So a handle costs nothing
until its first transfer. Then it takes an engine with its settings for exclusive use, so that handles never queue
behind one another. When the handle is dropped, its engine waits in a small pool for the next one.
"""

from __future__ import annotations

import atexit
import os
from typing import Literal, NamedTuple

from deepnvme._deepnvme import Engine
from deepnvme._utils.interrupts import make_lock

BLOCK_BYTES_MIN = 4 << 10
BLOCK_BYTES_MAX = 64 << 20
QUEUE_DEPTH_MAX = 4096
WORKERS_MAX = 64
# Bounce memory of one engine: enough to saturate a device. Only unaligned transfers use it.
POOL_BYTES_MAX = 32 << 20
# Idle engines to keep, each with different settings. A program rarely uses more than two settings.
IDLE_MAX = 2


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
