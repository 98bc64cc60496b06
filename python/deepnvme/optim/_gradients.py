"""Move gradients to disk as autograd produces them, and leave a stand-in in ``.grad``.

A hook takes each gradient as soon as it exists, so that at most one is in memory. It leaves a
:class:`SwappedGradient` in ``.grad``. ``clip_grad_norm_``, ``GradScaler`` and accumulation work on that without
reading; other computations read a copy. ``.grad`` alone decides: if it is ``None`` there is no gradient, whatever the
disk contains.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils import _pytree as tree

from deepnvme._utils.devices import relaxed_capture_for
from deepnvme._utils.shards import is_dtensor, local, set_local, split_as, whole
from deepnvme._utils.tensors import without_override
from deepnvme.errors import InvalidArgumentError, UnsupportedError
from deepnvme.optim._state_store import flat, stride_of, with_strides_of

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

    from deepnvme._deepnvme import Kernel
    from deepnvme._swap import Swapper
    from deepnvme._swap.shared import SwapperPart
    from deepnvme.optim._layout import Placement, StateGroup, StateLayout
    from deepnvme.optim._state_store import StateKind

_aten = torch.ops.aten
_EUCLID = 2


class SwappedGradients:
    """Takes gradients, and keeps them until a step has used them.

    Args:
        swapper: stores the gradients.
        layout: positions of the parameters.
        kernel: adds and measures.
        record_use: called with each key in order of use.
        follow: called before a gradient is written, to keep what there is in the memory order of its parameter.
    """

    def __init__(
        self,
        swapper: Swapper | SwapperPart,
        layout: StateLayout,
        kernel: Kernel,
        *,
        record_use: Callable[[str], None],
        follow: Callable[[torch.nn.Parameter], None],
    ) -> None:
        self._swapper, self._layout, self._kernel, self._record_use = swapper, layout, kernel, record_use
        self._follow = follow
        self._watched: set[torch.nn.Parameter] = set()
        self._hooks: list[RemovableHandle] = []
        # Also without a `close`: the parameters may outlive this.
        self._remove_hooks = weakref.finalize(self, _remove_all, self._hooks)
        self._remove_hooks.atexit = False

    def watch(self, param: torch.nn.Parameter, kinds: tuple[StateKind, ...]) -> None:
        """Take each gradient of a parameter from now on.

        Raises:
            ValueError: the parameter is not on the CPU.
        """
        if param in self._watched or not self._remove_hooks.alive:
            return
        if param.device.type != "cpu":
            msg = f"swap_gradients needs CPU parameters; this one is on {param.device}"
            raise InvalidArgumentError(msg)
        self._watched.add(param)
        if self._layout.kinds(param) is None:
            self._layout.place(param, kinds)
        known = weakref.ref(self)

        def take(param: torch.Tensor) -> None:
            gradients = known()
            if gradients is not None:
                gradients.take(param)

        self._hooks.append(param.register_post_accumulate_grad_hook(take))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Take no more gradients. The parameters lose those that were taken: their ``.grad`` becomes ``None``."""
        self._remove_hooks()
        # If an interrupt has stopped the first call, it does nothing the second time.
        _remove_all(self._hooks)
        for param in self._watched:
            grad = swapped_gradient(param)
            if grad is not None and grad.is_held_by(self):
                param.grad = None
            for group, placement in self._layout.locations(param):
                placement.grad_summary, group.has_grads = None, False

    def close_group(self) -> None:
        """Start a new group with the next watched parameter."""
        self._layout.close_group()

    def take(self, param: torch.Tensor) -> None:
        """Take the gradient that autograd has just produced, or added to one in memory."""
        grad = param.grad
        if grad is None or swapped_gradient(param) is not None or grad.layout != torch.strided:
            return
        split = split_as(param, grad)
        self.put(param, local(split))
        swapped = SwappedGradient(self, param, 1.0)
        if not is_dtensor(split):
            param.grad = swapped
            return
        # FSDP adds to the part of this process.
        set_local(split, swapped)
        if split is not grad:
            param.grad = split

    def put(self, param: torch.Tensor, grad: torch.Tensor) -> None:
        """Write a gradient to disk."""
        self._follow(param)  # type: ignore[arg-type]
        new = in_order(grad, param)
        for group, placement in self._layout.locations(param):  # type: ignore[arg-type]
            self._put(group, placement, new[placement.slice.begin : placement.slice.end])

    def _put(self, group: StateGroup, placement: Placement, new: torch.Tensor) -> None:
        if group.has_grads:
            with self._swapper.borrow(group.grad_key) as memory, relaxed_capture_for(new.device):
                placement.gradient(memory).copy_(new)
        else:
            with (
                self._swapper.create(group.grad_key, [group.grad_nbytes], torch.uint8) as memory,
                relaxed_capture_for(new.device),
            ):
                placement.gradient(memory).copy_(new)
            group.has_grads = True
        placement.grad_summary = self._kernel.measure([new])
        self._record_use(group.grad_key)

    def add(self, param: torch.Tensor, grad: torch.Tensor, factor: float) -> None:
        """Add to a gradient on disk that is pending multiplication by ``factor``."""
        self._follow(param)  # type: ignore[arg-type]
        new = in_order(grad, param)
        for group, placement in self._layout.locations(param):  # type: ignore[arg-type]
            some = new[placement.slice.begin : placement.slice.end]
            if placement.grad_summary is None:
                # A stopped step has used it.
                self._put(group, placement, some)
                continue
            with self._swapper.borrow(group.grad_key) as memory:
                kept = placement.gradient(memory)
                if factor != 1.0:
                    kept.mul_(factor)
                self._kernel.accumulate(kept, some)
                placement.grad_summary = self._kernel.measure([kept])
            self._record_use(group.grad_key)

    def read(self, param: torch.Tensor) -> torch.Tensor:
        """Read a gradient in the shape of its parameter, and the memory order in which it is kept."""
        order, locations = self._layout.order(param), self._layout.locations(param)  # type: ignore[arg-type]
        count = local(param).numel() if order is None else math.prod(order.shape)
        # The dtype that the parameter had when it was written.
        dtype = next((placement.grad_dtype for _, placement in locations), param.dtype)
        values = torch.empty(count, dtype=dtype)
        for group, placement in locations:
            self._swapper.read(
                group.grad_key, placement.grad_offset, values[placement.slice.begin : placement.slice.end]
            )
        return values.view(local(param).shape) if order is None else order.view(values)

    def squares(self, param: torch.Tensor) -> float:
        """Return the sum of squares of a gradient; infinite or NaN if an element is."""
        return sum(squares for squares, _ in self._summaries(param))

    def is_finite(self, param: torch.Tensor) -> bool:
        """Whether all elements of a gradient are finite."""
        return all(finite for _, finite in self._summaries(param))

    def _summaries(self, param: torch.Tensor) -> list[tuple[float, bool]]:
        locations = self._layout.locations(param)  # type: ignore[arg-type]
        return [placement.grad_summary for _, placement in locations if placement.grad_summary is not None]

    def mark_used(self, group: StateGroup, placements: list[Placement]) -> None:
        """Drop the gradients of these placements, which a step has used."""
        for placement in placements:
            placement.grad_summary = None
        if group.has_grads and not any(placement.grad_summary for placement in group.placements):
            group.has_grads = False
            self._swapper.delete(group.grad_key)

    def drop(self, params: list[torch.nn.Parameter]) -> None:
        """Drop the gradients of these parameters."""
        for param in params:
            for group, placement in self._layout.locations(param):
                self.mark_used(group, [placement])


class SwappedGradient(torch.Tensor):
    """Stands for a gradient on disk.

    It can be multiplied in place by a number, and added to. Its 2-norm is known. Operations that only read it get a
    copy.
    """

    factor: float
    """Pending factor."""

    @staticmethod
    def __new__(cls: type[Self], gradients: SwappedGradients, param: torch.Tensor, factor: float) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, local(param).shape, strides=stride_of(param), dtype=param.dtype, device=param.device
        )
        return made

    def __init__(self, gradients: SwappedGradients, param: torch.Tensor, factor: float) -> None:
        super().__init__()
        self._gradients, self._param, self.factor = gradients, weakref.ref(param), factor
        # Whether an addition was interrupted, so that only a part of it is done.
        self._is_partial = False

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SwappedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, on disk)"

    def __setitem__(self, *_: object) -> NoReturn:
        # torch would assign to a view of a copy.
        raise _change_error("an assignment")

    @property
    def data(self) -> torch.Tensor:
        """The gradient. An assignment writes it to disk, as ``Module.to`` does."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        param = self._of()
        if value is self:
            return
        if value.shape != self.shape:
            raise _change_error("an assignment of another shape")
        new = value.read() if isinstance(value, SwappedGradient) else value
        self._is_partial = True
        self._gradients.put(param, new)
        self._is_partial, self.factor = False, 1.0

    def is_held_by(self, gradients: SwappedGradients | None) -> bool:
        """Whether ``gradients`` holds it."""
        return self._gradients is gradients

    def squares(self) -> float:
        """Return the sum of its squares."""
        return self._gradients.squares(self._of()) * self.factor * self.factor

    def is_finite(self) -> bool:
        """Whether all elements are finite."""
        return self._gradients.is_finite(self._of()) and math.isfinite(self.factor)

    def read(self) -> torch.Tensor:
        """Read a copy into memory."""
        found = self._gradients.read(self._of())
        return found if self.factor == 1.0 else found.mul_(self.factor)

    def _of(self) -> torch.Tensor:
        param = self._param()
        if param is None or swapped_gradient(param) is not self:
            raise UnsupportedError("this gradient was dropped, or a step has used it")
        if self._is_partial:
            raise UnsupportedError(
                "the disk failed while this gradient was accumulated; call zero_grad() and repeat the backward pass"
            )
        return param

    def checked(self, param: torch.Tensor) -> Self:
        """Return itself if a step can use it for this parameter.

        Raises:
            UnsupportedError: it no longer exists, only a part of it is valid, or it is that of another parameter.
        """
        if self._of() is not param:
            raise UnsupportedError(
                "a parameter has the gradient of another one, which is on disk; assign a copy: param.grad.clone()"
            )
        return self

    def accumulate(self, new: torch.Tensor) -> Self:
        """Add to it on disk."""
        param = self._of()
        self._is_partial = True
        self._gradients.add(param, new, self.factor)
        self._is_partial, self.factor = False, 1.0
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        settings = settings or {}
        own = _OWN.get(function.overloadpacket)
        if own is not None:
            done = own(function, arguments, settings)
            if done is not NotImplemented:
                return done
        for index, argument in enumerate(function._schema.arguments):  # noqa: SLF001
            value = arguments[index] if index < len(arguments) else settings.get(argument.name)
            if argument.is_write and any(isinstance(one, SwappedGradient) for one in tree.tree_leaves(value)):
                raise _change_error(str(function.overloadpacket))
        plain = tree.tree_map_only(SwappedGradient, SwappedGradient.read, (arguments, settings))
        read = function(*plain[0], **plain[1])
        if any(returned.alias_info is not None for returned in function._schema.returns):  # noqa: SLF001
            return tree.tree_map_only(torch.Tensor, lambda view: view.as_subclass(_ReadView), read)
        return read


class _ReadView(torch.Tensor):
    """A view of a copy of a gradient on disk. It can be read. A change of it would not reach the gradient."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), settings: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        is_change = (name.endswith("_") and not name.startswith("__")) or name in _IN_PLACE
        out = tree.tree_leaves((settings or {}).get("out"))
        changed = [*arguments[:1] * is_change, *out]
        if any(isinstance(one, _ReadView) for one in tree.tree_leaves(changed)):
            raise _change_error(name)
        result = without_override(function, *arguments, **(settings or {}))
        views = [one for one in tree.tree_leaves((arguments, settings)) if isinstance(one, _ReadView)]
        memory = {_storage_address(one) for one in views}
        return tree.tree_map_only(
            torch.Tensor, lambda one: one.as_subclass(_ReadView) if _storage_address(one) in memory else one, result
        )


def _storage_address(tensor: torch.Tensor) -> int:
    storage: torch.UntypedStorage = without_override(torch.Tensor.untyped_storage, tensor)
    return storage.data_ptr()


# Operators of Python that change their first operand, and assignments.
_IN_PLACE = frozenset(
    ("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__",
     "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
)  # fmt: skip


def _change_error(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} changes a gradient that is on disk. It can be multiplied by a number, clipped by its 2-norm, and "
        "dropped (zero_grad()); for anything else, load it into memory with param.grad = param.grad.clone()"
    )


def _remove_all(hooks: list[RemovableHandle]) -> None:
    # An interrupt may come at any moment.
    while hooks:
        hooks[-1].remove()
        hooks.pop()


def swapped_gradient(param: torch.Tensor) -> SwappedGradient | None:
    """Return the gradient of a parameter if it is on disk."""
    grad = None if param.grad is None else local(param.grad)
    return grad if isinstance(grad, SwappedGradient) else None


def in_order(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Flatten a local gradient in the memory order of its parameter."""
    return flat(with_strides_of(local(param), grad.to(param.dtype)))


# Operations without reading.


def _detach(_function: Any, arguments: tuple[Any, ...], _settings: Any) -> Any:
    return arguments[0]


def _add(_function: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    kept, new = arguments
    if not isinstance(kept, SwappedGradient) or not isinstance(new, torch.Tensor) or settings.get("alpha", 1) != 1:
        return NotImplemented
    return kept.accumulate(new.read() if isinstance(new, SwappedGradient) else new)


def _copy(_function: Any, arguments: tuple[Any, ...], _settings: Any) -> Any:
    # `DistributedDataParallel` replaces a gradient by the average.
    kept, new = arguments[:2]
    if not isinstance(kept, SwappedGradient) or not isinstance(new, torch.Tensor) or new.shape != kept.shape:
        return NotImplemented
    kept.data = new
    return kept


def _times(kept: Any, number: Any) -> bool:
    if isinstance(number, torch.Tensor) and (number.numel() != 1 or isinstance(number, SwappedGradient)):
        return False
    kept._of()  # noqa: SLF001
    kept.factor *= float(whole(number) if isinstance(number, torch.Tensor) else number)
    return True


def _multiply(_function: Any, arguments: tuple[Any, ...], _settings: Any) -> Any:
    kept, number = arguments
    if not isinstance(kept, SwappedGradient) or not _times(kept, number):
        return NotImplemented
    return kept


def _divide(function: Any, arguments: tuple[Any, ...], settings: Any) -> Any:
    kept, number = arguments
    if settings or (isinstance(number, torch.Tensor) and number.numel() != 1):
        return NotImplemented
    return _multiply(function, (kept, 1.0 / float(number)), settings)


def _multiply_each(_function: Any, arguments: tuple[Any, ...], _settings: Any) -> Any:
    several, numbers = arguments
    for index, one in enumerate(several):
        number = numbers[index] if isinstance(numbers, (list, tuple)) else numbers
        if not isinstance(one, SwappedGradient):
            one.mul_(number)
        elif not _times(one, number):
            return NotImplemented
    return None


def _norm(_function: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    kept, *rest = arguments
    order = rest[0] if rest else _EUCLID
    if not isinstance(kept, SwappedGradient) or order != _EUCLID or len(rest) > 1 or settings.get("dtype") is not None:
        return NotImplemented
    return torch.tensor(math.sqrt(kept.squares()), dtype=kept.dtype)


def _norm_each(function: Any, arguments: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    several, *rest = arguments
    order = rest[0] if rest else _EUCLID
    if order != _EUCLID or len(rest) > 1 or settings:
        return NotImplemented
    return [
        _norm(function, (one,), {}) if isinstance(one, SwappedGradient) else torch.linalg.vector_norm(one)
        for one in several
    ]


def _unscale(function: Any, arguments: tuple[Any, ...], _settings: Any) -> Any:
    several, found, inverse = arguments
    plain = [one for one in several if not isinstance(one, SwappedGradient)]
    if plain:
        function(plain, found, inverse)
    for one in several:
        if isinstance(one, SwappedGradient):
            if not one.is_finite():
                found.fill_(1.0)
            _times(one, inverse)
    return None


_OWN: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    _aten.detach: _detach,
    _aten.add_: _add,
    _aten.copy_: _copy,
    _aten.mul_: _multiply,
    _aten.div_: _divide,
    _aten._foreach_mul_: _multiply_each,
    _aten.linalg_vector_norm: _norm,
    _aten._foreach_norm: _norm_each,  # noqa: SLF001
    _aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
