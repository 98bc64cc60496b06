"""Replace weights by placeholders while they are on disk, and bind them while their module runs."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as tree

from deepnvme._stream.placeholder import Placeholder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from deepnvme._stream.call_gate import CallGate
    from deepnvme._stream.partition import Weight
    from deepnvme._stream.weight_origin import Origin


# Set on tensors whose memory streaming owns: the origin of their bytes.
_STREAMED = "_deepnvme_is_streamed"


class _Bound:
    """Tensors before a call, to find those that it changes."""

    def __init__(
        self, weights: Sequence[Weight], tensors: Sequence[torch.Tensor], known: Mapping[int, torch.Tensor]
    ) -> None:
        self._weights, self._tensors = weights, tensors
        self._versions = [tensor._version for tensor in tensors]  # noqa: SLF001
        # By their bytes, since batch norm changes its statistics without counting.
        self._buffers = {
            index: tensor.clone()
            for index, (weight, tensor) in enumerate(zip(weights, tensors, strict=True))
            if _is_buffer(weight) and index not in known
        }

    def changed_buffers(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield copies of the buffers that were changed."""
        for index, before in self._buffers.items():
            tensor = self._tensors[index]
            if not _have_same_bytes(before, tensor):
                # Inference tensors could not be changed by later calls outside of that mode.
                with torch.inference_mode(mode=False):
                    yield index, _mark(tensor.clone(), vars(tensor)[_STREAMED])

    def changed_parameter(self) -> str | None:
        """Return the name of a parameter that was changed."""
        for weight, tensor, version in zip(self._weights, self._tensors, self._versions, strict=True):
            is_changed = tensor._version != version and not _is_buffer(weight)  # noqa: SLF001
            # Embeddings with a maximum norm scale their rows again in each call.
            if is_changed and not getattr(weight.module, "max_norm", None):
                return weight.name
        return None

    def refuse_saved(self) -> None:
        """Make tensors that autograd saved count as modified, so that a backward pass fails: their memory is reused."""
        if torch.is_grad_enabled():
            for tensor in self._tensors:
                torch.autograd.graph.increment_version(tensor)


class ParameterBinding:
    """Binds a group of weights to their modules.

    Args:
        weights: identified by module and attribute.
        device: device of the weights once they are loaded.
        gate: explains uses of the weights after the close.
    """

    def __init__(self, weights: Sequence[Weight], device: torch.device, gate: CallGate) -> None:
        self._weights = list(weights)
        self.originals = [get_weight(weight) for weight in weights]
        self._placeholders = [
            torch.nn.Parameter(
                Placeholder(weight.name, original.shape, original.dtype, device, gate), requires_grad=False
            )
            for weight, original in zip(weights, self.originals, strict=True)
        ]
        self._lock = threading.Lock()
        self._users = 0
        # The tensors of the current calls, as they were before. `None` also after an interrupt.
        self._bound: _Bound | None = None
        # Buffers that their module has changed. They stay in memory, since their values are nowhere else.
        self._changed: dict[int, torch.Tensor] = {}
        for weight, placeholder in zip(self._weights, self._placeholders, strict=True):
            set_weight(weight, placeholder)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bind tensors, until ``unbind`` has been called as often as ``bind``.

        Raises:
            RuntimeError: somebody has assigned another tensor to a parameter.
        """
        with self._lock:
            for weight, placeholder, tensor in zip(self._weights, self._placeholders, tensors, strict=True):
                if not (_is_buffer(weight) or self._is_ours(weight, placeholder, tensor)):
                    raise RuntimeError(
                        f"{weight.name} was replaced while it is streamed from its file; call model.streaming.close() "
                        "first, and assign it then"
                    )
            if self._changed:
                tensors = [self._changed.get(index, tensor) for index, tensor in enumerate(tensors)]
            if self._users == 0:
                self._bound = _Bound(self._weights, tensors, self._changed)
            self._users += 1
            # Also if another thread has bound them: this replaces the leftovers of an interrupted call.
            self._put(tensors)

    def unbind(self) -> None:
        """Bind the placeholders again, unless another thread still uses the weights.

        Raises:
            RuntimeError: a parameter was changed in place.
        """
        lost = None
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users == 0:
                bound, self._bound = self._bound, None
                if bound is not None:
                    self._changed.update(bound.changed_buffers())
                    lost = bound.changed_parameter()
                    bound.refuse_saved()
                self._put(self._placeholders)
        if lost is not None:
            raise RuntimeError(
                f"{lost} was changed in place while it is streamed from its file, and the change will be lost; open "
                "the model again, or call model.streaming.close() first and change it then"
            )

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for weight, placeholder, tensor in zip(self._weights, self._placeholders, tensors, strict=True):
            if self._is_ours(weight, placeholder, tensor):
                set_weight(weight, tensor)

    @staticmethod
    def _is_ours(weight: Weight, placeholder: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Whether the module has the tensor that this binding gave it, and not one that somebody assigned."""
        current = _current(weight)
        if current is placeholder or current is tensor:
            return True
        # The leftovers of an interrupted call are in another slot.
        origin = getattr(current, _STREAMED, None)
        return origin is not None and (tensor is placeholder or origin == getattr(tensor, _STREAMED, None))


def is_streamed(weight: Weight) -> bool:
    """Whether the module has a tensor that streaming made, and not one that the caller has assigned."""
    current = _current(weight)
    return isinstance(current, Placeholder) or hasattr(current, _STREAMED)


def _current(weight: Weight) -> torch.Tensor | None:
    module = weight.module
    return module._parameters.get(weight.attribute, module._buffers.get(weight.attribute))  # noqa: SLF001


def _is_buffer(weight: Weight) -> bool:
    return weight.attribute in weight.module._buffers  # noqa: SLF001


def _have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


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


def refuse_loading(weights: Iterable[Weight]) -> list[RemovableHandle]:
    """Make ``load_state_dict`` of weights fail: the next pass would bind those of the file again."""
    names: dict[nn.Module, list[str]] = {}
    for weight in weights:
        names.setdefault(weight.module, []).append(weight.attribute)
    return [
        module.register_load_state_dict_pre_hook(partial(_refuse_loading, attributes))  # type: ignore[no-untyped-call]
        for module, attributes in names.items()
    ]


def _refuse_loading(attributes: list[str], _module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for attribute in attributes:
        if prefix + attribute in state:
            raise RuntimeError(
                f"{prefix + attribute} is streamed from its file and cannot be loaded; call model.streaming.close() "
                "first"
            )


def view_weight(memory: torch.Tensor, at: int, origin: Origin, like: torch.Tensor) -> nn.Parameter | torch.Tensor:
    """View memory as a weight, with a version counter of its own."""
    # Inference tensors have none.
    with torch.inference_mode(mode=False):
        flat = memory[at : at + origin.memory_nbytes].view(origin.memory_dtype)
        shaped = flat.view(like.shape).data
        if isinstance(like, torch.nn.Parameter):
            shaped = torch.nn.Parameter(shaped, requires_grad=False)
    return _mark(shaped, origin)


def without_views(memory: torch.Tensor, output: Any) -> Any:
    """Copy the tensors in a module's result that view its weights: their memory is about to be reused."""
    if not any(_views(memory, leaf) for leaf in tree.tree_leaves(output)):
        return output
    return tree.tree_map(lambda leaf: leaf.clone() if _views(memory, leaf) else leaf, output)


def _views(memory: torch.Tensor, leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Placeholder) or leaf.layout is not torch.strided:
        return False
    if leaf.device != memory.device or leaf.is_nested or leaf.numel() == 0:
        return False
    begin = memory.data_ptr()
    return begin <= leaf.data_ptr() < begin + memory.nbytes


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
            f"there are no gradients through {name}: its weights are on disk again. Streaming is for inference; call "
            "the model under torch.no_grad(), or detach its output"
        )

    return refuse
