"""Devices of tensors: checks of those that a caller names, and calls of CUDA while another thread captures a graph.

They import torch when they are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from deepnvme._deepnvme import _exchange_capture_mode
from deepnvme._utils.interrupts import is_of_handler
from deepnvme.errors import DeviceError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import torch

_NOTHING = nullcontext()
# ``CU_STREAM_CAPTURE_MODE_RELAXED``: this thread may make any call during another thread's capture.
_RELAXED = 2


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


def engine_reaches(device: torch.device) -> bool:
    """Whether the engine transfers to and from this device itself: CPU and CUDA devices."""
    import torch  # noqa: PLC0415

    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)


def relaxed_capture_for(device: torch.device) -> AbstractContextManager[None]:
    """Return :func:`relaxed_capture` for a GPU, and for the CPU a context that does nothing.

    Raises:
        UnsupportedError: this thread captures a graph on its current stream of the GPU.
    """
    if device.type != "cuda":
        return _NOTHING
    import torch  # noqa: PLC0415

    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        msg = "a CUDA graph is being captured on this thread's stream, and a transfer cannot be part of a graph"
        raise UnsupportedError(f"{msg}; transfer the tensor before or after the capture, or from another stream")
    return relaxed_capture()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Run a block in which allocations, copies and waits are allowed while another thread captures a graph.

    By default they would fail and invalidate the capture.
    """
    before = None
    try:
        before = _exchange_capture_mode(_RELAXED)
        yield
    finally:
        if before is not None:
            _exchange_capture_mode(before)
