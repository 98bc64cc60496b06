"""Storages of torch that may not move while a transfer works on them.

``share_memory_()``, which multiprocessing calls for every tensor that it sends, puts another memory into a storage and
frees the old one. So does ``_swap_data_ptr_()`` when the other storage ends. torch has a table of storages that are
being shared, and asks whoever shares one to wait for its entry: a storage that is held looks as if it were in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from deepnvme._deepnvme import _is_held

if TYPE_CHECKING:
    import torch

_TABLE = "_share_memory_map"
_SWAP = "_swap_data_ptr_"


class _Refusal:
    """Nobody waits for it: it raises."""

    def __enter__(self) -> NoReturn:
        msg = (
            "deepnvme reads into this tensor or writes it, and its memory cannot be moved to shared memory meanwhile: "
            "wait for the transfer first"
        )
        raise RuntimeError(msg)

    def __exit__(self, *_: object) -> None:
        pass


class _Table(dict[int, Any]):
    """torch's table of storages that are being shared, with those that are held."""

    def __contains__(self, storage: object) -> bool:
        return super().__contains__(storage) or (isinstance(storage, int) and _is_held(storage))

    def __getitem__(self, storage: int) -> Any:
        return super().__getitem__(storage) if self.is_moving(storage) else _Refusal()

    def is_moving(self, storage: int) -> bool:
        """Whether a storage is being moved now."""
        return super().__contains__(storage)


def install() -> _Table:
    """Have torch refuse from now on; the table."""
    # Not before torch is needed; it has been imported by then.
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
                msg = "deepnvme reads into this storage or writes it: wait for the transfer before you swap its memory"
                raise RuntimeError(msg)
            return plain(storage, other)

        setattr(torch.UntypedStorage, _SWAP, swap)
    return table
