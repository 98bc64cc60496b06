"""Replace weights by placeholders while they are on disk, and bind them while their module runs."""

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
    """Shape, dtype and device of a weight on disk, without bytes.

    Code that counts parameters or asks for dtype and device works. Code that computes with it gets an error that
    explains that it bypassed the module.
    """

    weight_name: str

    @staticmethod
    def __new__(  # noqa: PYI034 (torch returns an instance of the given class)
        cls: type[Placeholder], name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Placeholder:
        """Make one."""
        made: Placeholder = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # noqa: SLF001
        made.weight_name = name
        return made

    def __reduce_ex__(self, _protocol: object) -> Any:
        raise RuntimeError(f"{self.weight_name} is on disk and cannot be pickled; load the weights into memory first")

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Placeholder({self.weight_name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse operations that need bytes."""
        first = args[0] if args else None
        if func in _ALIASES and isinstance(first, Placeholder):
            return Placeholder(first.weight_name, first.shape, first.dtype, first.device)
        names = [each.weight_name for each in (*args, *(kwargs or {}).values()) if isinstance(each, Placeholder)]
        name = names[0] if names else "a weight"
        raise RuntimeError(
            f"{name} is on disk: it is in memory only while its module runs. {func} was called on it from elsewhere; "
            "call the module itself, or close the streaming and load the weights into memory"
        )


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def make_placeholder(name: str, like: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    """Make a placeholder parameter."""
    return torch.nn.Parameter(Placeholder(name, like.shape, like.dtype, device), requires_grad=False)


class ParameterBinding:
    """Binds a group of weights to their modules.

    Args:
        weights: identified by module and attribute.
        device: device of the weights once they are loaded.
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
        """Bind tensors, until ``unbind`` has been called as often as ``bind``."""
        with self._lock:
            self._users += 1
            # Also if another thread has bound them: this replaces the leftovers of an interrupted call.
            self._put(tensors)

    def unbind(self) -> None:
        """Bind the placeholders again, unless another thread still uses the weights."""
        with self._lock:
            self._users = max(self._users - 1, 0)
            if self._users == 0:
                self._put(self._placeholders)

    def restore(self) -> None:
        """Bind the original tensors again."""
        with self._lock:
            self._put(self.originals)

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        for weight, tensor in zip(self._weights, tensors, strict=True):
            set_weight(weight, tensor)


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


def view_weight(memory: torch.Tensor, at: int, origin: Origin, like: torch.Tensor) -> nn.Parameter | torch.Tensor:
    """View memory as a weight."""
    flat = memory[at : at + origin.memory_nbytes].view(origin.memory_dtype)
    shaped = flat.view(like.shape)
    return torch.nn.Parameter(shaped, requires_grad=False) if isinstance(like, torch.nn.Parameter) else shaped


def wrap_forward(module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Replace a module's ``forward`` by ``around(forward)``.

    Hooks would not do: after Ctrl-C PyTorch skips the hook behind, and calls it even if the one in front failed.

    Returns:
        A function that undoes it.
    """
    own = module.__dict__.get("forward")
    forward = module.forward
    inner = around(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    module.forward = wrapped

    def unwrap() -> None:
        nonlocal inner
        inner = forward
        if module.__dict__.get("forward") is not wrapped:
            return  # another wrapper surrounds this one and keeps calling it
        if own is None:
            del module.forward
        else:
            module.forward = own

    return unwrap


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
