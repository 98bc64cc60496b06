"""Where the bytes of a weight are: ranges of files, how they are decoded, and which ranges a parameter comes from.

A library that builds a model from a state dict renames, stacks and slices the tensors of the files. Given
:class:`TracedTensor` it does so without reading a byte. The result in the model knows where its elements are on disk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.utils import _pytree as tree

from deepnvme._modules.weight_classes import Placeholder, has_no_values
from deepnvme._utils.public import warn_caller
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from deepnvme._deepnvme import Engine, StripeSet, _StoredTensor
    from deepnvme._modules.weight_classes import Gate
    from deepnvme._stream.model_files import ModelFiles

    # A stored tensor, first byte, byte count; or source, offset, byte count, and the dtype in the file.
    StoredRange: TypeAlias = tuple[_StoredTensor, int, int] | tuple[int, int, int, str]
    # The stored range, its target offset, and the target dtype.
    Conversion: TypeAlias = tuple[StoredRange, int, str]

# CPU kernels choose their summation order by the position in a cache line. With MKL, one row times a float32 matrix
# gives other last bits if the weights do not start at a multiple of 16 bytes.
CACHE_LINE_BYTES = 64
_ATEN = torch.ops.aten


@dataclass(frozen=True)
class ByteRange:
    """A range of a file, or of the decoded bytes of an encoded tensor."""

    source: int
    # Offset in the file, or in the decoded bytes of an encoded tensor.
    offset: int
    nbytes: int
    encoded: _StoredTensor | None = None


@dataclass(frozen=True)
class Origin:
    """The bytes of a tensor on disk, and their meaning."""

    ranges: tuple[ByteRange, ...]
    # Element type in the files, after decoding.
    dtype: torch.dtype
    shape: tuple[int, ...]
    # Element type in memory; ``None`` means the same as on disk.
    cast_to: torch.dtype | None = None
    # Offset within a cache line in the model that results are compared with, if known.
    reference_line_offset: int | None = None

    @property
    def line_offset(self) -> int:
        """The offset within a cache line that gives bit-identical results to the model in memory.

        Libraries that map files leave single ranges where they are in the file. Tensors that they concatenate, cast or
        bring to a GPU have memory of their own.
        """
        if self.reference_line_offset is not None:
            return self.reference_line_offset
        is_mapped = self.is_raw and len(self.ranges) == 1 and self.ranges[0].offset % self.dtype.itemsize == 0
        return self.ranges[0].offset % CACHE_LINE_BYTES if is_mapped else 0

    def for_device(self, device: torch.device) -> Origin:
        """Return the origin for weights on a device.

        Weights that are brought to a GPU have memory of their own there. For addresses that are not multiples of 16,
        GPU libraries select slower kernels, which round otherwise.
        """
        return self if device.type == "cpu" else replace(self, reference_line_offset=0)

    @property
    def is_page_congruent(self) -> bool:
        """Whether the tensor can have the same offset within a memory page as in its file."""
        is_one = self.is_raw and len(self.ranges) == 1
        return is_one and self.ranges[0].offset % CACHE_LINE_BYTES == self.line_offset

    @property
    def nbytes(self) -> int:
        """Decoded bytes, before any cast."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def memory_dtype(self) -> torch.dtype:
        """Element type in memory."""
        return self.cast_to or self.dtype

    @property
    def memory_nbytes(self) -> int:
        """Bytes in memory."""
        return math.prod(self.shape) * self.memory_dtype.itemsize

    @property
    def is_raw(self) -> bool:
        """Whether the bytes in memory equal the bytes in the files."""
        return self.memory_dtype == self.dtype and all(byte_range.encoded is None for byte_range in self.ranges)

    def cast(self, dtype: torch.dtype) -> Origin:
        """Return the same elements with another type in memory."""
        return replace(self, cast_to=None if dtype == self.dtype else dtype)

    def reshaped(self, shape: Sequence[int]) -> Origin:
        """Return the same elements in the same order with another shape."""
        return replace(self, shape=tuple(shape))

    def slice_bytes(self, start: int, nbytes: int) -> tuple[ByteRange, ...]:
        """Return the ranges that cover ``nbytes`` bytes from ``start`` on."""
        taken = []
        for byte_range in self.ranges:
            begin, end = max(start, 0), min(start + nbytes, byte_range.nbytes)
            if begin < end:
                taken.append(replace(byte_range, offset=byte_range.offset + begin, nbytes=end - begin))
            start -= byte_range.nbytes
        return tuple(taken)


@dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights."""

    # The origin of each weight, by name.
    origin_of: Mapping[str, Origin]
    sources: Sequence[str | StripeSet]
    # The engine that reads them; ``None`` means the default engine.
    engine: Engine | None


def merge_adjacent(ranges: Sequence[ByteRange]) -> tuple[ByteRange, ...]:
    """Merge ranges that are adjacent in a file."""
    whole: list[ByteRange] = []
    for byte_range in ranges:
        last = whole[-1] if whole else None
        is_next = last is not None and (last.source, last.encoded) == (byte_range.source, byte_range.encoded)
        if last is not None and is_next and last.offset + last.nbytes == byte_range.offset:
            whole[-1] = replace(last, nbytes=last.nbytes + byte_range.nbytes)
        elif byte_range.nbytes:
            whole.append(byte_range)
    return tuple(whole)


def concatenate(origins: Sequence[Origin], dim: int) -> Origin:
    """Describe the result of ``torch.cat``: new memory, even if the ranges are adjacent in a file."""
    first = origins[0]
    outer = math.prod(first.shape[:dim])
    ranges: list[ByteRange] = []
    for index in range(outer):
        for origin in origins:
            block = origin.nbytes // outer
            ranges += origin.slice_bytes(index * block, block)
    length = sum(origin.shape[dim] for origin in origins)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return Origin(merge_adjacent(ranges), first.dtype, shape, reference_line_offset=0)


def narrow(origin: Origin, dim: int, start: int, length: int) -> Origin:
    """Describe the result of ``Tensor.narrow``: a view into the memory of the whole."""
    outer, inner = math.prod(origin.shape[:dim]), math.prod(origin.shape[dim + 1 :]) * origin.dtype.itemsize
    block = origin.shape[dim] * inner
    reference_line_offset = None
    if origin.reference_line_offset is not None and outer == 1:
        reference_line_offset = (origin.reference_line_offset + start * inner) % CACHE_LINE_BYTES
    ranges: list[ByteRange] = []
    for index in range(outer):
        ranges += origin.slice_bytes(index * block + start * inner, length * inner)
    shape = (*origin.shape[:dim], length, *origin.shape[dim + 1 :])
    return Origin(merge_adjacent(ranges), origin.dtype, shape, reference_line_offset=reference_line_offset)


# Types that are cast to each other on load.
FLOATS = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def can_cast(from_dtype: torch.dtype, to_dtype: torch.dtype) -> bool:
    """Whether weights of one type can be cast to the other on load."""
    return from_dtype == to_dtype or (from_dtype in FLOATS and to_dtype in FLOATS)


def stored_ranges(origin: Origin) -> list[StoredRange]:
    """List the stored ranges of a weight in element order."""
    made: list[StoredRange] = []
    for byte_range in origin.ranges:
        if byte_range.encoded is None:
            made.append((byte_range.source, byte_range.offset, byte_range.nbytes, FLOATS[origin.dtype]))
        else:
            made.append((byte_range.encoded, byte_range.offset, byte_range.nbytes))
    return made


def conversions(origin: Origin, at: int) -> list[Conversion]:
    """List the conversions that decode a weight to the offset ``at`` in memory."""
    made = []
    for byte_range, stored_range in zip(origin.ranges, stored_ranges(origin), strict=True):
        made.append((stored_range, at, FLOATS[origin.memory_dtype]))
        at += byte_range.nbytes // origin.dtype.itemsize * origin.memory_dtype.itemsize
    return made


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
