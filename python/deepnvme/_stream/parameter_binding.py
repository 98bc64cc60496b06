"""What stands in a module where a weight is on disk: shape, dtype and device of it, and no bytes."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from deepnvme._stream.partition import Weight
    from deepnvme._stream.weight_origin import Origin


class Placeholder(torch.Tensor):
    """A weight that is not in memory.

    Whoever counts parameters, or asks for dtype and device, gets an answer; whoever computes with it is told that the
    module which it belongs to was gone past.
    """

    weight_name: str

    @staticmethod
    def __new__(  # noqa: PYI034 (what torch makes is of the class that it is told)
        cls: type[Placeholder], name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Placeholder:
        """Make one."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        made.weight_name = name
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise RuntimeError(f"{self.weight_name} is on disk; what is to be saved has to be in memory")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Placeholder({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse whatever needs bytes."""
        first = args[0] if args else None
        if func in _ALIASES and isinstance(first, Placeholder):
            return Placeholder(first.weight_name, first.shape, first.dtype, first.device)
        names = [each.weight_name for each in (*args, *(kwargs or {}).values()) if isinstance(each, Placeholder)]
        what = names[0] if names else "a weight"
        raise RuntimeError(
            f"{what} is on disk: it is in memory only while the module that it belongs to runs. {func} was called on "
            "it from elsewhere; call the module itself, or close the streaming and load the weights into memory"
        )


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def make_placeholder(name: str, like: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """Make what stands for a parameter while it is on disk."""
    return torch.nn.Parameter(Placeholder(name, like.shape, like.dtype, device), requires_grad=False)


class ParameterBinding:
    """The weights that come and go together.

    Args:
        weights: by the modules that have them.
        device: of the weights when they are there.
    """

    def __init__(self, weights: Sequence[Weight], device: torch.device) -> None:
        self._weights = list(weights)
        self.originals = [get_weight(weight) for weight in weights]
        self._placeholders = [
            make_placeholder(weight.name, original, device)
            for weight, original in zip(weights, self.originals, strict=True)
        ]
        self._lock = threading.Lock()
        self._users = 0
        self._put(self._placeholders)

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the modules use these, until as many calls of ``hide`` have come."""
        with self._lock:
            self._users += 1
            # Also where another thread has done so: what a call that was broken off has left here is replaced.
            self._put(tensors)

    def unbind(self) -> None:
        """Take them out again, unless another thread uses them still."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users == 0:
                self._put(self._placeholders)

    def restore(self) -> None:
        """Have the modules use what stood in them at first."""
        with self._lock:
            self._put(self.originals)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            set_weight(weight, tensor)


def set_weight(weight: Weight, tensor: nn.Parameter | torch.Tensor) -> None:
    """Have a module use that tensor, past ``nn.Module.__setattr__``, which would look at it at every step."""
    module = weight.module
    if weight.attribute in module._parameters:  # noqa: SLF001
        module._parameters[weight.attribute] = tensor  # type: ignore[assignment]  # noqa: SLF001
    else:
        module._buffers[weight.attribute] = tensor  # noqa: SLF001


def get_weight(weight: Weight) -> torch.Tensor:
    """Look at what a module has now."""
    tensor: torch.Tensor = getattr(weight.module, weight.attribute)
    return tensor


def view_weight(memory: torch.Tensor, at: int, origin: Origin, like: torch.Tensor) -> nn.Parameter | torch.Tensor:
    """See a weight in memory that has its bytes."""
    flat = memory[at : at + origin.memory_nbytes].view(origin.memory_dtype)
    shaped = flat.view(like.shape)
    return torch.nn.Parameter(shaped, requires_grad=False) if isinstance(like, torch.nn.Parameter) else shaped


def wrap_forward(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Have a module run by what ``around`` makes of its ``forward``.

    Returns:
        What takes it off again.
    """
    own = module.__dict__.get("forward")
    forward = module.forward
    wrapped = functools.wraps(forward)(around(forward))
    module.forward = wrapped

    def unwrap() -> None:
        if module.__dict__.get("forward") is not wrapped:
            return  # somebody has put something else around it, which goes on to call this
        if own is None:
            del module.forward
        else:
            module.forward = own

    return unwrap


def refuse_backward(memory: torch.Tensor, name: str, output: Any) -> Any:
    """See to it that nobody computes gradients with weights that have made room for others by then.

    Args:
        memory: what the weights lie in.
        name: of the module.
        output: what it has computed.
    """
    if torch.is_grad_enabled():
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refusal(name))  # type: ignore[no-untyped-call]
        # For all outputs of other kinds: what autograd has kept counts as changed.
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
