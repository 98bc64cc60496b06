"""Methods of a host's classes in which some names mean something else."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def with_globals(method: Callable[..., Any], host: str, **names: Any) -> Callable[..., Any]:
    """Copy a host's method so that global names of its module mean something else in the copy, and nowhere else.

    What a host does around the reading of files (downloads, filters, prefixes) is its own affair and changes from
    release to release; so its own method does that, and calls us where it would read.

    Args:
        method: a plain function, as it stands in a class.
        host: name and release of the host, for the message.
        names: the global names, at least one of which the method has to use.

    Raises:
        RuntimeError: the method uses none of them: this release of the host reads in another way.
    """
    function: Any = method
    used = set(getattr(getattr(function, "__code__", None), "co_names", ()))
    if not used & names.keys():
        msg = (
            f"{host} does not read safetensors through {' or '.join(sorted(names))}, which is where deepnvme comes in; "
            "load with another load format, or install a release that docs/serving.md names"
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


def split_settings(config: Any) -> tuple[dict[str, Any], Any]:
    """Take what is ours out of a host's ``model_loader_extra_config``: our part, and a copy of the config without it.

    The copy asks for safetensors, which is what the host then finds and filters.
    """
    import copy  # noqa: PLC0415

    extra = dict(config.model_loader_extra_config or {})
    ours = {key: extra.pop(key) for key in ("ahead", "verify") if key in extra}
    theirs = copy.copy(config)
    theirs.model_loader_extra_config = extra
    return ours, theirs
