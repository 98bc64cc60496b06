"""``deepnvme.offload_parameters``: check a model, and move its parameters to disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from deepnvme._modules.weight_classes import foreign_attributes, is_on_disk
from deepnvme._offload.parameter_offload import ParameterOffload
from deepnvme._swap.swapper import Swapper
from deepnvme._utils.memory import check_available
from deepnvme._utils.public import parse_bytes, public
from deepnvme._utils.shards import is_dtensor
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from deepnvme._deepnvme import Engine
    from deepnvme._swap.shared import SwapperPart


@public
def offload_parameters(
    model: nn.Module,
    *,
    memory: str | int,
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    checksums: bool = False,
    engine: Engine | None = None,
) -> ParameterOffload:
    """Keep a model's parameters on disk during training.

    A block, such as a layer of a transformer, has its parameters in memory while it runs.

    Each block's parameters are loaded before its forward and backward passes, and released afterwards. The first step
    records the order. From then on, the next blocks are loaded during computation. Results equal those of a model in
    memory bit for bit, unless gradients on disk are clipped or rescaled. Activation checkpointing, shared and frozen
    parameters, gradient accumulation and ``torch.autocast`` work. Autocast computes as with ``cache_enabled=False``.

    Frozen parameters are written once, trained ones after each step. Gradients stay in memory.

    Args:
        model: a model with parameters in CPU memory, or on the meta device. Meta parameters become zeros without ever
            being in memory as a whole; ``load_state_dict`` fills them. The model is changed in place.
        memory: bytes for parameters, such as ``"4GB"``. The parameters of small modules (at most 64 KiB and
            1/1024 of ``memory`` each, an eighth of it together), and those of modules outside of all blocks, stay in
            memory in addition.
        swap_dir: a folder on the NVMe drive, or several, one per drive. A missing folder is created. Nothing in it
            outlives the process.
        checksums: checksum everything that is written, and verify it when it is read. Default False.
        engine: the engine to use. Default: the default engine.

    Returns:
        ``model.offloading``, with ``attach(optimizer)``, ``gathered(parameters)``, ``load_state_dict(state)``,
        ``save(path)``, ``stats()`` and ``close()``. ``model.state_dict()`` works as usual and needs memory for all
        parameters.

    Raises:
        MemoryError: one block needs more memory, or the machine has less.
        OSError: the disk is full or fails. The parameters are in memory, as before; if they cannot be read back,
            ``model.offloading.close()`` tries again.
        deepnvme.errors.UnsupportedError: the model cannot be offloaded; the message states why.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=".")
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> offloading.attach(optimizer)
        >>> for step in range(3):
        ...     model(torch.randn(8, 256)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> offloading.close()
    """
    check_module(model, "offload_parameters")
    nbytes = parse_bytes(memory)
    check_available(nbytes)
    prepare(model)
    return begin(model, nbytes, Swapper(swap_dir, memory=nbytes, checksums=checksums, engine=engine))


def prepare(model: nn.Module) -> None:
    """Replace parameters on the meta device, and check that all parameters can be moved.

    Raises:
        UnsupportedError: a parameter cannot be moved, or was moved before.
    """
    earlier = getattr(model, "offloading", None)
    if isinstance(earlier, ParameterOffload) and not earlier.is_closed:
        raise UnsupportedError(
            "the parameters of this model are offloaded already; call model.offloading.close() first"
        )
    _replace_meta_parameters(model)
    for name, parameter in model.named_parameters():
        if is_on_disk(parameter):
            raise UnsupportedError(
                f"{name} is on disk already: a part of this model, or a model that shares it, is offloaded or "
                "streamed; close that first"
            )
        if is_dtensor(parameter):
            raise UnsupportedError(
                f"{name} is a DTensor (FSDP or tensor parallelism), and only whole parameters can be offloaded; "
                "keep the state of the optimizer on disk instead: deepnvme.optim.AdamW(..., swap_dir=, memory=)"
            )
        if parameter.device.type != "cpu":
            raise UnsupportedError(f"{name} is on {parameter.device}; only CPU parameters can be offloaded")
        if parameter.layout is not torch.strided or parameter.is_nested or parameter.is_quantized:
            raise UnsupportedError(
                f"{name} is not one block of memory (sparse, nested or quantised) and cannot be offloaded"
            )


def begin(model: nn.Module, nbytes: int, swapper: Swapper | SwapperPart) -> ParameterOffload:
    """Move the parameters of a prepared model. The swapper is closed with the result, or on an error."""
    try:
        offloaded = ParameterOffload(model, nbytes, swapper)
    except BaseException:
        swapper.close()
        raise
    # Before anything is moved: if moving back fails as well, this is the way to try again.
    model.offloading = offloaded  # type: ignore[assignment]
    try:
        offloaded._begin(model)  # noqa: SLF001
    except BaseException:
        offloaded.close()
        del model.offloading
        raise
    return offloaded


def _replace_meta_parameters(model: nn.Module) -> None:
    """Replace each parameter on the meta device by zeros that need no memory.

    A parameter cannot change its device, so these are new objects. Shared parameters stay shared.

    Raises:
        UnsupportedError: a buffer is on the meta device, and its values are unknown.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise UnsupportedError(
                f"the buffer {name} is on the meta device and has no values; assign a tensor to it first"
            )
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                zero = torch.zeros((), dtype=parameter.dtype)
                made[parameter] = nn.Parameter(zero.expand(parameter.shape), requires_grad=parameter.requires_grad)
                vars(made[parameter]).update(foreign_attributes(parameter))
            module._parameters[name] = made[parameter]  # noqa: SLF001


def check_module(model: object, function: str) -> None:
    """Raise ``TypeError`` if the argument of a function is no module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, not {type(model).__name__}")
