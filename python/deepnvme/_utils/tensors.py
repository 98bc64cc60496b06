"""Functions about torch tensors. They import torch when they are called."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from deepnvme._deepnvme import _pinned_capsule
from deepnvme._utils.arguments import whole
from deepnvme._utils.public import public
from deepnvme._utils.signal_errors import is_of_handler
from deepnvme.errors import DeviceError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    import torch

    _Result = TypeVar("_Result")

# Longer than any tensor. torch counts bytes in 64 bits with a sign.
_LONGEST_STORAGE_BYTES = (1 << 63) - 1
# Whether torch converts one type to another, as far as it was asked.
_CASTS: dict[tuple[torch.dtype, torch.dtype], bool] = {}


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


def checked_device(device: Any, name: str = "device") -> torch.device:
    """Return an argument that names a device which torch can use here.

    Args:
        device: a ``torch.device``, its text, or the number of a GPU.
        name: of the argument, for errors.

    Raises:
        DeviceError: there is no such device, no driver, or this torch is built without it.
        InvalidArgumentError: it names no device.
    """
    place = parsed_device(device, name)
    check_device(place, name)
    return place


def parsed_device(device: Any, name: str = "device") -> torch.device:
    """Return an argument that names a device, whether or not it exists here.

    Raises:
        InvalidArgumentError: it names none.
    """
    import torch  # noqa: PLC0415

    try:
        return torch.device(device)
    except RuntimeError as error:
        msg = f"{name} is {device!r}, and is no device of this torch; pass 'cpu', or one such as 'cuda' or 'cuda:1'"
        raise InvalidArgumentError(msg) from error


def check_device(place: torch.device, name: str = "device") -> None:
    """Raise ``DeviceError`` if torch cannot use a device here. ``name`` is that of the argument."""
    import torch  # noqa: PLC0415

    if place.type in {"cpu", "meta"}:
        return
    if place.type == "cuda":
        _check_cuda(place, name)
        return
    try:
        torch.empty(0, device=place)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if is_of_handler(error):
            raise
        reason = _first_sentence(error)
        raise DeviceError(f"{name} is {str(place)!r}, which torch cannot use here: {reason}; pass 'cpu'") from error


def _check_cuda(place: torch.device, name: str) -> None:
    """Raise ``DeviceError`` if torch cannot use this GPU."""
    import torch  # noqa: PLC0415

    remedy = f"pass {name}='cpu', or "
    if torch.version.cuda is None and torch.version.hip is None:
        text = f"this torch ({torch.__version__}) is built without CUDA; {remedy}install a torch that is built with it"
        raise DeviceError(f"{name} is {str(place)!r}, and {text}")
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        if is_of_handler(error):
            raise
        text = f"torch cannot use a GPU here: {_first_sentence(error)}; {remedy}make a GPU and its driver available"
        raise DeviceError(f"{name} is {str(place)!r}, and {text}") from error
    count = torch.cuda.device_count()
    if (place.index or 0) >= count:
        found = ", ".join(f"'cuda:{index}'" for index in range(count)) or "no GPU"
        raise DeviceError(f"{name} is {str(place)!r}, and torch finds {found} here; pass one of these, or 'cpu'")


def _first_sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")


def with_checked_locations(restore: Callable[..., Any], chosen: Any) -> Callable[..., Any]:
    """Wrap torch's function that moves a storage to its device, so that a missing GPU is a ``DeviceError``.

    Args:
        restore: moves a storage, given the location that it was saved with.
        chosen: the ``map_location`` that torch made it from.
    """

    def moved(storage: Any, location: str) -> Any:
        try:
            return restore(storage, location)
        except (AssertionError, RuntimeError):
            place = chosen.get(location, location) if isinstance(chosen, Mapping) else location
            if str(place).startswith("cuda"):
                checked_device(place, "map_location")
            raise

    return moved


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


def engine_reaches(device: torch.device) -> bool:
    """Whether the engine transfers to and from this device itself: CPU and CUDA devices."""
    import torch  # noqa: PLC0415

    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


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
