"""Close a model while other threads call it: running calls end first, and then the model is restored at once."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from deepnvme._modules.calls import refuse_recording, wrap_forward
from deepnvme._utils.fork_locks import make_lock
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# ``close`` polls at this interval, in case Ctrl-C has interrupted the call that should have woken it.
_POLL_S = 0.05


class CallGate:
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
                self._changed.wait(_POLL_S)
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
