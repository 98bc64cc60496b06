"""Several threads that call one model: they take turns if memory does not suffice for all, and a close waits for them.

A close lets running calls end first, and then restores the model at once.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

from deepnvme._modules.calls import refuse_recording, wrap_forward
from deepnvme._utils.interrupts import POLL_INTERVAL_S, make_lock
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# A thread that has waited this long goes next; until then others may overtake it.
_STARVATION_S = 0.5


class RunningCalls:
    """Counts the running calls of a streamed model.

    Weights, caches and wrapped methods change only while no call runs. So no call finds a half-restored model, and
    none mixes streamed weights with those that the model had before.

    Args:
        model: name of the model, for errors.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._pid = os.getpid()
        # The thread of each running call. Nested calls have entries of their own. Changed by single operations without
        # the lock, so that Ctrl-C cannot come in between.
        self._running: dict[object, int] = {}
        # Reentrant, because a signal handler may close the model.
        self._changed = threading.Condition(make_lock())
        self._unwraps: list[tuple[nn.Module, list[Callable[[], object]]]] = []
        self._restore: Callable[[], None] | None = None
        self.is_closed = False
        """Whether :meth:`stop` was called. From then on calls raise."""
        self.is_restored = False
        """Whether the model has its own methods and weights again."""

    def wrap(
        self,
        module: nn.Module,
        around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda method: method,
        method: str = "forward",
    ) -> None:
        """Replace a method by ``around(method)``, and count its calls."""
        undo: list[Callable[[], object]] = []
        self._unwraps.append((module, undo))
        wrap_forward(module, lambda inner: self._counted(around(inner), inner), undo, method)

    def unwrap(self, *, keep: nn.Module | None = None) -> None:
        """Restore all methods, except those of one module."""
        # A method that was wrapped twice is restored from the outside.
        for module, undo in reversed(self._unwraps):
            if module is not keep:
                for unwrap in undo:
                    unwrap()
        if keep is None:
            # They refer to the caches, whose memory is freed now.
            self._unwraps = []

    def check(self) -> None:
        """Raise if the model is closed, or belongs to the parent of this forked process."""
        if os.getpid() != self._pid:
            raise ClosedError("the model belongs to the parent process; open the model again in this one")
        if self.is_closed:
            raise self.closed_error()

    def closed_error(self, what: str = "") -> ClosedError:
        """Make the error of a use after the close."""
        return ClosedError(
            f"{what}{self._model} was closed (model.streaming.close()) and no longer streams its weights; stream it "
            "again, or load its weights into memory"
        )

    def stop(self) -> None:
        """Make calls end at the next layer."""
        self.is_closed = True

    def close(self, restore: Callable[[], None]) -> None:
        """Restore the model once no call runs. Wait for that, unless this thread is inside a call itself.

        Args:
            restore: restores the weights. An interrupted one is called again.
        """
        if os.getpid() != self._pid:
            # The parent's threads do not run here, and may have held the lock at the fork.
            if not self.is_restored:
                restore()
                self.is_restored = True
            return
        is_inside = threading.get_ident() in [*self._running.values()]
        with self._changed:
            if not self.is_restored:
                self._restore = restore
            self._restore_if_idle()
            # The last call restores the model if all callers of `close` are inside calls, or were interrupted.
            while not (self.is_restored or is_inside):
                self._changed.wait(POLL_INTERVAL_S)
                self._restore_if_idle()

    def _restore_if_idle(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._restore is None or self._running:
                return
            self._restore()
            self.is_restored, self._restore = True, None
            self._changed.notify_all()

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that a close waits for, and that raises after it."""

        def refuse(*_args: Any, **_kwargs: Any) -> Any:
            raise self.closed_error()

        return self._counted(call, refuse)

    def _counted(self, call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_restored:
                # Another library has wrapped this wrapper, or fetched it just before it was removed.
                return original(*args, **kwargs)
            entry = object()
            try:
                # Counted before the check: `close` looks in the other order, so one of both notices.
                self._running[entry] = threading.get_ident()
                self.check()
                refuse_recording("a streamed model", (*args, *kwargs.values()))
                return call(*args, **kwargs)
            finally:
                # First statement in `finally`, so that Ctrl-C cannot come before it: `close` would wait for ever.
                self._running.pop(entry, None)
                if self.is_closed:
                    self._restore_if_idle()

        return run


class ThreadTurns:
    """Tracks which threads hold weights, so that a thread without memory knows whether waiting helps.

    A thread that already holds weights always continues, since the waiting ones need them back. A thread that holds
    none gives way to a starved one.

    Args:
        check: raises if the model is closed, so that no thread waits for memory of a closed model.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._changed = threading.Condition(make_lock())
        # Threads that hold weights or are about to, and the depth of their nested calls.
        self._call_depth: dict[int, int] = {}
        self._next: int | None = None
        self._releases = 0

    def acquire(self, held: list[Any], take: Callable[[Any], Any], group: Any) -> None:
        """Append ``take(group)`` to ``held`` once memory is free. The caller calls ``release`` in any case.

        Raises:
            MemoryError: there is not enough memory, and no other thread holds anything that it could release.
            ClosedError: the model was closed.
        """
        me = threading.get_ident()
        began = time.monotonic()
        with self._changed:
            # Counted before waiting, so that ``release`` finds it. A thread without weights leaves the count while it
            # lets a starved one go first.
            self._call_depth[me] = self._call_depth.get(me, 0) + 1
        try:
            while not held:
                self._check()
                releases_seen = self._yield_to_starved(me)
                try:
                    # `map` runs no bytecode between the call and the append, where Ctrl-C could come. So the list
                    # always holds what was acquired.
                    held.extend(map(take, (group,)))
                except MemoryError:
                    if not self._wait_for_release(me, releases_seen, began):
                        raise
                except ClosedError:
                    # The streamer was closed while it waited. This error names the model.
                    self._check()
                    raise
        finally:
            with self._changed:
                if self._next == me:
                    self._next = None
                    self._changed.notify_all()

    def _yield_to_starved(self, me: int) -> int:
        """Let a starved thread go first, unless this thread may hold weights.

        Returns:
            The number of releases so far.
        """
        with self._changed:
            if self._call_depth[me] == 1 and self._next not in {None, me}:
                del self._call_depth[me]
                try:
                    while self._next not in {None, me}:
                        self._changed.wait(POLL_INTERVAL_S)
                finally:
                    self._call_depth[me] = 1
            return self._releases

    def _wait_for_release(self, me: int, releases_seen: int, began: float) -> bool:
        """Wait until another thread may have released something. Return false if no other thread holds anything."""
        with self._changed:
            if self._releases == releases_seen:
                if self._call_depth.keys() == {me}:
                    return False
                if self._next is None and time.monotonic() - began > _STARVATION_S:
                    self._next = me
                self._changed.wait(POLL_INTERVAL_S)
            return True

    def release(self) -> None:
        """Wake waiting threads: this thread has released its most recent acquisition."""
        me = threading.get_ident()
        with self._changed:
            if self._call_depth.get(me, 0) > 1:
                self._call_depth[me] -= 1
            else:
                self._call_depth.pop(me, None)
            self._releases += 1
            self._changed.notify_all()
