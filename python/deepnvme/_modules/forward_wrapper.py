"""Replace a method of one module, and put it back."""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def wrap_forward(
    module: nn.Module,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
    undo: list[Callable[[], object]],
    method: str = "forward",
) -> None:
    """Replace a module's ``forward`` by ``around(forward)``.

    Hooks would not do: after Ctrl-C PyTorch skips the hook behind, and calls it even if the one in front failed.

    Args:
        module: the module.
        around: makes the replacement.
        undo: gets a function that undoes it, before it is done: an interrupt may come at any moment.
        method: the method to replace. ``torch.compile`` leaves it out of its graphs: it would record the weights of
            the moment.
    """
    own = module.__dict__.get(method)
    forward = getattr(module, method)
    inner = around(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return untraced(inner, *args, **kwargs)

    wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001

    def unwrap() -> None:
        nonlocal inner
        inner = forward
        if module.__dict__.get(method) is not wrapped:
            return  # another wrapper surrounds this one and keeps calling it
        if own is None:
            delattr(module, method)
        else:
            setattr(module, method, own)

    undo.append(unwrap)
    setattr(module, method, wrapped)


def wrap_call(
    module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]], undo: list[Callable[[], object]]
) -> None:
    """Replace a module's call, with its hooks, and its ``forward`` if it is called directly.

    Hooks that make a weight before ``forward``, as those of pruning and ``weight_norm`` do, also run inside.

    Args:
        module: the module.
        around: makes the replacement. It surrounds a call once in each thread.
        undo: as for ``wrap_forward``.
    """
    # By thread. Changed without calls, so that Ctrl-C cannot come in between.
    inside: dict[int, bool] = {}

    def around_once(method: Callable[..., Any]) -> Callable[..., Any]:
        surrounded = around(method)

        def run(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if inside.get(thread):
                return method(*args, **kwargs)
            try:
                inside[thread] = True
                return surrounded(*args, **kwargs)
            finally:
                inside[thread] = False

        return run

    for method in ("forward", "_call_impl"):
        wrap_forward(module, around_once, undo, method)


# `_call` without tracing, once it was needed: making it imports torch._dynamo, which takes seconds.
_disabled: list[Callable[..., Any]] = []


def untraced(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that torch.compile must not trace into. Its caller needs ``_torchdynamo_disable``."""
    if "torch._dynamo" not in sys.modules:
        return call(*args, **kwargs)
    if not _disabled:
        _disabled.append(torch.compiler.disable(_call))  # type: ignore[no-untyped-call]
    return _disabled[0](call, *args, **kwargs)


def _call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)
