"""Tensors that know which bytes of which files they are, and have none.

A library that puts a model together out of a state dict renames, stacks and cuts the tensors of the files until they
are its parameters. Given these, it does all that without reading a byte, and what arrives in the model says where on
disk its elements lie.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._stream.weight_origin import LINE_BYTES, can_cast, concatenated, narrowed
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from deepnvme._stream.weight_origin import Origin
    from deepnvme._stream.weight_sources import ModelFiles

_ATEN = torch.ops.aten


class UntraceableError(RuntimeError):
    """What was done to a tensor is more than putting stretches of files one behind the other.

    No ``TypeError``: of that, PyTorch's operators make one of their own, which says nothing.
    """


class Traced(torch.Tensor):
    """A tensor on disk. ``origin`` has its bytes; its own dtype may be another, into which they are to be cast."""

    origin: Origin

    @staticmethod
    def __new__(  # noqa: PYI034 (what torch makes is of the class that it is told)
        cls: type[Traced], origin: Origin, dtype: torch.dtype | None = None
    ) -> Traced:
        """Make one."""
        made: Traced = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, origin.shape, dtype=dtype or origin.dtype, device=torch.device("cpu")
        )
        made.origin = origin
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise RuntimeError("a weight that was never read cannot be saved; its file is still on disk")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Traced(shape={tuple(self.shape)}, dtype={self.dtype}, pieces={len(self.origin.pieces)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Follow where the bytes go."""
        follow = _FOLLOWED.get(func)
        if follow is None:
            raise UntraceableError(f"{func} makes more of the weights than their bytes in another order")
        return follow(*args, **(kwargs or {}))


def _same(tensor: Traced, *_: object, **__: object) -> Traced:
    return Traced(tensor.origin, tensor.dtype)


def _cloned(tensor: Traced, *_: object, **__: object) -> Traced:
    return Traced(replace(tensor.origin, residue=0), tensor.dtype)


def _cast(tensor: Traced, *, dtype: torch.dtype | None = None, **_: object) -> Traced:
    return Traced(tensor.origin, dtype or tensor.dtype)


def _viewed(tensor: Traced, shape: list[int], *_: object) -> Traced:
    if -1 in shape:
        known = -torch.Size(shape).numel()
        shape = [tensor.numel() // max(known, 1) if size == -1 else size for size in shape]
    return Traced(tensor.origin.reshaped(shape), tensor.dtype)


def _padded(tensor: Traced, pad: list[int], *_: object) -> Traced:
    if any(pad):
        raise UntraceableError("a weight is made larger than it is on disk")
    return Traced(tensor.origin, tensor.dtype)


def _unsqueezed(tensor: Traced, dim: int) -> Traced:
    shape = list(tensor.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return Traced(tensor.origin.reshaped(shape), tensor.dtype)


def _together(tensors: list[Traced], dim: int) -> Traced:
    if not all(isinstance(tensor, Traced) for tensor in tensors) or len({tensor.dtype for tensor in tensors}) > 1:
        raise UntraceableError("weights on disk are put together with others")
    if len({tensor.origin.dtype for tensor in tensors}) > 1:
        raise UntraceableError("weights of several dtypes are put together")
    return Traced(concatenated([tensor.origin for tensor in tensors], dim), tensors[0].dtype)


def _cat(tensors: list[Traced], dim: int = 0) -> Traced:
    return _together(tensors, dim % tensors[0].ndim)


def _stack(tensors: list[Traced], dim: int = 0) -> Traced:
    dim %= tensors[0].ndim + 1
    return _together([_unsqueezed(tensor, dim) for tensor in tensors], dim)


def _slice(tensor: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Traced:
    if step != 1:
        raise UntraceableError(f"every {step}th row of a weight is taken")
    begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return Traced(narrowed(tensor.origin, dim % tensor.ndim, begin, max(stop - begin, 0)), tensor.dtype)


def _split(tensor: Traced, sizes: int | list[int], dim: int = 0) -> list[Traced]:
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        # Also nothing is one piece.
        sizes = [min(sizes, length - at) for at in range(0, max(length, 1), max(sizes, 1))]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_slice(tensor, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _select(tensor: Traced, dim: int, index: int) -> Traced:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]
    row = _slice(tensor, dim, index, index + 1)
    return Traced(row.origin.reshaped([*row.shape[:dim], *row.shape[dim + 1 :]]), tensor.dtype)


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _same,
    _ATEN.alias.default: _same,
    _ATEN.clone.default: _cloned,
    _ATEN._to_copy.default: _cast,  # noqa: SLF001
    _ATEN.view.default: _viewed,
    _ATEN._unsafe_view.default: _viewed,  # noqa: SLF001
    # Of nothing, as tied models have it done to their biases.
    _ATEN.constant_pad_nd.default: _padded,
    _ATEN.unsqueeze.default: _unsqueezed,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.slice.Tensor: _slice,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.select.int: _select,
}


def origins(model: nn.Module, files: ModelFiles) -> dict[str, Origin]:
    """Where on disk each parameter and buffer of a model is, under each of its names."""
    tensors = named(model)
    is_traced = any(isinstance(tensor, Traced) for _, tensor in tensors)
    by_tensor: dict[int, Origin] = {}
    for name, tensor in tensors:
        if isinstance(tensor, Traced):
            if not can_cast(tensor.origin.dtype, tensor.dtype):
                raise UnsupportedError(f"{name} is {tensor.origin.dtype} on disk and would be {tensor.dtype} in memory")
            by_tensor[id(tensor)] = tensor.origin.held(tensor.dtype)
        elif name in files.tensors and not is_traced:
            by_tensor.setdefault(id(tensor), _as_in_memory(files.tensors[name], tensor))
    # A weight that modules share is in the file under one of its names.
    for name, tensor in tensors:
        if tensor.is_meta and id(tensor) not in by_tensor:
            raise UnsupportedError(f"{name} is on the meta device, and the files have no bytes for it")
    return {name: by_tensor[id(tensor)] for name, tensor in tensors if id(tensor) in by_tensor}


def _as_in_memory(origin: Origin, tensor: torch.Tensor) -> Origin:
    """Have a weight lie as the one does that results are compared with, where that is in memory now."""
    if tensor.device.type != "cpu":
        return origin
    residue = tensor.data_ptr() % LINE_BYTES
    return replace(origin, residue=residue if residue % tensor.dtype.itemsize == 0 else 0)


def named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]
