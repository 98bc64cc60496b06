"""Replace weights by placeholders while they are on disk, bind them while their module runs, and give them back.

In the end, placeholders come in place of those that had no values.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepnvme._modules.calls import with_copies
from deepnvme._modules.weight_classes import BoundParameter, FixedParameter, Placeholder, has_no_values
from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.tensors import address_of, without_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.utils.hooks import RemovableHandle

    from deepnvme._modules.partition import Weight
    from deepnvme._modules.weight_classes import Gate
    from deepnvme._stream.weight_origin import Origin

# Set on tensors whose memory streaming owns: the origin of their bytes.
_STREAMED = "_deepnvme_is_streamed"


class _Bound:
    """Tensors before a call, to find those that it changes."""

    def __init__(self, tensors: Sequence[torch.Tensor], buffers: Iterable[int]) -> None:
        self.tensors = tensors
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001
        # By their bytes, since batch norm changes its statistics without counting.
        self._buffers = {index: tensors[index].clone() for index in buffers}

    def changed_buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield copies of the buffers that were changed."""
        for index, before in self._buffers.items():
            tensor = self.tensors[index]
            if not have_same_bytes(before, tensor):
                # Inference tensors could not be changed by later calls outside of that mode.
                with torch.inference_mode(mode=False):
                    copy = tensor.clone()
                yield index, _mark(copy, vars(tensor)[_STREAMED])

    def changed_versions(self) -> list[int]:
        """Return the indices of the tensors that were changed in place, as far as torch counts changes."""
        now = [tensor._version for tensor in self.tensors]  # noqa: SLF001
        if now == self._versions:
            return []
        return [index for index, (then, version) in enumerate(zip(self._versions, now, strict=True)) if then != version]

    def refuse_saved(self) -> None:
        """Make tensors that autograd saved count as modified, so that a backward pass fails: their memory is reused."""
        if torch.is_grad_enabled():
            for tensor in self.tensors:
                torch.autograd.graph.increment_version(tensor)


class ParameterBinding:
    """Binds a group of weights to their modules.

    Args:
        weights: identified by module and attribute.
        device: device of the weights once they are loaded.
        gate: makes the error of a use of the weights after the close.
        changed: the buffers that modules have changed. They stay in memory, since their values are nowhere else.
    """

    def __init__(self, weights: Sequence[Weight], device: torch.device, gate: Gate, changed: ChangedBuffers) -> None:
        self._weights = list(weights)
        self.originals = [get_weight(weight) for weight in weights]
        self._placeholders = [
            torch.nn.Parameter(
                Placeholder(weight.name, original.shape, original.dtype, device, gate), requires_grad=False
            )
            for weight, original in zip(weights, self.originals, strict=True)
        ]
        self._buffers = frozenset(index for index, weight in enumerate(self._weights) if _is_buffer(weight))
        # The dict of each module that has the weight, and its key: this is done in each call.
        self._places: list[tuple[dict[str, Any], str]] = [
            (weight.module._buffers if _is_buffer(weight) else weight.module._parameters, weight.attribute)  # noqa: SLF001
            for weight in self._weights
        ]
        self._lock = make_lock()
        self._users = 0
        # The tensors of the current calls, as they were before. `None` even after an interrupt.
        self._bound: _Bound | None = None
        self._changed = changed
        for weight, placeholder in zip(self._weights, self._placeholders, strict=True):
            set_weight(weight, placeholder)

    def set_look_up(self, look_up: Callable[..., torch.Tensor]) -> None:
        """Look rows of the first weight up with this function while the weight is on disk."""
        self._placeholders[0].look_up = look_up  # type: ignore[attr-defined]

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bind tensors, until ``unbind`` has been called as often as ``bind``.

        Raises:
            RuntimeError: somebody has assigned another tensor to a parameter.
        """
        with self._lock:
            if self._buffers:
                tensors = self._with_changed(tensors)
            assigned = self._assigned(tensors)
            self._refuse_assigned(assigned)
            if self._users == 0:
                # A kept buffer is compared with nothing: it stays.
                streamed = [index for index in self._buffers if self._changed.get(self.originals[index]) is None]
                self._bound = _Bound(tensors, streamed)
            self._users += 1
            # Also if another thread has bound them: this replaces the leftovers of an interrupted call.
            self._put(tensors, assigned)

    def unbind(self) -> None:
        """Bind the placeholders and the changed buffers again, unless another thread still uses the weights.

        Raises:
            RuntimeError: a parameter was changed in place.
        """
        lost = None
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users == 0:
                bound, self._bound = self._bound, None
                # Restored first, in case what follows fails.
                assigned = self._assigned(self._placeholders if bound is None else bound.tensors)
                self._put(self._placeholders, assigned)
                if bound is not None:
                    for index, buffer in bound.changed_buffers():
                        self._changed.keep(self.originals[index], buffer)
                    lost = self._changed_parameter(bound)
                if self._buffers:
                    # Callers may read these.
                    self._put(self._with_changed(self._placeholders), assigned)
                if bound is not None:
                    bound.refuse_saved()
        if lost is not None:
            raise RuntimeError(
                f"{lost} was changed in place while it is streamed from its file, and the change will be lost; open "
                "the model again, or call model.streaming.close() first and change it then"
            )

    def check(self) -> None:
        """Raise if somebody has assigned another tensor to a parameter that is on disk."""
        with self._lock:
            self._refuse_assigned(self._assigned(self._placeholders))

    def _refuse_assigned(self, assigned: frozenset[int]) -> None:
        for index in assigned - self._buffers:
            raise RuntimeError(
                f"{self._weights[index].name} was replaced while it is streamed from its file; call "
                "model.streaming.close() first, and assign it then"
            )

    def _with_changed(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replace the buffers that a module has changed."""
        kept = [self._changed.get(original) for original in self.originals]
        return [tensor if changed is None else changed for tensor, changed in zip(tensors, kept, strict=True)]

    def _changed_parameter(self, bound: _Bound) -> str | None:
        for index in bound.changed_versions():
            # Embeddings with a maximum norm scale their rows again in each call.
            if index not in self._buffers and not getattr(self._weights[index].module, "max_norm", None):
                return self._weights[index].name
        return None

    def _assigned(self, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """Return the indices of weights in whose place somebody has assigned another tensor."""
        assigned = []
        for index, (table, attribute) in enumerate(self._places):
            current, tensor = table.get(attribute), tensors[index]
            if current is self._placeholders[index] or current is tensor:
                continue
            # The leftovers of an interrupted call are in another slot.
            origin = getattr(current, _STREAMED, None)
            if origin is None or origin != getattr(tensor, _STREAMED, origin):
                assigned.append(index)
        return frozenset(assigned)

    def _put(self, tensors: Sequence[torch.Tensor], assigned: frozenset[int]) -> None:
        for index, (table, attribute) in enumerate(self._places):
            if index not in assigned:
                table[attribute] = tensors[index]


def is_streamed(weight: Weight) -> bool:
    """Whether the module has a tensor that streaming made, and not one that the caller has assigned."""
    current = _current(weight)
    return isinstance(current, Placeholder) or hasattr(current, _STREAMED)


def _current(weight: Weight) -> torch.Tensor | None:
    module = weight.module
    return module._parameters.get(weight.attribute, module._buffers.get(weight.attribute))  # noqa: SLF001


def _is_buffer(weight: Weight) -> bool:
    return weight.attribute in weight.module._buffers  # noqa: SLF001


def _mark(tensor: torch.Tensor, origin: Origin) -> torch.Tensor:
    setattr(tensor, _STREAMED, origin)
    return tensor


def set_weight(weight: Weight, tensor: nn.Parameter | torch.Tensor) -> None:
    """Set a weight without ``nn.Module.__setattr__``, which would check it at every step."""
    module = weight.module
    if weight.attribute in module._parameters:  # noqa: SLF001
        module._parameters[weight.attribute] = tensor  # type: ignore[assignment]  # noqa: SLF001
    else:
        module._buffers[weight.attribute] = tensor  # noqa: SLF001


def get_weight(weight: Weight) -> torch.Tensor:
    """Return the current tensor of a weight."""
    tensor: torch.Tensor = getattr(weight.module, weight.attribute)
    return tensor


def refuse_loading(
    weights: Iterable[Weight],
    names: dict[nn.Module, list[str]],
    remedy: str = "call model.streaming.close() first",
) -> list[RemovableHandle]:
    """Make ``load_state_dict`` of weights fail: the next pass would bind those of the file again.

    ``names`` is filled with the refused names of each module. A hook whose list is cleared refuses nothing: an
    interrupt may come before the caller has its handle. ``remedy`` ends the error.
    """
    for weight in weights:
        names.setdefault(weight.module, []).append(weight.attribute)
    return [
        module.register_load_state_dict_pre_hook(partial(_refuse_loading, attributes, remedy))  # type: ignore[no-untyped-call]
        for module, attributes in names.items()
    ]


def _refuse_loading(
    attributes: list[str], remedy: str, _module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any
) -> None:
    for attribute in attributes:
        if prefix + attribute in state:
            raise RuntimeError(f"{prefix + attribute} is streamed from its file and cannot be loaded; {remedy}")


def view_weight(
    memory: torch.Tensor,
    at: int,
    origin: Origin,
    like: torch.Tensor,
    kind: type[BoundParameter] = FixedParameter,
) -> nn.Parameter | torch.Tensor:
    """View memory as a weight, with a version counter of its own.

    Args:
        memory: contains the weight.
        at: its offset.
        origin: its origin.
        like: the module's tensor.
        kind: the class of a parameter.
    """
    # Inference tensors have no version counter.
    with torch.inference_mode(mode=False):
        flat = memory[at : at + origin.memory_nbytes].view(origin.memory_dtype)
        shaped = flat.view(like.shape).data
        if isinstance(like, torch.nn.Parameter):
            shaped = kind(shaped, requires_grad=False)
    return _mark(shaped, origin)


def have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit for bit."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def without_views(memory: torch.Tensor, output: Any) -> Any:
    """Copy the tensors in a module's result that view its weights: their memory is about to be reused."""
    return with_copies(output, lambda leaf: _views(memory, leaf))


def _views(memory: torch.Tensor, leaf: Any) -> bool:
    if isinstance(leaf, Placeholder):
        return False
    address = leaf.data_ptr() if memory.is_cuda and type(leaf) is torch.Tensor else address_of(leaf)
    begin = memory.data_ptr()
    return address is not None and begin <= address < begin + memory.nbytes


def checked_wrapper(name: str, binding: ParameterBinding) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a wrapper for a module whose weight stays on disk: only rows of it are looked up."""

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            binding.check()
            return refuse_backward(name, forward(*args, **kwargs))

        return run

    return around


def refuse_backward(name: str, output: Any) -> Any:
    """Make ``backward`` through a module fail, because its weights are overwritten by then.

    Args:
        name: name of the module.
        output: its result.
    """
    if torch.is_grad_enabled():
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refusal(name))  # type: ignore[no-untyped-call]
    return output


def _refusal(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(_gradient: torch.Tensor) -> None:
        raise RuntimeError(
            f"there are no gradients through the module {name!r}: its weights are on disk again. Streaming is for "
            "inference; call the model under torch.no_grad(), or detach its output"
        )

    return refuse


class OriginalWeights:
    """The weights of a module before it was streamed.

    Those on the meta device do not come back at a close: torch multiplies CPU tensors by meta tensors without an error,
    and returns memory that nobody has written. Placeholders come in their place, whose use is an error.

    Args:
        weights: all streamed weights, once for each module that has them.
        gate: makes the error of a use of the placeholders.
    """

    def __init__(self, weights: Iterable[Weight], gate: Gate) -> None:
        self._weights = [(weight, get_weight(weight)) for weight in weights]
        self._gate = gate
        # By the id of the original: modules that share it share the placeholder.
        self._placeholders: dict[int, torch.Tensor] = {}
        self.returns_meta = False
        """Whether tensors on the meta device come back as well, because streaming never began."""

    def restore(self, changed: ChangedBuffers) -> None:
        """Give them back, with the changes that modules made. An interrupted call can be repeated."""
        for weight, original in self._weights:
            # A tensor that the caller has assigned in the meantime stays.
            if is_streamed(weight):
                set_weight(weight, self._restored(weight, original, changed))

    def _restored(self, weight: Weight, original: torch.Tensor, changed: ChangedBuffers) -> torch.Tensor:
        restored = changed.restored(original)
        if self.returns_meta or not restored.is_meta or isinstance(restored, Placeholder):
            return restored
        if id(original) not in self._placeholders:
            self._placeholders[id(original)] = _closed_placeholder(weight.name, original, self._gate)
        return self._placeholders[id(original)]

    def clear(self) -> None:
        """Forget them."""
        self._weights, self._placeholders = [], {}


class ChangedBuffers:
    """The tensors that modules have changed, by those that were there before streaming began.

    Modules that share one share its changes.
    """

    def __init__(self) -> None:
        self._changed: dict[int, torch.Tensor] = {}
        self._resident: dict[int, _Resident] = {}
        # Their ids stay valid.
        self._originals: list[torch.Tensor] = []

    def get(self, original: torch.Tensor) -> torch.Tensor | None:
        """Return the changed tensor, if there is one."""
        return self._changed.get(id(original))

    def keep(self, original: torch.Tensor, changed: torch.Tensor) -> None:
        """Keep a tensor that a module has changed."""
        self._originals.append(original)
        self._changed[id(original)] = changed

    def watch(self, original: torch.Tensor, loaded: torch.Tensor) -> None:
        """Remember a weight or buffer that stays in memory. Modules change it there."""
        self._originals.append(original)
        self._resident[id(original)] = _Resident(loaded)

    def restored(self, original: torch.Tensor) -> torch.Tensor:
        """Return the tensor that a module gets when streaming ends: the original, with the changes."""
        changed = self._changed.get(id(original))
        resident = self._resident.get(id(original))
        if resident is not None and resident.is_changed():
            changed = resident.tensor
        if changed is None:
            return original
        # Inference tensors could not be changed by later calls outside of that mode.
        with torch.inference_mode(mode=False):
            if has_no_values(original) or original.is_inference():
                # Modules that share it get one tensor, without the memory of the other weights.
                own = changed.detach().clone()
                if isinstance(changed, nn.Parameter):
                    own = nn.Parameter(own, requires_grad=original.requires_grad)
                self._changed[id(original)] = own
                return own
            return without_gradients(original.copy_, changed)


def _closed_placeholder(name: str, original: torch.Tensor, gate: Gate) -> torch.Tensor:
    # Inference tensors could not become parameters of other calls.
    with torch.inference_mode(mode=False):
        made: torch.Tensor = Placeholder(name, original.shape, original.dtype, original.device, gate, original.stride())
        if isinstance(original, nn.Parameter):
            made = nn.Parameter(made, requires_grad=original.requires_grad)
        # Attributes that other libraries have set.
        vars(made).update(vars(original))
    return made


class _Resident:
    """A tensor in memory, and how to notice a change of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._address, self._version = tensor.data_ptr(), tensor._version  # noqa: SLF001
        # Batch norm changes its statistics without counting.
        self._copy = None if isinstance(tensor, nn.Parameter) else tensor.clone()

    def is_changed(self) -> bool:
        """Whether it has other values or other memory than before."""
        if (self.tensor.data_ptr(), self.tensor._version) != (self._address, self._version):  # noqa: SLF001
            return True
        return self._copy is not None and not have_same_bytes(self.tensor, self._copy)
