"""Classes of weights that come and go: of those on disk, and of those in memory that is reused for others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as tree

from deepnvme._utils.tensors import refuse_access, without_override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class Gate(Protocol):
    """Whether a model is open, and the error of a use after its close."""

    is_closed: bool

    def closed_error(self, what: str = "") -> Exception:
        """Make the error. ``what`` begins its text."""


class Placeholder(torch.Tensor):
    """Shape, dtype and device of a weight on disk, without bytes.

    Code that counts parameters or asks for dtype and device works. Code that computes with it gets an error that
    explains that it bypassed the module, or that the model was closed.
    """

    weight_name: str
    gate: Gate
    # Looks rows up: called with the indices, and with a function of the rows and the indices.
    look_up: Callable[[torch.Tensor, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]], torch.Tensor] | None = None
    _REMEDY = "close the streaming and load the weights into memory"

    @staticmethod
    def __new__(  # noqa: PLR0917, PYI034 (torch returns an instance of the given class)
        cls: type[Placeholder],
        name: str,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        gate: Gate,
        stride: Sequence[int] | None = None,
    ) -> Placeholder:
        """Make one."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, shape, stride, dtype=dtype, device=device
        )
        made.weight_name = name
        made.gate = gate
        refuse_access(
            made,
            f"{name} is on disk: it is in memory only while its module runs. Its memory was accessed from elsewhere; "
            f"call the module itself, or {cls._REMEDY}",
        )
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        if self.gate.is_closed:
            raise self.gate.closed_error(f"{self.weight_name} is on disk: ")
        raise self._refused(_PICKLING)

    def _refused(self, what: str) -> Exception:
        if self.gate.is_closed:
            return self.gate.closed_error(f"{self.weight_name} is on disk: ")
        if what in _CASTS:
            text = "a streamed model can be neither cast nor moved; pass dtype= or device= to deepnvme.stream"
        elif what in _COPIES:
            text = "a streamed model can be neither copied nor saved; copy its folder or file"
        else:
            text = (
                f"it is in memory only while its module runs. {what} was called on it from elsewhere; call the module "
                "itself, stream with more memory, so that the module around it is loaded as a whole"
            )
        return RuntimeError(f"{self.weight_name} is on disk: {text}, or {self._REMEDY}")

    def data_ptr(self) -> int:
        """Return a null pointer. A transfer asks for the storage next, whose error says more."""
        return 0

    def __dlpack__(self, *_: object, **__: object) -> Any:
        raise self._refused("__dlpack__")

    def __array__(self, *_: object, **__: object) -> Any:
        raise self._refused("__array__")

    # These would reach for memory without an operation that `__torch_dispatch__` sees.

    def share_memory_(self) -> Any:
        """Refuse."""
        raise self._refused("share_memory_")

    def untyped_storage(self) -> Any:
        """Refuse."""
        raise self._refused("untyped_storage")

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse."""
        raise self._refused(f"numpy(force={force})" if force else "numpy")

    def tolist(self) -> Any:
        """Refuse."""
        raise self._refused("tolist")

    def _use_count(self) -> Any:
        """Refuse: ``torch.utils.swap_tensors`` asks for it before it changes anything."""
        raise self._refused("swap_tensors")

    @property
    def data(self) -> torch.Tensor:
        """The placeholder itself, detached. Other tensors cannot be assigned."""
        found: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module.to` without a change assigns it to itself.
        if not isinstance(value, Placeholder):
            raise self._refused("an assignment of data")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Placeholder({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse operations that need bytes."""
        first = next(_placeholders((*args, *(kwargs or {}).values())))
        if func is _EMBEDDING and first.look_up is not None and not first.gate.is_closed:
            _, indices, *rest = args
            return first.look_up(indices, lambda rows, some: func(rows, some, *rest, **(kwargs or {})))
        if func in _ALIASES:
            name, gate = first.weight_name, first.gate
            return type(first)(name, first.shape, first.dtype, first.device, gate, first.stride())
        if func is _EMPTY_LIKE and first.gate.is_closed:
            # `Module.to_empty` asks for new memory, and for no value.
            bare = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
            return func(bare, **{"device": first.device, **(kwargs or {})})
        raise first._refused(str(func))  # noqa: SLF001


_PICKLING = "__reduce_ex__"
# Operations of `Module.to`, and those of copies and saves.
_CASTS = frozenset(("aten._to_copy.default", "aten.empty_like.default"))
_COPIES = frozenset((_PICKLING, "aten.clone.default", "share_memory_", "untyped_storage"))
_EMPTY_LIKE = torch.ops.aten.empty_like.default
_EMBEDDING = torch.ops.aten.embedding.default
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _placeholders(values: Iterable[Any]) -> Iterator[Placeholder]:
    for value in values:
        if isinstance(value, Placeholder):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _placeholders(value)


def foreign_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that others have set on a tensor."""
    own = ("weight_name", "gate", "look_up", "_is_param") if isinstance(tensor, Placeholder) else ()
    return {name: value for name, value in vars(tensor).items() if name not in own}


# Attributes of a parameter on disk: its name, for errors, and its strides.
ON_DISK_NAME = "_deepnvme_name"
ON_DISK_STRIDE = "_deepnvme_stride"
# Attributes that need values; all others do not.
_VALUE_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "real", "imag"))
# Functions that need no values, by name.
_WITHOUT_VALUES = frozenset(
    ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
     "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "is_same_size",
     "get_device", "dim_order", "has_names", "_is_view", "_is_zerotensor", "__len__", "__hash__", "__dir__",
     "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "grad", "result_type",
     "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like",
     "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "_has_compatible_shallow_copy_type")
)  # fmt: skip
# They return the tensor itself if there is nothing to convert.
_CONVERSIONS = frozenset(("to", "type", "type_as", "cpu", "float", "double", "half", "bfloat16"))


class OnDiskParameter(nn.Parameter):
    """The class of a parameter while it is on disk. Whatever needs its values raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run functions that need no values."""
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        is_allowed = name in _WITHOUT_VALUES
        # It may be among the `inputs` of another tensor's `backward`.
        is_allowed |= name == "backward" and not isinstance(args[0], OnDiskParameter)
        if name == "is_pinned":
            return False  # torch's own asks for the memory
        if name in ("__get__", "__set__", "__delete__"):
            if attribute == "data" and name == "__set__" and args[1] is args[0]:
                return None  # `Module.to` without a change
            is_allowed = attribute not in _VALUE_ATTRIBUTES and not (attribute == "data" and name == "__set__")
        elif name in _CONVERSIONS or name == "detach":
            is_allowed = True
        if not is_allowed:
            raise _value_error((args, kwargs), f"{attribute}.{name}" if attribute else name)
        result = without_override(func, *args, **(kwargs or {}))
        if name == "detach" or (name == "__get__" and attribute == "data"):
            # Another tensor with the placeholder's data.
            result.__class__ = OnDiskParameter
            setattr(result, ON_DISK_NAME, _name_in(args))
        elif name in _CONVERSIONS and result is not args[0] and isinstance(result, torch.Tensor):
            raise _value_error(args, name)
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        raise _value_error(self, "deepcopy")

    def _use_count(self) -> int:
        # `torch.utils.swap_tensors` asks for it before it changes anything.
        raise _value_error(self, "swap_tensors")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _value_error(self, "__reduce_ex__")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDiskParameter(shape={tuple(self.shape)}, dtype={self.dtype})"


def _value_error(arguments: Any, what: str) -> Exception:
    return RuntimeError(on_disk_message(_name_in(arguments), f"{what} was called on it"))


def _name_in(arguments: Any) -> str:
    on_disk = (leaf for leaf in tree.tree_leaves(arguments) if isinstance(leaf, OnDiskParameter))
    return next((vars(leaf)[ON_DISK_NAME] for leaf in on_disk if ON_DISK_NAME in vars(leaf)), "a parameter")


def on_disk_message(name: str, use: str) -> str:
    """Explain why a parameter on disk has no values, and how to get them."""
    return (
        f"{name} is on disk: it is in memory only while its block runs. {use} from elsewhere; use it within `with "
        "model.offloading.gathered([parameter]):`, or call model.offloading.close() first"
    )


def is_on_disk(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for a weight on disk, of a model that is not closed."""
    # A parameter of a subclass keeps its class while it is on disk, so the attribute counts as well.
    is_offloaded = isinstance(tensor, OnDiskParameter) or ON_DISK_NAME in vars(tensor)
    return is_offloaded or (isinstance(tensor, Placeholder) and not tensor.gate.is_closed)


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device or stands for a weight on disk."""
    return tensor.is_meta or isinstance(tensor, Placeholder)


class BoundParameter(nn.Parameter):
    """A parameter in memory that later belongs to others.

    torch does not count changes of ``weight.data``. Such a change would go into that memory and be lost in silence.
    """

    @property
    def data(self) -> torch.Tensor:
        """The values without a gradient. Changes of them count as changes of the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        assign_data(self, value)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        """Copy it as torch's own class: the copy has memory of its own."""
        made = nn.Parameter(self.detach().clone(memory_format=torch.preserve_format), self.requires_grad)
        memo[id(self)] = made
        return made


class FixedParameter(BoundParameter):
    """A bound parameter whose data cannot be assigned: the tensor is used again for later weights."""

    @property
    def data(self) -> torch.Tensor:
        """The values without a gradient. Changes of them count as changes of the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # `Module.to` without a change assigns the same memory.
        if (value.data_ptr(), value.dtype, value.shape) != (self.data_ptr(), self.dtype, self.shape):
            raise RuntimeError(
                "the data of a weight were assigned while it is streamed from its file, and the change would be lost; "
                "call model.streaming.close() first, and assign them then"
            )


assign_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
