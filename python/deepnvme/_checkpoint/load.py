"""``deepnvme.load``: read a state straight into its final memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from deepnvme._checkpoint.load_request import LoadRequest
from deepnvme._deepnvme import StripeSet
from deepnvme._utils.devices import checked_device, with_checked_locations
from deepnvme._utils.interpreter import check_interpreter
from deepnvme._utils.memory import memory_errors_with_path
from deepnvme._utils.public import check_choice, check_engine, check_file_path, public
from deepnvme._utils.tensors import refuse_fake_tensors, require_torch
from deepnvme._utils.terminal import ProgressArgument, progress_callback
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from typing import Literal, TypeAlias

    import torch

    from deepnvme._deepnvme import Engine

    _Path: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes] | StripeSet
    _RestoreLocation: TypeAlias = Callable[[torch.UntypedStorage, str], torch.UntypedStorage] | None
    _MapLocation: TypeAlias = (
        str | torch.device | Mapping[str, str] | Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    )

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Arguments of other loaders, and the way to the same result here.
_REMEDIES = {
    "dtype": "pass a state of that dtype as into= with cast=True, or call tensor.to(dtype)",
    "strict": (
        "into= fills the tensors that it names and ignores others of the file; for a module, "
        "module.load_state_dict(state, strict=False)"
    ),
}


def _explains_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make errors of arguments that the function lacks name those that it has."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > 1:
            place = f"={args[1]!r}" if isinstance(args[1], str) else "=..."
            msg = (
                f"load() takes one positional argument, the path, but {len(args)} were given; name the others, such as "
                f"device{place}, or torch.load's name map_location{place}"
            )
            raise TypeError(msg)
        for name, remedy in _REMEDIES.items():
            if name in kwargs:
                msg = f"load() got an unexpected keyword argument {name!r}; {remedy}"
                raise TypeError(msg)
        return function(*args, **kwargs)

    return call


@public
@_explains_arguments
def load(
    path: _Path,
    *,
    device: str | int | torch.device = "cpu",
    only: str | Iterable[str] | None = None,
    into: Mapping[str, Any] | None = None,
    cast: bool = False,
    lazy: bool = False,
    pin_memory: bool = False,
    verify: Literal["auto", "off", "sample", "full"] = "auto",
    engine: Engine | None = None,
    progress: ProgressArgument = None,
    map_location: _MapLocation | None = None,
    weights_only: bool = True,
    mmap: bool = False,
) -> Any:
    """Load a file of ``deepnvme.save``, ``torch.save`` or safetensors.

    Only the requested bytes are read, straight from disk into the memory of the tensors. Peak memory is the state
    itself. Code that you did not allow is refused: a file may contain tensors, containers and the classes that
    ``torch.serialization.add_safe_globals`` allows, as with ``torch.load(weights_only=True)``.

    Args:
        path: a torch archive, a safetensors file, an index of several (``*.index.json``), a folder that contains one
            of these under Hugging Face's names, or a ``StripeSet``. The name passed to ``save(max_shard_bytes=...)``
            means its index. If both a file and an index of that name exist, the file is loaded, unless the index
            states that it replaces that very file.
        device: where the tensors go, as ``str``, index of a GPU, or ``torch.device``. Default: host memory, whatever
            device they were saved from. ``"meta"`` reads no tensor. Omit it with ``into``, whose tensors stay.
        only: names of tensors, or patterns of names (``"layers.0"`` with all below it, ``"*.weight"``). Each must match
            a tensor. Tensors that none of them matches are omitted, and containers that lose all their tensors; in a
            list or tuple, ``None`` takes their place. Other values stay. Default: everything.
        into: a state whose tensors are filled in place, by name (a state dict, or one nested as the file is). It is
            returned. Each of its tensors must be in the file, with the same shape. Names, shapes and dtypes are checked
            before any tensor changes. If the read fails, tensors may be partly filled. Its other values are replaced by
            those of an archive; a value that the file lacks stays, with a warning. Entries that only the file has are
            ignored. A tuple cannot be changed; a value in it that differs stays, with a warning. An empty container or
            a value is refused if the file has tensors there, since they would be lost: load the state of a new
            optimizer without ``into``.
        cast: allow other dtypes in ``into`` than in the file. Default False. Casts that lose more than precision stay
            refused: complex to real, floating-point to integer, anything to ``bool``, and integers to a type that does
            not contain them all. A number beyond the range of a floating-point type becomes infinite, or the largest
            number in a type without infinity (``float8_e4m3fn``), as in torch.
        lazy: return tensors that are read on first use. Objects other than tensors and parameters (sparse, quantised,
            with attributes) are read at once. Small tensors that are used in the order of the file are read ahead, at
            most 32 MiB. Default False.
        pin_memory: load into pinned memory, like that of ``pinned_empty``, for tensors that go on to a GPU or to
            another file. It counts against ``RLIMIT_MEMLOCK``; memory beyond the limit is not locked. Default False.
        verify: how much to compare with the checksums of the file. ``"full"``: every byte, including names, dtypes
            and shapes. ``"sample"``: names, dtypes, shapes and 1/32 of the tensors. ``"off"``: nothing. ``"auto"``
            (default): the sample, and more as far as it costs little time. ``stats()`` reports the
            amount (``bytes_compared``, ``bytes_not_compared``). Files of other programs have no checksums for the
            sample: only ``"full"`` compares the CRC-32s of an archive of ``torch.save``, and it refuses safetensors
            files without checksums.
        engine: the engine that transfers the bytes. Default: the default engine.
        progress: as for ``save``.
        map_location: ``torch.load``'s name for ``device``. Like there, it may also be a dict of devices (saved device
            to new one), or a function of a storage and the device that it was saved from. Both need a load without
            ``into``, ``lazy`` and ``pin_memory``. Tensors in safetensors files count as saved from ``"cpu"``.
        weights_only: only True (default) or ``None``, for calls that were written for ``torch.load``. There is no other
            way to load.
        mmap: only False (default), for calls that were written for ``torch.load``. ``lazy=True`` reads tensors on first
            use.

    Returns:
        The saved object. For safetensors, a dict of names to tensors. With ``into``, the object passed as ``into``.

    Raises:
        FileNotFoundError, PermissionError: as from ``open``.
        deepnvme.errors.UnsafeFileError: the file asks to run code; the message names it.
        deepnvme.errors.CorruptFileError: the file is truncated or damaged; ``offset`` says where, if
            that is known.
        deepnvme.errors.ChecksumError: the bytes are not those that were saved.
        deepnvme.errors.DeviceError: ``device`` or ``map_location`` names a GPU that torch cannot use here.
        KeyError: a name or pattern of ``only`` matches no tensor, or the file lacks a tensor that ``into`` names.
        deepnvme.errors.UnsupportedError: the format or a structure in the file is not supported; the message names it.
        deepnvme.errors.OutOfMemoryError: the machine, or the process, has too little memory for the tensors.
        deepnvme.errors.ClosedError: the engine was closed.
        TypeError, ValueError: an argument is of the wrong type, two of them contradict each other, ``verify="full"``
            finds no checksums, a dtype or shape of ``into`` differs, or a cast would lose values.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        >>> _ = deepnvme.save(model.state_dict(), "model.pt")
        >>> state = deepnvme.load("model.pt", verify="full")
        >>> list(deepnvme.load("model.pt", only="*.weight"))
        ['0.weight', '1.weight']
        >>> _ = deepnvme.load("model.pt", into=model.state_dict())
    """
    check_interpreter()
    check_file_path(path, "load", "use `with deepnvme.open(path) as file: torch.load(file)`")
    _check_torch_arguments(weights_only, mmap)
    check_engine(engine)
    require_torch("load")
    refuse_fake_tensors("load")
    check_choice(verify, "verify", ("auto", "off", "sample", "full"))
    _check_combination(into, only, lazy=lazy, cast=cast)
    place, restore_location = _destination(device, map_location)
    if into is not None and place.type != "cpu":
        name = "device" if map_location is None else "map_location"
        msg = f"{name} is for tensors that load makes, and those of into stay on their devices; omit {name}"
        raise InvalidArgumentError(msg)
    if pin_memory and (into is not None or place.type != "cpu"):
        msg = "pin_memory is for host memory that load allocates; omit it with into, and with another device"
        raise InvalidArgumentError(msg)
    if restore_location is not None and (into is not None or lazy or pin_memory):
        msg = "a map_location that chooses the device of each storage excludes into, lazy and pin_memory"
        raise InvalidArgumentError(msg)
    report = progress_callback(progress, "loading", path)
    request = LoadRequest(
        path=path,
        device=place,
        only=_patterns(only),
        verify=verify,
        engine=engine,
        report=report,
        pin_memory=pin_memory,
        restore_location=restore_location,
    )
    if into is not None:
        from deepnvme._checkpoint.load_into import fill  # noqa: PLC0415

        with memory_errors_with_path(request.name):
            return fill(request, into, cast)
    if lazy:
        from deepnvme._checkpoint.lazy import load_lazily  # noqa: PLC0415

        with memory_errors_with_path(request.name):
            return load_lazily(request)
    return request.load()


def _check_torch_arguments(weights_only: object, mmap: object) -> None:
    """Refuse arguments of ``torch.load`` that have another name here, or that ask to run code."""
    if mmap:
        msg = "deepnvme.load maps no files; use lazy=True, which reads each tensor on first use"
        raise InvalidArgumentError(msg)
    if weights_only is None or weights_only:
        return
    msg = (
        "deepnvme.load runs no pickle, so weights_only=False is impossible; leave it out. If the file "
        "asks for a class that you trust, allow it: torch.serialization.add_safe_globals([Class]). To run the pickle "
        "of a file that you trust entirely, use torch.load(path, weights_only=False)"
    )
    raise InvalidArgumentError(msg)


def _check_combination(into: object, only: object, *, lazy: bool, cast: bool) -> None:
    """Refuse arguments that contradict each other."""
    if sum((into is not None, only is not None, lazy)) > 1 and not (only is not None and lazy):
        msg = "into, only and lazy cannot be combined, except lazy with only; choose one"
        raise InvalidArgumentError(msg)
    if cast and into is None:
        msg = "cast needs into; without it, use tensor.to(dtype)"
        raise InvalidArgumentError(msg)
    if into is not None and not isinstance(into, Mapping | list | tuple):
        remedy = "; pass model.state_dict()" if hasattr(into, "state_dict") else ""
        msg = f"into must be a state of nested dicts, lists and tensors, not {type(into).__name__}{remedy}"
        raise TypeError(msg)


def _destination(device: Any, map_location: Any) -> tuple[torch.device, _RestoreLocation]:
    """Return the device to read to, and the function that moves each storage on, as ``torch.load`` makes it."""
    import torch  # noqa: PLC0415

    if map_location is None:
        return checked_device(device), None
    if device != "cpu":
        msg = "device and map_location mean the same; pass one of them"
        raise InvalidArgumentError(msg)
    if isinstance(map_location, str | int | torch.device):
        return checked_device(map_location, "map_location"), None
    if not callable(map_location) and not isinstance(map_location, Mapping):
        msg = (
            f"map_location is {map_location!r} ({type(map_location).__name__}); pass a device, a dict of devices, or a "
            "function of a storage and its saved device"
        )
        raise TypeError(msg)
    chosen = dict(map_location) if isinstance(map_location, Mapping) else map_location
    found: Callable[..., Any] = torch.serialization._get_restore_location(chosen)  # type: ignore[no-untyped-call]  # noqa: SLF001
    return torch.device("cpu"), with_checked_locations(found, chosen)


def _patterns(only: str | Iterable[str] | None) -> list[str] | None:
    if only is None:
        return None
    patterns: list[Any] = [only] if isinstance(only, str) else list(only)
    for pattern in patterns:
        if not isinstance(pattern, str):
            msg = f"only must be names of tensors, not {type(pattern).__name__}"
            raise TypeError(msg)
    return patterns
