"""Tensor views of swapped bytes, and the objects that borrow them."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NoReturn

import torch

from deepnvme._deepnvme import _BorrowScope
from deepnvme._utils.public import public, whole
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
