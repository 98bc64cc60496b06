"""What hands out torch tensors. torch is imported when one is asked for, and only then."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from deepnvme._deepnvme import _pinned_capsule
from deepnvme._utils.arguments import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def pinned_empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a CPU tensor in page-aligned memory that is page-locked as far as ``RLIMIT_MEMLOCK`` allows.

    Transfers to and from such memory need no copy, whatever the device's alignment. The memory is the tensor's own and
    is freed with it (and with the views of it). No CUDA is needed. The bytes are zero at first.

    Args:
        shape: number of elements, or the size of each dimension. 0 is allowed.
        dtype: of the elements. Default ``torch.uint8``.

    Returns:
        A contiguous tensor of that shape and dtype.

    Raises:
        ImportError: torch is not installed.
        ValueError: a size is negative.
        OSError: the memory is not to be had (``errno.ENOMEM``). That it cannot be *locked* is no error.

    Example:
        >>> buffer = deepnvme.pinned_empty((1024, 1024), torch.bfloat16)
        >>> buffer.data_ptr() % 4096
        0
    """
    _check_torch("pinned_empty")
    import torch  # noqa: PLC0415

    given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    sizes = tuple(whole(size, "a size of shape") for size in given)
    dtype = torch.uint8 if dtype is None else dtype
    elements = math.prod(sizes)
    if elements == 0:
        return torch.empty(sizes, dtype=dtype)
    whole(elements * dtype.itemsize, f"the bytes of shape {sizes}")
    flat: torch.Tensor = torch.utils.dlpack.from_dlpack(_pinned_capsule(elements * dtype.itemsize))
    # `.data` is no view of another tensor, which code that looks for leaves and owners would trip over.
    return flat.view(dtype).view(sizes).data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Alias a contiguous tensor as bytes, without copying.

    Changing one changes the other, and the memory lives as long as either does.

    Args:
        tensor: any dtype, any device, any shape; contiguous.

    Returns:
        A ``torch.uint8`` tensor of shape ``(tensor.nbytes,)`` on the same device. It does not require grad.

    Raises:
        ValueError: the tensor is not contiguous, or is a lazy conjugate or negative view.
        TypeError: it is not a torch tensor, or has no bytes of its own (sparse, nested).

    Example:
        >>> deepnvme.as_bytes(torch.ones(2, dtype=torch.int16))
        tensor([1, 0, 1, 0], dtype=torch.uint8)
    """
    _check_torch("as_bytes")
    import torch  # noqa: PLC0415

    _check_is_tensor(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        msg = f"a tensor of layout {tensor.layout} is not one block of bytes; take its parts, or tensor.to_dense()"
        raise TypeError(msg)
    if not tensor.is_contiguous():
        msg = "the tensor is not contiguous, so that its bytes are no one block; use tensor.contiguous()"
        raise ValueError(msg)
    if tensor.is_conj() or tensor.is_neg():
        msg = "the tensor is a lazy view whose bytes are not its values; use tensor.resolve_conj().resolve_neg()"
        raise ValueError(msg)
    return tensor.detach().reshape(-1).view(torch.uint8)


def engine_reaches(device: torch.device) -> bool:
    """Whether memory there is read and filled block by block: the host's, and that of CUDA devices."""
    import torch  # noqa: PLC0415

    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def _check_torch(caller: str) -> None:
    """Import torch, or say who wanted it."""
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        msg = f"deepnvme.{caller} makes torch tensors, and torch is not installed; install it with `pip install torch`"
        raise ImportError(msg, name="torch") from error
    import torch.utils.dlpack  # noqa: F401, PLC0415


def _check_is_tensor(argument: object) -> None:
    import torch  # noqa: PLC0415

    if not isinstance(argument, torch.Tensor):
        msg = f"as_bytes takes a torch tensor, not {type(argument).__name__}; an array has array.view('uint8')"
        raise TypeError(msg)
