"""Surround calls of modules: replaced methods, hooks, refusals of recorded calls, and copies of views of weights."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils import _pytree as tree
from torch.utils.hooks import RemovableHandle

from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterable

    from torch import nn

_Mode = torch._C._TorchDispatchModeKey  # noqa: SLF001
_RECORDING_MODES = {_Mode.FAKE: "FakeTensorMode", _Mode.PROXY: "make_fx", _Mode.FUNCTIONAL: "functionalization"}


def wrap_forward(
    module: nn.Module,
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
    undo: list[Callable[[], object]],
    method: str = "forward",
) -> None:
    """Replace a module's ``forward`` by ``around(forward)``.

    Hooks would not do: after Ctrl-C PyTorch skips the hook behind, and calls it even if the one in front failed.

    Args:
        module: the module.
        around: makes the replacement.
        undo: gets a function that undoes it, before it is done: an interrupt may come at any moment.
        method: the method to replace. ``torch.compile`` leaves it out of its graphs: it would record the weights of
            the moment.
    """
    own = module.__dict__.get(method)
    forward = getattr(module, method)
    inner = around(forward)

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return untraced(inner, *args, **kwargs)

    wrapped._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001

    def unwrap() -> None:
        nonlocal inner
        inner = forward
        if module.__dict__.get(method) is not wrapped:
            return  # another wrapper surrounds this one and keeps calling it
        if own is None:
            delattr(module, method)
        else:
            setattr(module, method, own)

    undo.append(unwrap)
    setattr(module, method, wrapped)


def wrap_call(
    module: nn.Module, around: Callable[[Callable[..., Any]], Callable[..., Any]], undo: list[Callable[[], object]]
) -> None:
    """Replace a module's call, with its hooks, and its ``forward`` if it is called directly.

    Hooks that make a weight before ``forward``, as those of pruning and ``weight_norm`` do, also run inside.

    Args:
        module: the module.
        around: makes the replacement. It surrounds a call once in each thread.
        undo: as for ``wrap_forward``.
    """
    # By thread. Changed without calls, so that Ctrl-C cannot come in between.
    inside: dict[int, bool] = {}

    def around_once(method: Callable[..., Any]) -> Callable[..., Any]:
        surrounded = around(method)

        def run(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            if inside.get(thread):
                return method(*args, **kwargs)
            try:
                inside[thread] = True
                return surrounded(*args, **kwargs)
            finally:
                inside[thread] = False

        return run

    for method in ("forward", "_call_impl"):
        wrap_forward(module, around_once, undo, method)


# `_call` without tracing, once it was needed: making it imports torch._dynamo, which takes seconds.
_disabled: list[Callable[..., Any]] = []


def untraced(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that torch.compile must not trace into. Its caller needs ``_torchdynamo_disable``."""
    if "torch._dynamo" not in sys.modules:
        return call(*args, **kwargs)
    if not _disabled:
        _disabled.append(torch.compiler.disable(_call))  # type: ignore[no-untyped-call]
    return _disabled[0](call, *args, **kwargs)


def add_hook(
    hooks: dict[int, Any], hook: Callable[..., Any], undo: list[Callable[[], object]], *, first: bool = False
) -> None:
    """Register a hook, as torch's ``register_...`` functions do.

    ``undo`` gets the function that removes it before it is there: an interrupt may come at any moment.
    """
    handle = RemovableHandle(hooks)
    undo.append(handle.remove)
    hooks[handle.id] = hook
    if first:
        cast("OrderedDict[int, Any]", hooks).move_to_end(handle.id, last=False)


def refuse_recording(model: str, arguments: Iterable[Any]) -> None:
    """Raise if a call is recorded or transformed.

    Weights from disk are in memory while their layer runs, and the memory then gets other weights. A recorded program
    would keep the memory. A transform wraps the weights, or sees placeholders.

    Args:
        model: says which model, for the error.
        arguments: the arguments of the call.

    Raises:
        UnsupportedError: the call is recorded or transformed.
    """
    if (recorder := _recorder(arguments)) is not None:
        raise UnsupportedError(
            f"{model} cannot be traced, exported or transformed ({recorder}): its weights are on disk, and in memory "
            "only while their layer runs. Do that with a model whose weights are in memory"
        )


def with_copies(output: Any, is_view: Callable[[Any], bool]) -> Any:
    """Replace the tensors in a module's result that are views by copies, even in data classes and simple objects."""

    def copied(leaf: Any) -> Any:
        if is_view(leaf):
            return leaf.clone()
        if dataclasses.is_dataclass(leaf) or isinstance(leaf, types.SimpleNamespace):
            for name, value in [*vars(leaf).items()]:
                object.__setattr__(leaf, name, with_copies(value, is_view))
        return leaf

    leaves = tree.tree_leaves(output)
    if all(copied(leaf) is leaf for leaf in leaves):
        return output
    return tree.tree_map(copied, output)


def _recorder(arguments: Iterable[Any]) -> str | None:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # noqa: SLF001
        return "torch.func"
    if torch._C._get_tracing_state() is not None:  # noqa: SLF001
        return "torch.jit.trace"
    if torch._C._len_torch_dispatch_stack():  # noqa: SLF001
        for mode, name in _RECORDING_MODES.items():
            if torch._C._get_dispatch_mode(mode) is not None:  # noqa: SLF001
                return name
    if any(isinstance(argument, torch.fx.Proxy) for argument in arguments):
        return "torch.fx"
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if is_used and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph"
    return None


def _call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(*args, **kwargs)
