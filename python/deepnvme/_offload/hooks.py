"""Hooks of an offloaded model and of all optimizers."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn, cast

from torch.utils.hooks import RemovableHandle

from deepnvme._modules.calls import untraced

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable

    import torch


class UntracedHook:
    """Keeps a hook out of graphs: it depends on threads and files."""

    _torchdynamo_disable = True

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return untraced(self._hook, *args)

    def __reduce__(self) -> NoReturn:
        # A model is copied and pickled with its hooks first.
        raise copy_error()


class StepGuard:
    """Checks each optimizer's step while the object of the method ``check`` exists."""

    def __init__(self, check: Callable[[torch.optim.Optimizer], None]) -> None:
        self._check = weakref.WeakMethod(check)

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        check = self._check()
        if check is not None:
            check(optimizer)


def add_hook(
    hooks: dict[int, Any], hook: Callable[..., Any], undo: list[Callable[[], object]], *, first: bool = False
) -> None:
    """Register a hook, as torch's ``register_...`` functions do.

    ``undo`` gets the function that removes it before it is there: an interrupt may come at any moment.
    """
    handle = RemovableHandle(hooks)
    undo.append(handle.remove)
    hooks[handle.id] = hook
    if first:
        cast("OrderedDict[int, Any]", hooks).move_to_end(handle.id, last=False)


def copy_error() -> TypeError:
    """Return the error for a copy or pickle of an offloaded model."""
    return TypeError(
        "the parameters of this model are on disk, so it can be neither copied nor pickled; save model.state_dict(), "
        "call model.offloading.save(path), or call model.offloading.close() first"
    )
