"""Replace weights by placeholders while they are on disk, and bind them while their module runs."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._stream.placeholder import Placeholder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from deepnvme._stream.call_gate import CallGate
    from deepnvme._stream.partition import Weight
    from deepnvme._stream.weight_origin import Origin


# Set on tensors whose memory streaming owns.
_STREAMED = "_deepnvme_is_streamed"


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
        for weight, placeholder in zip(self._weights, self._placeholders, strict=True):
            set_weight(weight, placeholder)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bind tensors, until ``unbind`` has been called as often as ``bind``.

        Raises:
            RuntimeError: somebody has assigned another tensor to a weight.
        """
        with self._lock:
            for weight in self._weights:
                if not is_streamed(weight):
                    raise RuntimeError(
                        f"{weight.name} was replaced while it is streamed from its file; call model.streaming.close() "
                        "first, and assign it then"
                    )
            self._users += 1
            # Also if another thread has bound them: this replaces the leftovers of an interrupted call.
            self._put(tensors)

    def unbind(self) -> None:
        """Bind the placeholders again, unless another thread still uses the weights."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users == 0:
                self._put(self._placeholders)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            if is_streamed(weight):
                set_weight(weight, tensor)


def is_streamed(weight: Weight) -> bool:
    """Whether the module has the tensor that streaming gave it, and not one that somebody assigned."""
    module = weight.module
    current = module._parameters.get(weight.attribute, module._buffers.get(weight.attribute))  # noqa: SLF001
    return isinstance(current, Placeholder) or hasattr(current, _STREAMED)


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
    """View memory as a weight."""
    flat = memory[at : at + origin.memory_nbytes].view(origin.memory_dtype)
    shaped = flat.view(like.shape)
    if isinstance(like, torch.nn.Parameter):
        shaped = torch.nn.Parameter(shaped, requires_grad=False)
    setattr(shaped, _STREAMED, True)
    return shaped


def refuse_backward(memory: torch.Tensor, name: str, output: Any) -> Any:
    """Make ``backward`` through a module fail, because its weights are overwritten by then.

    Args:
        memory: the memory that contains the weights.
        name: name of the module.
        output: its result.
    """
    if torch.is_grad_enabled():
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refusal(name))  # type: ignore[no-untyped-call]
        # For all other kinds of outputs: tensors that autograd saved count as modified.
        if not memory.is_inference():
            torch.autograd.graph.increment_version(memory)
    return output


def _refusal(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(_gradient: torch.Tensor) -> None:
        raise RuntimeError(
            f"there are no gradients through {name}: its weights are on disk again. Streaming is for inference; call "
            "the model under torch.no_grad(), or detach its output"
        )

    return refuse
