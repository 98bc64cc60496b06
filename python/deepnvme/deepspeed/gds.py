"""The op `gds`, by name only: GPUDirect Storage is not in this version."""

from __future__ import annotations

from typing import NoReturn


class gds_handle:  # noqa: N801 - the name is DeepSpeed's
    """Raises `NotImplementedError`: this version of deepnvme has no GPUDirect Storage back end (cuFile)."""

    def __new__(cls, *_args: object, **_kwargs: object) -> NoReturn:
        """Says what is missing."""
        msg = (
            "gds_handle: this version of deepnvme has no GPUDirect Storage back end (cuFile). "
            'Use aio_handle (in a DeepSpeed config: "aio": {"use_gds": false}) with tensors in CPU memory'
        )
        raise NotImplementedError(msg)
