"""``deepnvme.offload``: everything that training holds, under one bound."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from deepnvme import optim
from deepnvme._checkpoint.load_memory import BufferPool
from deepnvme._offload import disk_speed
from deepnvme._offload.activations import ActivationOffload
from deepnvme._offload.begin import begin, check_module, prepare
from deepnvme._offload.groups import find_shortage, partitioned
from deepnvme._offload.plan import OffloadPlan, plan_parts
from deepnvme._swap.shared import SharedSwapper, Use
from deepnvme._swap.swapper import Swapper
from deepnvme._swap.values import make_swap_folders
from deepnvme._utils.memory import check_available
from deepnvme._utils.public import parse_bytes, public
from deepnvme.errors import UnsupportedError
from deepnvme.optim._optimizer import OptimizerBase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from deepnvme._deepnvme import Engine
    from deepnvme._offload.parameter_offload import ParameterOffload

_Module = TypeVar("_Module", bound=nn.Module)

PARTS = ("parameters", "gradients", "state", "activations")
# A block's parameters take at most this fraction of the memory, so that a group of state, its gradients and activations
# find room as well, however the memory is divided.
_BLOCK_DIVISOR = 2
# A step borrows a few groups at a time, each of whole pages.
_MEMORY_BYTES_MIN = 64 << 10
# Idle buffers, into which activations are read, take this fraction of the memory, up to a number of bytes.
_BUFFERS_DIVISOR, _BUFFERS_BYTES_MAX = 16, 64 << 20
# Smaller activations stay in memory.
_ACTIVATION_BYTES_MIN = 64 << 10
_CLASSES: dict[type, type] = {
    torch.optim.Adam: optim.Adam,
    torch.optim.AdamW: optim.AdamW,
    torch.optim.SGD: optim.SGD,
    torch.optim.Adagrad: optim.Adagrad,
}


@public
def offload(
    model: _Module,
    optimizer: type[torch.optim.Optimizer],
    *,
    memory: str | int,
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    params: Iterable[Any] | None = None,
    in_backward: bool = False,
    checksums: bool = False,
    engine: Engine | None = None,
    **settings: Any,
) -> tuple[_Module, Any]:
    """Train a model that exceeds memory: weights, gradients, optimizer state and activations share one bound.

    All of them live in one swap file, and in ``memory`` bytes while they are used. The first step records the order in
    which they are used. From then on, memory holds those that are needed next, and they are read ahead. If everything
    fits, nothing is read or written.

    Losses and weights are those of the same optimizer of :mod:`deepnvme.optim` in memory, bit for bit, unless gradients
    are clipped or rescaled. For fp32 weights and moments they are also those of ``torch.optim``, unless ``lr`` or a
    beta is a tensor; bf16 and fp16 weights get fp32
    master weights, which torch lacks. A step consumes the gradients: ``.grad`` is ``None`` after it. It is
    :func:`offload_parameters`, an optimizer of :mod:`deepnvme.optim` with state and gradients on disk, and
    :func:`offload_activations`, and has their limits. It works with learning-rate schedulers, gradient accumulation,
    clipping, ``torch.autocast``, frozen parameters (LoRA), tied weights and activation checkpointing.

    Args:
        model: a model with parameters in CPU memory, or on the meta device: those become zeros on disk, which
            ``model.offloading.load_state_dict`` fills. It is changed in place.
        optimizer: a class: ``Adam``, ``AdamW``, ``SGD`` or ``Adagrad`` of ``torch.optim`` or ``deepnvme.optim``, or
            ``deepnvme.optim.Lion``.
        memory: bytes for all parts together, such as ``"6GB"``. Memory of the computation itself comes on top: the
            tensors that operations use at the moment, activations of less than 64 KiB, and small weights.
        swap_dir: a folder on the NVMe drive, or several, one per drive. A missing folder is created. Nothing in it
            outlives the process.
        params: the parameters to train, or param groups. Default: all parameters that require gradients.
        in_backward: update the parameters of a block once its backward pass is done. Faster, and no gradient goes to
            disk. ``step()`` must follow each ``backward()``: gradient accumulation, clipping by the total norm and
            ``GradScaler`` are not possible. Default False.
        checksums: checksum everything that is written, and verify it when it is read. Default False.
        engine: the engine for the swap file. Default: the default engine.
        **settings: arguments of the optimizer, such as ``lr``, ``weight_decay`` or ``moments="8bit"``.

    Returns:
        The same model, and the optimizer. ``model.offloading`` is the :class:`ParameterOffload`. ``optimizer.plan`` is
        an :class:`OffloadPlan`. ``optimizer.close()`` ends it: weights are back in memory, and the state is gone.

    Raises:
        MemoryError: ``memory`` is too little, and the message states how much is enough; or the machine has less.
        OSError: the disk is full or fails. The parameters are in memory, as before.
        TypeError: ``optimizer`` is no class, or ``model`` no module.
        deepnvme.errors.UnsupportedError: the model or the optimizer cannot be offloaded; the message states why.
        ValueError: a setting is out of range, or no parameter requires gradients.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> model, optimizer = deepnvme.offload(model, torch.optim.AdamW, lr=1e-3, memory="16MB", swap_dir=".")
        >>> for step in range(3):
        ...     model(torch.randn(8, 256)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> optimizer.plan.is_measured
        True
        >>> optimizer.close()
    """
    check_module(model, "offload")
    made_by = _class_for(optimizer)
    for name in ("swap_gradients", "capturable", "differentiable"):
        if name in settings:
            msg = f"offload has no argument {name!r}"
            raise TypeError(msg)
    nbytes = parse_bytes(memory)
    check_available(nbytes)
    prepare(model)
    half = nbytes // _BLOCK_DIVISOR
    lacking = find_shortage(model, partitioned(model, half), half)
    if lacking is None and nbytes < _MEMORY_BYTES_MIN:
        msg = f"memory={nbytes} is too little for any model; memory={_MEMORY_BYTES_MIN} is the least"
        raise MemoryError(msg)
    if lacking is not None:
        enough = max(lacking.enough * _BLOCK_DIVISOR, _MEMORY_BYTES_MIN)
        msg = (
            f"memory={nbytes} is too little: {lacking.name} alone has {lacking.nbytes:,} bytes, and one layer may take "
            f"half of memory; memory={enough} is enough"
        )
        raise MemoryError(msg)
    buffers = BufferPool(min(nbytes // _BUFFERS_DIVISOR, _BUFFERS_BYTES_MAX))
    shared_bytes = nbytes - buffers.bytes_max
    shared = SharedSwapper(Swapper(swap_dir, memory=shared_bytes, checksums=checksums, engine=engine))
    parts = (shared.part("parameters"), shared.part("state", {"grad": "gradients"}), shared.part("activations"))
    undo: list[Any] = [part.close for part in parts]
    try:
        # Closing the swapper, as the end of the interpreter does, ends this.
        speeds = disk_speed.measure(make_swap_folders(swap_dir), engine, lambda: shared.swapper.prefetch(()))
        offloading = begin(model, half, parts[0])
        # The last first: the model is as before.
        undo += [lambda: delattr(model, "offloading"), offloading.close]
        chosen = [one for one in model.parameters() if one.requires_grad] if params is None else params
        made = made_by(chosen, swap_dir=parts[1], memory=shared_bytes, swap_gradients=not in_backward, **settings)
        # Its hooks take gradients.
        undo.append(made.close)
        activations = ActivationOffload(parts[2], buffers, _ACTIVATION_BYTES_MIN, model)
        undo.append(activations.close)
        activations.wrap(model)
        run = _TrainingRun(shared, offloading, activations, made, speeds)
        offloading.attach(made, in_backward=in_backward)
        run.begin()
    except BaseException:
        while undo:
            undo.pop()()
        raise
    return model, made


def _class_for(optimizer: object) -> type[OptimizerBase]:
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        msg = f"offload makes the optimizer: pass its class, and its settings by name: torch.optim.{name}, lr=1e-4"
        raise TypeError(msg)
    if not isinstance(optimizer, type):
        msg = f"optimizer is {optimizer!r}; it must be a class, such as torch.optim.AdamW"
        raise TypeError(msg)
    found = _CLASSES.get(optimizer, optimizer)
    if not issubclass(found, OptimizerBase):
        known = ", ".join(cls.__name__ for cls in _CLASSES)
        msg = f"{optimizer.__qualname__} keeps no state on disk; use {known} of torch.optim, or one of deepnvme.optim"
        raise UnsupportedError(msg)
    return found


class _TrainingRun:
    """What :func:`offload` has begun."""

    def __init__(
        self,
        shared: SharedSwapper,
        offloading: ParameterOffload,
        activations: ActivationOffload,
        optimizer: OptimizerBase,
        speeds: tuple[float, float] | None,
    ) -> None:
        self._shared, self._offloading, self._activations, self._speeds = shared, offloading, activations, speeds
        self._optimizer, self._process = weakref.ref(optimizer), os.getpid()

    def begin(self) -> None:
        """Follow the steps of the optimizer, and end with it."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._offloading._on_step_end = self._end_step  # noqa: SLF001
            optimizer._make_plan = self._plan  # noqa: SLF001
            optimizer._detach_on_close(self._close)  # noqa: SLF001

    def _end_step(self) -> None:
        self._activations._restart_keys()  # noqa: SLF001
        self._shared.end_step()

    def _close(self) -> None:
        if os.getpid() != self._process:
            return  # it belongs to the parent
        self._activations.close()
        self._offloading.close()

    def _plan(self) -> OffloadPlan:
        step = self._shared.step
        uses, sizes = (step, self._shared.sizes) if step else self._expected()
        memory = self._shared.swapper.stats().memory_bytes
        read, write = (None, None) if self._speeds is None else self._speeds
        parts = plan_parts(uses, sizes, memory, PARTS)
        return OffloadPlan(memory, parts, bool(step), read, write, self._shared.compute_s)

    def _expected(self) -> tuple[list[Use], dict[str, int]]:
        """Return the uses of a step before one was made: in module order, and without activations."""
        optimizer = self._optimizer()
        if optimizer is None:
            return [], {}
        group_of = self._offloading._group_of  # noqa: SLF001
        state_bytes: dict[str, int] = {}
        gradient_bytes: dict[str, int] = {}
        for settings in optimizer.param_groups:
            for param in settings["params"]:
                group = group_of.get(id(param))
                key = "" if group is None else group.key
                kinds = optimizer._kinds(param, settings)  # noqa: SLF001
                needed = sum(kind.format.nbytes(param.numel()) for kind in kinds)
                state_bytes[key] = state_bytes.get(key, 0) + needed
                gradient_bytes[key] = gradient_bytes.get(key, 0) + param.nbytes
        groups = {group.key: group.nbytes for group in dict.fromkeys(group_of.values())}
        sizes = {**groups, **{f"state {key}": one for key, one in state_bytes.items()}}
        sizes.update((f"gradient {key}", one) for key, one in gradient_bytes.items())
        uses = [Use("parameters", key, "read") for key in groups]
        for key in reversed(groups):
            uses.append(Use("parameters", key, "read"))
            if key in gradient_bytes:
                uses.append(Use("gradients", f"gradient {key}", "create"))
        if "" in gradient_bytes:
            uses.append(Use("gradients", "gradient ", "create"))
        for key in state_bytes:
            if key:
                uses.append(Use("parameters", key, "change"))
            uses += [Use("state", f"state {key}", "change"), Use("gradients", f"gradient {key}", "read")]
            uses.append(Use("gradients", f"gradient {key}", "delete"))
        return uses, sizes
