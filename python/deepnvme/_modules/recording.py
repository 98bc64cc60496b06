"""Refuse calls that are recorded or transformed: they would use the weights of another moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

_Mode = torch._C._TorchDispatchModeKey  # noqa: SLF001
_RECORDING_MODES = {_Mode.FAKE: "FakeTensorMode", _Mode.PROXY: "make_fx", _Mode.FUNCTIONAL: "functionalization"}


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
