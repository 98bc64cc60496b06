"""deepnvme's settings in the configuration of a model server."""

from __future__ import annotations

from typing import Any


def split_settings(config: Any) -> tuple[dict[str, Any], Any]:
    """Split deepnvme's settings from a server's ``model_loader_extra_config``. Returns them and a copy of the rest.

    The server finds and filters safetensors files with the copy.
    """
    import copy  # noqa: PLC0415

    extra = dict(config.model_loader_extra_config or {})
    ours = {key: extra.pop(key) for key in ("prefetch_bytes", "verify") if key in extra}
    theirs = copy.copy(config)
    theirs.model_loader_extra_config = extra
    return ours, theirs
