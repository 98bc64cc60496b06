"""Keeps torch from moving a storage's memory during a transfer.

``share_memory_()``, which multiprocessing calls for every tensor that it sends, replaces a storage's memory and frees
the old one. So does ``_swap_data_ptr_()`` once the other storage is freed. torch keeps a table of storages that are
being shared, and waits for the entry of a storage before sharing it. Storages in transfers appear in the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from deepnvme._deepnvme import _is_held

if TYPE_CHECKING:
    import torch

_TABLE = "_share_memory_map"
_SWAP = "_swap_data_ptr_"


class _Refusal:
    """An entry that raises when torch waits for it."""

    def __enter__(self) -> NoReturn:
        msg = (
            "deepnvme is reading or writing this tensor, so its memory cannot be moved to shared memory: wait for the "
            "transfer first"
        )
        raise RuntimeError(msg)

    def __exit__(self, *_: object) -> None:
        pass


class _Table(dict[int, Any]):
    """torch's table of storages that are being shared, with those in transfers added."""

    def __contains__(self, storage: object) -> bool:
        return super().__contains__(storage) or (isinstance(storage, int) and _is_held(storage))

    def __getitem__(self, storage: int) -> Any:
        return super().__getitem__(storage) if self.is_moving(storage) else _Refusal()

    def is_moving(self, storage: int) -> bool:
        """Whether torch is moving a storage now."""
        return super().__contains__(storage)


def install() -> _Table:
    """Make torch refuse to move storages in transfers. Returns the table."""
    # Here, since torch is imported only when it is needed.
    import torch  # noqa: PLC0415
    import torch.storage  # noqa: PLC0415

    known = getattr(torch.storage, _TABLE, None)
    if isinstance(known, _Table):
        return known
    table = _Table(getattr(torch.storage, _TABLE, {}))
    if hasattr(torch.storage, _TABLE):
        setattr(torch.storage, _TABLE, table)
    plain = getattr(torch.UntypedStorage, _SWAP, None)
    if plain is not None:

        def swap(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> Any:
            """Exchange the memory of two storages."""
            if _is_held(storage._cdata) or _is_held(other._cdata):  # noqa: SLF001
                msg = "deepnvme is reading or writing this storage: wait for the transfer before swapping its memory"
                raise RuntimeError(msg)
            return plain(storage, other)

        setattr(torch.UntypedStorage, _SWAP, swap)
    return table
