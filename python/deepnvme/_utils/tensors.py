"""Functions about torch tensors. They import torch when they are called."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from deepnvme._deepnvme import _pinned_capsule
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.public import public, whole
from deepnvme.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, TypeVar

    import torch

    _Result = TypeVar("_Result")

# Longer than any tensor. torch counts bytes in 64 bits with a sign.
_LONGEST_STORAGE_BYTES = (1 << 63) - 1
# Whether torch converts one type to another, as far as it was asked.
_CASTS: dict[tuple[torch.dtype, torch.dtype], bool] = {}
# By remedy, then by `id`: the copies that still exist.
_COPIES: dict[str, WeakValueDictionary[int, torch.Tensor]] = {}


@public
def pinned_empty(shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a CPU tensor in page-aligned memory, pinned up to the limit ``RLIMIT_MEMLOCK``.

    Transfers to and from this memory need no copy, whatever the device's alignment. The memory is freed with the
    tensor and its views. It is zeroed. CUDA is not needed.

    Where the process uses a GPU, the CUDA driver pins the memory and ``tensor.is_pinned()`` is true: from the start if
    a GPU is in use then, else from the first GPU tensor that an engine transfers. Copies to and from GPUs are fast
    then, and those with ``non_blocking=True`` are really asynchronous: synchronise the stream before the tensor is
    changed, transferred or dropped.

    Args:
        shape: number of elements, or the size of each dimension. 0 is allowed.
        dtype: of the elements. Default ``torch.uint8``.

    Returns:
        A contiguous tensor of this shape and dtype.

    Raises:
        ImportError: torch is not installed.
        TypeError: a size is not an integer, or ``dtype`` is not a ``torch.dtype``.
        ValueError: a size is negative, or the tensor would have 2^63 bytes or more.
        deepnvme.errors.OutOfMemoryError: the memory cannot be allocated. Memory that cannot be *locked* is no error.

    Example:
        >>> buffer = deepnvme.pinned_empty((1024, 1024), torch.bfloat16)
        >>> buffer.data_ptr() % 4096
        0
    """
    require_torch("pinned_empty")
    import torch  # noqa: PLC0415

    given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    sizes = tuple(whole(size, "a size of shape") for size in given)
    dtype = torch.uint8 if dtype is None else checked_dtype(dtype)
    elements = math.prod(sizes)
    if elements == 0:
        return torch.empty(sizes, dtype=dtype)
    whole(elements * dtype.itemsize, f"the bytes of shape {sizes}")
    flat: torch.Tensor = torch.utils.dlpack.from_dlpack(_pinned_capsule(elements * dtype.itemsize))
    # `.data`, so that the result is no view of another tensor: some code looks for leaves and owners.
    return flat.view(dtype).view(sizes).data


@public
def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a ``uint8`` tensor, without a copy.

    Both share their memory, which lives as long as either does.

    Args:
        tensor: any dtype, any device, any shape; contiguous.

    Returns:
        A ``torch.uint8`` tensor of shape ``(tensor.nbytes,)`` on the same device. It does not require grad.

    Raises:
        ValueError: the tensor is not contiguous, or is a lazy conjugate or negative view.
        TypeError: it is not a torch tensor, or not one block of bytes (sparse, nested, quantised).

    Example:
        >>> deepnvme.as_bytes(torch.ones(2, dtype=torch.int16))
        tensor([1, 0, 1, 0], dtype=torch.uint8)
    """
    require_torch("as_bytes")
    import torch  # noqa: PLC0415

    _check_is_tensor(tensor)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        msg = f"a tensor of layout {tensor.layout} is not one block of bytes; take its parts, or tensor.to_dense()"
        raise TypeError(msg)
    if not tensor.is_contiguous():
        msg = "the tensor is not contiguous, so its bytes are not one block; use tensor.contiguous()"
        raise InvalidArgumentError(msg)
    if tensor.is_conj() or tensor.is_neg():
        msg = "the tensor is a lazy view whose bytes are not its values; use tensor.resolve_conj().resolve_neg()"
        raise InvalidArgumentError(msg)
    return tensor.detach().reshape(-1).view(torch.uint8)


def checked_dtype(dtype: object, name: str = "dtype") -> torch.dtype:
    """Return an argument that is a dtype.

    Raises:
        TypeError: it is something else.
    """
    import torch  # noqa: PLC0415

    if isinstance(dtype, torch.dtype):
        return dtype
    known = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
    remedy = f"torch.{dtype}" if known else "a torch.dtype such as torch.float32"
    msg = f"{name} is {dtype!r} ({type(dtype).__name__}); pass {remedy}"
    raise TypeError(msg)


def cast_refusal(origin: torch.dtype, target: torch.dtype) -> str | None:
    """Say why a cast is refused: it loses more than precision, or torch has none. The clause follows a comma.

    ``None``: it is allowed. Numbers that are too large become what torch makes of them, such as infinite ones.
    """
    if origin == target:
        return None
    if not _has_cast(origin, target):
        return "and torch does not convert it"
    lost = _cast_loss(origin, target)
    return lost and f"which would lose {lost}"


def _has_cast(origin: torch.dtype, target: torch.dtype) -> bool:
    """Whether torch converts one type to the other. Asked once for each pair."""
    import torch  # noqa: PLC0415

    known = _CASTS.get((origin, target))
    if known is None:
        try:
            torch.empty(1, dtype=origin).to(target)
            known = True
        except Exception as error:  # of a class for each kind of type: quantised, packed, only bits
            if is_of_handler(error):
                raise
            known = False
        _CASTS[origin, target] = known
    return known


def _cast_loss(origin: torch.dtype, target: torch.dtype) -> str | None:
    """Name what a cast between two types loses beyond precision."""
    import torch  # noqa: PLC0415

    if origin == torch.bool:
        return None
    if origin.is_complex and not target.is_complex:
        return "the imaginary parts"
    if target == torch.bool:
        return "all but whether a number is zero"
    if target == getattr(torch, "float8_e8m0fnu", None):
        return "the signs"
    if target.is_floating_point or target.is_complex:
        return None
    return "the fractions" if origin.is_floating_point else _range_loss(origin, target)


def _range_loss(origin: torch.dtype, target: torch.dtype) -> str | None:
    """Name what a cast of integers to integers loses."""
    import torch  # noqa: PLC0415

    old, new = torch.iinfo(origin), torch.iinfo(target)
    return None if new.min <= old.min and old.max <= new.max else "the numbers beyond its range"


def storage_shortage(tensor: torch.Tensor) -> str | None:
    """Name what a strided tensor lacks: memory at all, or as much as its shape takes. ``None`` if it has all bytes."""
    if tensor.numel() == 0:
        return None
    if tensor._is_zerotensor():  # noqa: SLF001
        return "it is one of torch's zero tensors, which have no memory; pass tensor.clone()"
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    needed = (tensor.storage_offset() + sum((size - 1) * stride for size, stride in steps) + 1) * tensor.dtype.itemsize
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes >= needed:
        return None
    return f"its storage has {nbytes} bytes, and its shape takes {needed}: resize the storage, or pass another tensor"


def require_torch(caller: str) -> None:
    """Import torch, or raise an error that names the function that needs it."""
    try:
        import torch  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        msg = f"deepnvme.{caller} needs torch, which is not installed; install it with `pip install torch`"
        raise ImportError(msg, name="torch") from error
    import torch.utils.dlpack  # noqa: F401, PLC0415


def address_of(tensor: object) -> int | None:
    """Return the address of a tensor's memory on the host. ``None``: it has none there, or is no tensor."""
    import torch  # noqa: PLC0415

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return None
    try:
        return tensor.data_ptr()
    except RuntimeError:  # subclasses that wrap other tensors
        return None


def without_override(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function without ``__torch_function__``.

    torch's context manager for that could stay entered after Ctrl-C.
    """
    import torch  # noqa: PLC0415

    return torch._C._disabled_torch_function_impl(function, (), args, kwargs)  # noqa: SLF001


def without_gradients(function: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Call a function that records no gradients, as under ``torch.no_grad``.

    Ctrl-C in the exit of torch's context manager could leave gradients off for good.
    """
    import torch  # noqa: PLC0415

    before = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # noqa: SLF001
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)  # noqa: SLF001


def without_memory(
    shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, message: str
) -> torch.Tensor | None:
    """Return a CPU tensor that has sizes and a dtype, and no memory.

    Functions that bypass ``__torch_function__`` (``torch.tensor``, NumPy, TorchScript, C++ extensions) would read
    whatever memory a stand-in has. With this one they fail. ``other.data = this`` makes them fail with the other tensor
    too, and ``this.data = other`` makes them work with this one.

    Args:
        shape: its shape.
        strides: its strides.
        dtype: its dtype.
        message: text of the ``RuntimeError`` that every access to its memory raises.

    Returns:
        The tensor. ``None`` if this torch cannot make one: CPU builds of 2.4 cannot.
    """
    import torch  # noqa: PLC0415

    make_storage = getattr(torch._C, "_construct_storage_from_data_pointer", None)  # noqa: SLF001
    if make_storage is None:
        return None
    made = torch.empty(0, dtype=dtype, device="cpu")
    # It takes sizes only if the storage is long enough. This one is never accessed.
    storage = make_storage(0, made.device, _LONGEST_STORAGE_BYTES)
    made = made.set_(storage, 0, tuple(shape), tuple(strides))
    return made if refuse_access(made, message) else None


def copy_exactly(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy into a tensor, and return it. Of bools, copy the bytes: ``copy_`` turns those other than 0 and 1 into 1."""
    import torch  # noqa: PLC0415

    if source.dtype == target.dtype == torch.bool:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
        return target
    return target.copy_(source)


def contiguous_exactly(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor contiguous. Of bools, return the bytes: ``contiguous`` turns those other than 0 and 1 into 1."""
    import torch  # noqa: PLC0415

    return (tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor).contiguous()


def refuse_access(tensor: torch.Tensor, message: str) -> bool:
    """Take the memory from a tensor, and make every access to it raise a ``RuntimeError``.

    Returns:
        Whether this torch can do that. CPU builds of 2.4 cannot, and leave the tensor as it is.
    """
    import torch  # noqa: PLC0415

    refuse = getattr(torch._C, "_set_storage_access_error_msg", None)  # noqa: SLF001
    if refuse is not None:
        refuse(tensor, message)
    return refuse is not None


def refuse_fake_tensors(caller: str) -> None:
    """Raise an error if tensors that are made now have no memory."""
    import torch  # noqa: PLC0415

    if (
        torch._C._len_torch_dispatch_stack()  # noqa: SLF001
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # noqa: SLF001
    ):
        msg = (
            f"deepnvme.{caller} moves the bytes of tensors, and tensors have none here: a FakeTensorMode is active "
            "(torch.export, torch.compile); call it outside"
        )
        raise UnsupportedError(msg)


def _check_is_tensor(argument: object) -> None:
    import torch  # noqa: PLC0415

    if not isinstance(argument, torch.Tensor):
        msg = f"as_bytes takes a torch tensor, not {type(argument).__name__}; for an array, use array.view('uint8')"
        raise TypeError(msg)


class MemoryOrder(NamedTuple):
    """The order of a dense tensor's elements in memory. Dimensions that do not matter for it have the stride 0."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int]) -> MemoryOrder:
        """Return the order of a tensor with this shape and these strides."""
        is_empty = 0 in shape
        steps = [0 if is_empty or size == 1 else step for size, step in zip(shape, stride, strict=True)]
        return cls(tuple(shape), tuple(steps))

    @property
    def is_row_major(self) -> bool:
        """Whether the last dimension comes first in memory, and so on."""
        return self == MemoryOrder.of(self.shape, row_major(self.shape))

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """View a flat tensor, whose elements are in this order, with its shape."""
        return flat.as_strided(self.shape, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither gaps nor overlaps, in any order of dimensions. An empty one has none."""
    return _is_dense(tensor.shape, tensor.stride())


def is_dense_order(order: MemoryOrder) -> bool:
    """Whether a dense tensor can have this order."""
    return _is_dense(order.shape, order.stride)


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor."""
    strides = [1] * len(shape)
    for at in range(len(shape) - 1, 0, -1):
        strides[at - 1] = strides[at] * max(shape[at], 1)
    return tuple(strides)


def mark_copies(copies: Iterable[torch.Tensor], remedy: str) -> None:
    """Remember copies that a state dict returns.

    Args:
        copies: the tensors.
        remedy: how to load a state instead, for the message.
    """
    known = _COPIES.setdefault(remedy, WeakValueDictionary())
    for tensor in copies:
        known[id(tensor)] = tensor


def find_copy(tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    """Return the name of a tensor that is a copy, and the remedy. ``None`` if there is none."""
    for remedy, known in _COPIES.items():
        if not known:
            continue
        for name, tensor in tensors.items():
            if known.get(id(tensor)) is tensor:
                return name, remedy
    return None
