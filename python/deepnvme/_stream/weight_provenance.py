"""Track which bytes of which files each parameter comes from.

A library that builds a model from a state dict renames, stacks and slices the tensors of the files. Given
:class:`TracedTensor` it does so without reading a byte. The result in the model knows where its elements are on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as tree

from deepnvme._modules.weight_classes import Placeholder, has_no_values
from deepnvme._stream.weight_origin import CACHE_LINE_BYTES, can_cast, concatenate, narrow
from deepnvme._utils.public import warn_caller
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from deepnvme._modules.weight_classes import Gate
    from deepnvme._stream.model_files import ModelFiles
    from deepnvme._stream.weight_origin import Origin

_ATEN = torch.ops.aten


class UntraceableError(RuntimeError):
    """An operation on a traced tensor does more than rearrange its bytes.

    It is not a ``TypeError``, because PyTorch's operators replace those with a ``TypeError`` of their own that explains
    nothing.
    """


class TracedTensor(torch.Tensor):
    """A tensor on disk. ``origin`` describes its bytes. If its dtype differs, the bytes are cast to it on load."""

    origin: Origin
    weight_name: str
    """Its name in the files, or that of the first tensor it is made of; for errors."""

    @staticmethod
    def __new__(  # noqa: PYI034 (torch returns an instance of the given class)
        cls: type[TracedTensor], origin: Origin, dtype: torch.dtype | None = None, weight_name: str = "a weight"
    ) -> TracedTensor:
        made: TracedTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, origin.shape, dtype=dtype or origin.dtype, device=torch.device("cpu")
        )
        made.origin = origin
        made.weight_name = weight_name
        return made

    def derived(self, origin: Origin, dtype: torch.dtype | None = None) -> TracedTensor:
        """Make the result of an operation on this tensor."""
        return TracedTensor(origin, dtype or self.dtype, self.weight_name)

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise RuntimeError(
            f"{self.weight_name} cannot be pickled or copied while the model is built: its bytes are on disk only; "
            "load the model with from_pretrained() to pickle it"
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"TracedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, ranges={len(self.origin.ranges)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Apply an operation to the origins."""
        follow = _HANDLERS.get(func)
        if follow is None:
            leaves = tree.tree_leaves((args, kwargs or {}))
            name = next(leaf.weight_name for leaf in leaves if isinstance(leaf, TracedTensor))
            raise UntraceableError(f"{func} does more than rearrange the bytes of {name}")
        return follow(*args, **(kwargs or {}))


def _alias(tensor: TracedTensor, *_: object, **__: object) -> TracedTensor:
    return tensor.derived(tensor.origin)


def _clone(tensor: TracedTensor, *_: object, **__: object) -> TracedTensor:
    return tensor.derived(replace(tensor.origin, reference_line_offset=0))


def _cast(tensor: TracedTensor, *, dtype: torch.dtype | None = None, **_: object) -> TracedTensor:
    return tensor.derived(tensor.origin, dtype)


def _view(tensor: TracedTensor, shape: list[int], *_: object) -> TracedTensor:
    if -1 in shape:
        known = -torch.Size(shape).numel()
        shape = [tensor.numel() // max(known, 1) if size == -1 else size for size in shape]
    return tensor.derived(tensor.origin.reshaped(shape))


def _pad(tensor: TracedTensor, pad: list[int], *_: object) -> TracedTensor:
    if any(pad):
        raise UntraceableError(f"{tensor.weight_name} is padded beyond its size on disk")
    return tensor.derived(tensor.origin)


def _unsqueeze(tensor: TracedTensor, dim: int) -> TracedTensor:
    shape = list(tensor.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return tensor.derived(tensor.origin.reshaped(shape))


def _concatenate(tensors: list[TracedTensor], dim: int) -> TracedTensor:
    if not all(isinstance(tensor, TracedTensor) for tensor in tensors) or len({tensor.dtype for tensor in tensors}) > 1:
        names = (getattr(tensor, "weight_name", None) for tensor in tensors)
        raise UntraceableError(
            f"{next(filter(None, names))} is concatenated with a tensor of another dtype, or in memory"
        )
    if len({tensor.origin.dtype for tensor in tensors}) > 1:
        raise UntraceableError(f"{tensors[0].weight_name} is concatenated with a weight of another dtype in the files")
    return tensors[0].derived(concatenate([tensor.origin for tensor in tensors], dim))


def _cat(tensors: list[TracedTensor], dim: int = 0) -> TracedTensor:
    return _concatenate(tensors, dim % tensors[0].ndim)


def _stack(tensors: list[TracedTensor], dim: int = 0) -> TracedTensor:
    dim %= tensors[0].ndim + 1
    return _concatenate([_unsqueeze(tensor, dim) for tensor in tensors], dim)


def _slice(
    tensor: TracedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TracedTensor:
    if step != 1:
        raise UntraceableError(f"{tensor.weight_name} is sliced with step {step}")
    begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
    return tensor.derived(narrow(tensor.origin, dim % tensor.ndim, begin, max(stop - begin, 0)))


def _split(tensor: TracedTensor, sizes: int | list[int], dim: int = 0) -> list[TracedTensor]:
    length = tensor.shape[dim]
    if isinstance(sizes, int):
        # An empty tensor also splits into one part.
        sizes = [min(sizes, length - at) for at in range(0, max(length, 1), max(sizes, 1))]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_slice(tensor, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _select(tensor: TracedTensor, dim: int, index: int) -> TracedTensor:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]
    row = _slice(tensor, dim, index, index + 1)
    return tensor.derived(row.origin.reshaped([*row.shape[:dim], *row.shape[dim + 1 :]]))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    _ATEN.detach.default: _alias,
    _ATEN.alias.default: _alias,
    _ATEN.clone.default: _clone,
    _ATEN._to_copy.default: _cast,  # noqa: SLF001
    _ATEN.view.default: _view,
    _ATEN._unsafe_view.default: _view,  # noqa: SLF001
    # Tied models pad their biases by zero elements.
    _ATEN.constant_pad_nd.default: _pad,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.cat.default: _cat,
    _ATEN.stack.default: _stack,
    _ATEN.slice.Tensor: _slice,
    _ATEN.split.Tensor: _split,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.select.int: _select,
}


def find_origins(model: nn.Module, files: ModelFiles) -> dict[str, Origin]:
    """Find the origins of a model's parameters and buffers, by every name that each has.

    Tensors that have values but are not in the files are left out. Raises for a tensor that is in neither.
    """
    tensors = named_tensors(model)
    is_traced = any(isinstance(tensor, TracedTensor) for _, tensor in tensors)
    by_tensor: dict[int, Origin] = {}
    for name, tensor in tensors:
        if isinstance(tensor, TracedTensor):
            if not can_cast(tensor.origin.dtype, tensor.dtype):
                raise UnsupportedError(_cast_message(name, tensor, files))
            by_tensor[id(tensor)] = tensor.origin.cast(tensor.dtype)
        elif name in files.tensors and not is_traced:
            by_tensor.setdefault(id(tensor), _with_line_offset(files.tensors[name], tensor))
    # The file contains a shared weight under one of its names only.
    for name, tensor in tensors:
        if has_no_values(tensor) and id(tensor) not in by_tensor:
            place = "on the meta device" if tensor.is_meta else "on disk since the model was closed"
            raise UnsupportedError(
                f"{name} is {place}, and the files do not contain it; pass weights= a file that does, or load it into "
                "memory first"
            )
    if not is_traced:
        _warn_of_meta_attributes(model)
    return {name: by_tensor[id(tensor)] for name, tensor in tensors if id(tensor) in by_tensor}


def _warn_of_meta_attributes(model: nn.Module) -> None:
    """Warn of tensors without values that are neither parameters nor buffers: no file can have them."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                name = f"{path}.{attribute}" if path else attribute
                warn_caller(
                    f"{name} is on the meta device, and neither a parameter nor a buffer: it has no values, and torch "
                    "computes nonsense with it on CPUs; make it a buffer, or assign a tensor with values"
                )


def _cast_message(name: str, tensor: TracedTensor, files: ModelFiles) -> str:
    stored = tensor.origin.dtype
    file = files.label(tensor.origin)
    if stored.is_floating_point:
        remedy = f"pass dtype={stored}, or save the model with the dtype that it computes in"
    else:
        remedy = "check that the file is of this model, and save it with the dtype that the model computes in"
    return f"{file}: {name} is {stored} on disk and cannot be cast to {tensor.dtype}; {remedy}"


def replace_traced(model: nn.Module, gate: Gate) -> None:
    """Replace traced tensors by placeholders, whose errors explain more. Call it once the origins are known.

    Tied weights stay tied, and weights without elements become tensors in memory.
    """
    made: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for own in (module._parameters, module._buffers):  # noqa: SLF001
            for attribute, tensor in own.items():
                if not isinstance(tensor, TracedTensor):
                    continue
                if id(tensor) not in made:
                    name = f"{prefix}.{attribute}".lstrip(".")
                    stand_in = (
                        Placeholder(name, tensor.shape, tensor.dtype, tensor.device, gate)
                        if tensor.numel()
                        else torch.empty(tensor.shape, dtype=tensor.dtype)
                    )
                    made[id(tensor)] = (
                        torch.nn.Parameter(stand_in, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, torch.nn.Parameter)
                        else stand_in
                    )
                own[attribute] = made[id(tensor)]


def _with_line_offset(origin: Origin, tensor: torch.Tensor) -> Origin:
    """Copy the offset within a cache line from a tensor in memory, so that kernels round as in the model there."""
    if tensor.device.type != "cpu" or isinstance(tensor, Placeholder):
        return origin
    reference_line_offset = tensor.data_ptr() % CACHE_LINE_BYTES
    return replace(
        origin, reference_line_offset=reference_line_offset if reference_line_offset % tensor.dtype.itemsize == 0 else 0
    )


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    parameters = model.named_parameters(remove_duplicate=False)
    return [*parameters, *model.named_buffers(remove_duplicate=False)]
