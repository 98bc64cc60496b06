"""Methods of model servers, copied with some of their global names replaced."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def with_globals(method: Callable[..., Any], host: str, **names: Any) -> Callable[..., Any]:
    """Copy a server's method, and replace global names of its module in the copy only.

    The server's own method does everything around the reading of files (downloads, filters, prefixes), which changes
    from release to release. The copy calls deepnvme to read.

    Args:
        method: a plain function of a class.
        host: name and version of the server, for the message.
        names: the global names to replace. The method must use at least one of them.

    Raises:
        RuntimeError: the method uses none of them, so this version of the server reads in another way.
    """
    function: Any = method
    used = set(getattr(getattr(function, "__code__", None), "co_names", ()))
    if not used & names.keys():
        msg = (
            f"{host} does not read safetensors through {' or '.join(sorted(names))}, which deepnvme replaces; use "
            "another load format, or install a version that the page 'Serve a model with vLLM or SGLang' lists"
        )
        raise RuntimeError(msg)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, **names},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
