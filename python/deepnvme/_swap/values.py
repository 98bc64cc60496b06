"""Arguments and results of a swapper: keys, folders, tensors that view swapped bytes, and counters."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch

from deepnvme._deepnvme import _BorrowScope, _make_folders
from deepnvme._utils.public import public, shown, whole
from deepnvme._utils.tensors import contiguous_exactly, copy_exactly, storage_shortage
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deepnvme._deepnvme import _Borrowed


@public
class Borrowed(_BorrowScope):
    """A tensor for a ``with`` block, as :meth:`Swapper.borrow` returns it.

    Example:
        >>> swapper = deepnvme.Swapper(".", memory="1MB")
        >>> swapper.put("weight", torch.ones(3))
        >>> borrow = swapper.borrow("weight")
        >>> with borrow as weight:
        ...     total = weight.sum()
        ...     borrow.mark_clean()
        >>> total
        tensor(3.)
    """

    def __init__(
        self,
        key: str,
        hold: Callable[[], _Borrowed],
        view: Callable[[_Borrowed], torch.Tensor],
        filled: str | None = None,
        *,
        is_shared: bool = False,
    ) -> None:
        self._key, self._hold, self._view, self._is_shared = key, hold, view, is_shared
        # Label of a tensor that is created; None if it exists already.
        self._filled = filled

    def __enter__(self) -> torch.Tensor:
        if self._held is not None:
            raise RuntimeError(f"{self._key!r} is already borrowed by this object; call borrow() again for another one")
        try:
            self._held = self._hold()
            tensor = self._view(self._held)
            # Tensors of inference mode do not count their changes.
            if self._is_shared and not tensor.is_inference():
                self._lent = (self._key, tensor, tensor._version)  # noqa: SLF001
        except BaseException:
            self.release()
            raise
        return tensor

    def __getattr__(self, name: str) -> NoReturn:
        # For attributes of a tensor, by users who left out the block.
        label = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{label}; get the tensor in a block: with swapper.borrow({self._key!r}) as tensor:")

    def release(self) -> None:
        """Return the tensor, as a block that raises does. Repeated calls do nothing.

        For callers without a ``with`` block, after an interrupt. A tensor that was being created is dropped.
        """
        self._release()

    def mark_clean(self) -> None:
        """Declare that the tensor was not changed, so that it is not written back.

        Raises:
            ValueError: outside of the block.
        """
        self._inside().mark_clean()

    def mark_dirty(self) -> None:
        """Declare that the tensor was changed after all.

        Raises:
            ValueError: outside of the block.
        """
        self._inside().mark_dirty()

    def _inside(self) -> _Borrowed:
        if self._held is None:
            raise InvalidArgumentError(f"{self._key!r} is not borrowed now; call this inside the with block")
        return self._held


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return contiguous_exactly(tensor).resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def check_tensor(tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"expected a torch tensor, not {type(tensor).__name__}; for an array use torch.from_numpy(array)"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise TypeError("the tensor is not one block of memory; swap tensor.to_dense(), or the tensors inside it")
    if tensor.device.type == "cpu" and (shortage := storage_shortage(tensor)) is not None:
        raise InvalidArgumentError(f"the tensor cannot be swapped: {shortage}")


def label_of(dtype: torch.dtype, shape: torch.Size) -> str:
    """Encode dtype and shape. The extension stores the label with the bytes, so both exist from the same moment."""
    return " ".join([str(dtype).removeprefix("torch."), *map(str, shape)])


@functools.lru_cache(maxsize=4096)
def parse_label(label: str) -> tuple[torch.dtype, torch.Size]:
    name, *shape = label.split()
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype, torch.Size(map(int, shape))


def shape_of(nbytes: int, dtype: torch.dtype, shape: Sequence[int] | None) -> torch.Size:
    lengths = [nbytes // dtype.itemsize] if shape is None else shape
    size = torch.Size(whole(length, "a dimension of shape") for length in lengths)
    if math.prod(size) * dtype.itemsize != nbytes:
        raise InvalidArgumentError(f"a tensor of shape {tuple(size)} and {dtype} does not have {nbytes} bytes")
    return size


def view_tensor(memory: torch.Tensor, held: _Borrowed, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """View the bytes of a borrowed item as a tensor."""
    if held.nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    assert held.offset is not None
    # `.data` is not a view to autograd: a change in one slot does not count as a change of the others.
    return memory[held.offset : held.offset + held.nbytes].view(dtype).view(shape).data


def transfer_part(
    memory: torch.Tensor, held: _Borrowed, key: str, offset: int, other: torch.Tensor, *, is_written: bool = False
) -> torch.Tensor | None:
    """View the bytes of an item from `offset` on with the dtype and shape of `other`, or overwrite them with `other`.

    Returns:
        The bytes in memory: a view, or a copy if they are not aligned for the dtype. ``None`` if the item is not in
        memory.

    Raises:
        ValueError: the part exceeds the item.
    """
    if not 0 <= offset <= held.nbytes - other.nbytes:
        held.mark_clean()
        raise InvalidArgumentError(
            f"{other.nbytes} bytes at offset {offset} are outside {key!r}, which has {held.nbytes}"
        )
    if held.offset is None:
        return None
    start = held.offset + offset
    part, other = memory[start : start + other.nbytes], other.detach()
    if start % other.dtype.itemsize == 0:
        part = part.view(other.dtype).view(other.shape)
        return copy_exactly(part, other) if is_written else part
    if is_written:
        return part.copy_(_bytes(other.to("cpu")))
    return part.clone().view(other.dtype).view(other.shape)


def checked_key(key: object) -> str:
    """Return a key, or raise."""
    if isinstance(key, str):
        return key
    msg = f"key is {shown(key)}; it must be a str"
    raise TypeError(msg)


def list_of_keys(keys: object) -> list[str]:
    """Return the keys of an argument: one, or several."""
    if isinstance(keys, str):
        return [keys]
    if not isinstance(keys, Iterable):
        msg = f"keys is {shown(keys)}; it must be a key or a list of keys"
        raise TypeError(msg)
    return [checked_key(key) for key in keys]


def make_swap_folders(swap_dir: object) -> list[str | bytes | os.PathLike[str]]:
    """Return the folders of an argument, and create those that are missing."""
    folders = [swap_dir] if isinstance(swap_dir, str | bytes | os.PathLike) else swap_dir
    if not isinstance(folders, Iterable) or not (folders := list(folders)):
        msg = f"swap_dir is {swap_dir!r}; it must be a folder, or a list of folders, one per drive"
        raise TypeError(msg)
    for folder in folders:
        if not isinstance(folder, str | bytes | os.PathLike):
            msg = f"swap_dir has {folder!r} ({type(folder).__name__}); each folder must be a str or os.PathLike"
            raise TypeError(msg)
        _make_folders(folder)
    return folders


@public
@dataclass(frozen=True)
class SwapStats:
    """What a :class:`Swapper` has done since it was made, and how full it is.

    Attributes:
        hits: borrows whose tensor was in memory, and puts that replaced such a tensor with one of the same size.
        waits: borrows and puts that needed memory or a read first.
        stalled_s: total waiting time in seconds.
        bytes_read: bytes read from disk.
        bytes_written: bytes written to disk.
        reads: tensors read.
        write_backs: tensors written back.
        failures: failed reads and writes.
        evictions: tensors evicted from memory.
        items: number of keys.
        resident_bytes: bytes of memory in use now.
        resident_bytes_peak: peak of the bytes in use.
        memory_bytes: the memory limit in bytes.
        stored_bytes: bytes of the swap files that belong to tensors.
        file_bytes: bytes of the swap files.

    Example:
        >>> with deepnvme.Swapper(".", memory="1MB") as swapper:
        ...     swapper.put("weight", torch.ones(3))
        ...     swapper.stats().items
        1
    """

    hits: int
    waits: int
    stalled_s: float
    bytes_read: int
    bytes_written: int
    reads: int
    write_backs: int
    failures: int
    evictions: int
    items: int
    resident_bytes: int
    resident_bytes_peak: int
    memory_bytes: int
    stored_bytes: int
    file_bytes: int

    @property
    def hit_rate(self) -> float:
        """Hits as a fraction of all borrows and puts; 1 before the first."""
        calls = self.hits + self.waits
        return self.hits / calls if calls else 1.0
