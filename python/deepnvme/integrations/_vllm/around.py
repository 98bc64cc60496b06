"""Methods of vLLM's classes, called through functions of deepnvme."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MARK = "_deepnvme_hook"


def wrap_method(owner: type, name: str, hook: Callable[..., Any]) -> None:
    """Call a function in place of a method. A second call does nothing.

    Args:
        owner: the class.
        name: the method.
        hook: gets the method, and then its arguments.
    """
    original = getattr(owner, name)
    if getattr(original, _MARK, None) is hook:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(wrapped, _MARK, hook)
    setattr(owner, name, wrapped)
