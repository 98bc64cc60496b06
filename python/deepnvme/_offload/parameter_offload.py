"""``model.offloading``: a model whose parameters are on disk between uses."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from deepnvme._checkpoint.lazy import LazyTensor
from deepnvme._checkpoint.save import SaveOptions
from deepnvme._modules.calls import add_hook, untraced, wrap_call, wrap_forward
from deepnvme._modules.weight_classes import is_on_disk
from deepnvme._offload.groups import find_blocks, find_misplaced
from deepnvme._offload.passes import BlockRunner, save_references
from deepnvme._offload.residence import Residence, fingerprint
from deepnvme._offload.state_dicts import ShardSaver, fill_state_dicts, load_hooks_done
from deepnvme._offload.stepping import OptimizerStepper
from deepnvme._utils.closing import ClosesAtEnd
from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.public import parse_bytes, public
from deepnvme._utils.tensors import address_of, cast_refusal
from deepnvme.errors import ClosedError, InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from deepnvme._offload.groups import ParameterGroup
    from deepnvme._swap.shared import SwapperPart
    from deepnvme._swap.swapper import Swapper
    from deepnvme._swap.values import SwapStats
    from deepnvme._utils.terminal import ProgressArgument


@public
class ParameterOffload(ClosesAtEnd):
    """Control and observe offloaded parameters. Available as ``model.offloading``.

    A ``with`` block closes it at its end, and so moves all parameters back into memory.

    Example:
        >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> with deepnvme.offload_parameters(model, memory="1MB", swap_dir="."):
        ...     model(torch.randn(8, 256)).square().mean().backward()
        ...     size = model.offloading.save("model.safetensors")
    """

    def __init__(self, model: nn.Module, memory: int, swapper: Swapper | SwapperPart) -> None:
        self.memory_bytes = memory
        self._model = weakref.ref(model)
        self._blocks = find_blocks(model, memory)
        self._groups = list(dict.fromkeys(group for block in self._blocks for group in block.groups))
        self._group_of = {id(member.parameter): group for group in self._groups for member in group.members}
        self._names = {member.name: (group, member) for group in self._groups for member in group.members}
        self._swapper = swapper
        self._residence = Residence(swapper, self._groups)
        self._runner = BlockRunner(self._residence, self._on_group_done)
        self._steppers: list[weakref.ref[OptimizerStepper]] = []
        # Called at the end of each step.
        self._on_step_end: Callable[[], object] | None = None
        self._undo: list[Callable[[], object]] = []
        self.is_closed = False
        # Reentrant, because a signal handler may also close it.
        self._closing = make_lock()
        # Whether state dicts include the parameters on disk.
        self._is_filling = True

    def _begin(self, model: nn.Module) -> None:
        """Move the parameters to disk. ``close`` undoes it, even after an error or an interrupt at any point."""
        for parameter in model.parameters():
            if id(parameter) not in self._group_of and parameter.numel() > 1 and not any(parameter.stride()):
                # A parameter that was on the meta device, and stays in memory: one zero stands for all of its elements.
                parameter.data = torch.zeros(parameter.shape, dtype=parameter.dtype)
        for group in self._groups:
            self._residence.offload(group)
        for block in self._blocks:
            wrap_call(block.module, self._runner.wrapper_for(block), self._undo)
        wrap_forward(model, self._checked_conversion, self._undo, "_apply")
        pre_hooks: Any = model._forward_pre_hooks  # noqa: SLF001
        add_hook(pre_hooks, UntracedHook(self._begin_step), self._undo)
        fill_state_dicts(model, self._residence, self._group_of, lambda: self._is_filling, self._undo)
        add_hook(_global_optimizer_pre_hooks, StepGuard(self._check_step), self._undo)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the offloaded parameters."""
        return sum(group.nbytes for group in self._groups)

    def stats(self) -> SwapStats:
        """Return the counters so far."""
        return self._swapper.stats()

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter], *, write: bool = False) -> Iterator[None]:
        """Hold parameters in memory inside a ``with``.

        Args:
            parameters: parameters to hold, together with the rest of their groups. Parameters that are not offloaded
                are left alone.
            write: allow changes. Raises if a block is using one of them. Default False.

        Yields:
            Nothing: the parameters themselves have their values inside the ``with``.

        Raises:
            ClosedError: the offloading was closed.
            MemoryError: they are more than ``memory``.
            RuntimeError: with ``write``, one of them is in use; without it, one was changed inside the ``with``.
            TypeError: the argument is not a collection of parameters.

        Example:
            >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
            >>> offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=".")
            >>> with torch.no_grad(), offloading.gathered([model[0].weight], write=True):
            ...     norm = model[0].weight.fill_(2).norm().item()
            >>> norm
            512.0
            >>> offloading.close()
        """
        self._check_open()
        if isinstance(parameters, (torch.Tensor, torch.nn.Module)):
            raise TypeError("gathered takes a list of several parameters: offloading.gathered([layer.weight])")
        found = {id(parameter): self._group_of.get(id(parameter)) for parameter in parameters}
        groups = list(dict.fromkeys(group for group in found.values() if group is not None))
        wanted = sum(group.nbytes for group in groups)
        if wanted > self.memory_bytes:
            raise MemoryError(f"these parameters have {wanted:,} bytes, but there is memory for {self.memory_bytes:,}")
        if write:
            self._runner.end_failed()
        with self._residence.held(groups, exclusive=write, is_users=True):
            before = [] if write else [fingerprint(self._residence.memory(group)) for group in groups]
            depths, thread = self._residence.gathered_depths, threading.get_ident()
            outer = depths.get(thread, 0)
            try:
                depths[thread] = outer + 1
                with save_references(self._residence, groups, None):
                    yield
            finally:
                depths[thread] = outer
            self._own_new_parameters(groups)
            # torch does not count changes through `.data`, NumPy and the like.
            for group, one in zip(groups, before, strict=False):
                if fingerprint(self._residence.memory(group)) != one:
                    raise RuntimeError(
                        f"{group.members[0].name}, or a parameter that is read with it, was changed within gathered; "
                        "use offloading.gathered(..., write=True), and load the state again"
                    )

    def _own_new_parameters(self, groups: Iterable[ParameterGroup]) -> None:
        """Give memory of their own to parameters that were made of gathered ones (``nn.Parameter(weight.data)``)."""
        model, groups = self._model(), list(groups)
        for parameter in () if model is None else model.parameters():
            address = None if id(parameter) in self._group_of or is_on_disk(parameter) else address_of(parameter)
            if address is not None and self._residence.find(groups, address) is not None:
                parameter.data = parameter.data.clone()

    def attach(self, optimizer: torch.optim.Optimizer, *, in_backward: bool = False) -> None:
        """Let the optimizer update the parameters one group at a time. Each group is in memory while it is updated.

        The optimizer must treat each parameter independently, as all of ``torch.optim`` except ``LBFGS`` do. Its state
        stays where it is.

        Args:
            optimizer: the optimizer of the model's parameters.
            in_backward: update the parameters of a block once its backward pass is done, while they are in memory, and
                free their gradients. This reads a third less and keeps the gradients of one block at most. ``step()``
                updates the rest and must be called after each ``backward()``. Gradient accumulation, clipping by the
                total norm and ``GradScaler`` need all gradients first and are not possible. Default: ``step()`` updates
                everything.

        Raises:
            ClosedError: the optimizer or the offloading was closed.
            deepnvme.errors.UnsupportedError: the optimizer treats parameters together, is already attached, or has
                ``max_norm`` and is attached with ``in_backward``.
            ValueError: it has none of the model's parameters.

        Example:
            >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
            >>> offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=".")
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> offloading.attach(optimizer)
            >>> model(torch.randn(8, 256)).square().mean().backward()
            >>> optimizer.step()
            >>> offloading.close()
        """
        self._check_open()
        if hasattr(optimizer, "_check_open"):
            optimizer._check_open()  # noqa: SLF001
        model = self._model()
        theirs = {id(parameter) for param_group in optimizer.param_groups for parameter in param_group["params"]}
        if model is not None and theirs.isdisjoint(map(id, model.parameters())):
            raise InvalidArgumentError(
                "this optimizer has none of the model's parameters; attach the one that trains the model"
            )
        if any(stepper.is_attached_to(optimizer) for stepper in self._attached()):
            raise UnsupportedError("this optimizer is attached already; attach it once")
        stepper = OptimizerStepper(
            optimizer,
            self._residence,
            self._group_of,
            in_backward=in_backward,
            on_begin=self._runner.end_failed,
            on_end=self._end_step,
        )
        try:
            self._steppers.append(weakref.ref(stepper))
            stepper.attach(optimizer)
        except BaseException:
            stepper.close()
            raise

    def _end_step(self) -> None:
        self._runner.end_step()
        if self._on_step_end is not None:
            self._on_step_end()

    def _attached(self) -> Iterator[OptimizerStepper]:
        for known in self._steppers:
            stepper = known()
            if stepper is not None:
                yield stepper

    def _on_group_done(self, group: ParameterGroup) -> None:
        for stepper in self._attached():
            stepper.on_backward_done(group)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> Any:
        """Load a state dict block by block.

        Args:
            state: names to tensors, as from ``model.state_dict()``.
            strict: require exactly the model's names.

        Returns:
            As of ``torch.nn.Module.load_state_dict``: ``missing_keys`` and ``unexpected_keys``.

        Raises:
            ClosedError: the offloading was closed, or the model is gone.
            RuntimeError: names, shapes or dtypes do not fit, or a tensor is on the meta device.
            TypeError: a value is not a tensor.
        """
        self._check_open()
        model = self._model()
        if model is None:
            raise ClosedError("the model was garbage-collected; keep a reference to it")
        with load_hooks_done(model, state) as values:
            return self._load(model, values, strict=strict)

    def _load(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> Any:
        # The state lists a tied parameter under each of its names.
        offloaded = {name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in self._group_of}
        for name, value in state.items():
            if not (isinstance(value, torch.Tensor) or name.endswith("_extra_state")):
                raise TypeError(f"{name} is a {type(value).__name__}; the state must have tensors")
            # A lazy tensor would be read.
            if not isinstance(value, LazyTensor) and getattr(value, "is_meta", False):
                raise RuntimeError(f"{name} is on the meta device and has no values; nothing was loaded")
        wrong = [
            f"{name} is {tuple(state[name].shape)}, not {tuple(member.shape)}"
            for name, (_, member) in self._names.items()
            if name in state and state[name].shape != member.shape
        ]
        wrong += [
            f"{name} is {state[name].dtype}, and {member.parameter.dtype} in the model, {refusal}"
            for name, (_, member) in self._names.items()
            if name in state and (refusal := cast_refusal(state[name].dtype, member.parameter.dtype))
        ]
        if wrong:
            raise RuntimeError(f"the state does not fit: {'; '.join(wrong)}")
        rest = {name: tensor for name, tensor in state.items() if name not in offloaded}
        answer = model.load_state_dict(rest, strict=False)
        lacking = {*answer.missing_keys, *offloaded} - state.keys()
        missing = [name for name in self._state_of(model) if name in lacking] if lacking else []
        if strict and (missing or answer.unexpected_keys):
            raise RuntimeError(f"the state lacks {missing} and has unexpected {answer.unexpected_keys}")
        self._runner.end_failed()
        for group in self._groups:
            with self._residence.held([group], exclusive=True):
                for member in group.members:
                    if member.name in state:
                        tensor = state[member.name]
                        # A tensor that is still in its file is read here and not kept, so that the model is never in
                        # memory as a whole.
                        member.parameter.data.copy_(tensor.read() if isinstance(tensor, LazyTensor) else tensor)
        return type(answer)(missing, answer.unexpected_keys)

    def _state_of(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict with the placeholders."""
        self._is_filling = False
        try:
            return model.state_dict(keep_vars=True)
        finally:
            self._is_filling = True

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: str | int | None = None,
        durability: Literal["none", "data", "full"] = "full",
        checksums: bool = True,
        progress: ProgressArgument = None,
    ) -> int:
        """Save the model's state in one or several safetensors files, one in memory at a time.

        Several files have an index, which is replaced last: readers find the old state or the new one.
        ``deepnvme.load(path, lazy=True)`` reads one file and several alike. ``deepnvme.load(folder)`` and Hugging
        Face's loaders find them if the name is ``model.safetensors``.

        Args:
            path: ``*.safetensors``, in a folder that exists. Each of several files has a number before the suffix. The
                index has ``.index.json`` after it.
            max_shard_bytes: bytes of one file, held in memory while it is written, in addition to ``memory``. Default:
                a quarter of ``memory``.
            durability: as in :func:`deepnvme.save`.
            checksums: as in :func:`deepnvme.save`.
            progress: as in :func:`deepnvme.save`.

        Returns:
            The bytes of all files.

        Raises:
            ClosedError: offloading was closed, or the model is gone.
            ValueError: ``path`` does not end with ``.safetensors``, ``max_shard_bytes`` is no size, or ``durability``
                is unknown.
            deepnvme.Error: the disk or the file system failed.

        Example:
            >>> model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
            >>> offloading = deepnvme.offload_parameters(model, memory="1MB", swap_dir=".")
            >>> size = offloading.save("model.safetensors", max_shard_bytes="2MB")
            >>> offloading.close()
            >>> deepnvme.load("model.safetensors")["0.weight"].equal(model[0].weight)
            True
        """
        self._check_open()
        model = self._model()
        if model is None:
            raise ClosedError("the model was garbage-collected; keep a reference to it")
        limit = self.memory_bytes // 4 if max_shard_bytes is None else parse_bytes(max_shard_bytes, "max_shard_bytes")
        state = self._state_of(model)
        options = SaveOptions(None, durability, checksums)
        return ShardSaver(state, self._copy).save(path, limit, options, progress)

    def _copy(self, parameter: torch.Tensor) -> torch.Tensor:
        group = self._group_of.get(id(parameter))
        if group is None:
            return parameter.detach()
        with self._residence.held([group]):
            return parameter.detach().clone()

    def close(self) -> None:
        """Move all parameters back into memory.

        Raises:
            OSError: some cannot be read. They stay on disk, and the next call tries again.
            RuntimeError: another thread uses some of them, for a pass or a save. Close it between passes.
        """
        with self._closing:
            if self.is_closed:
                return
            if self._runner.is_in_backward_elsewhere():
                # It also needs groups that it does not hold at this moment.
                raise RuntimeError(
                    "a backward pass in another thread uses the parameters; call offloading.close() again when that "
                    "has ended"
                )
            self._runner.end_all()
            for group in self._groups:
                self._residence.restore(group)
            # The last first: wrappers surround those that were there before.
            for undo in reversed(self._undo):
                undo()
            for stepper in self._attached():
                stepper.close()
            self.is_closed = True
            # A step that a backward pass has begun finds all parameters in memory.
            self._group_of.clear()
            self._swapper.close()

    def __repr__(self) -> str:
        model = self._model()
        name = "model that is gone" if model is None else type(model).__name__
        state = ", closed" if self.is_closed else ""
        return (
            f"<deepnvme.ParameterOffload of a {name}, parameter_bytes={self.parameter_bytes}, "
            f"memory_bytes={self.memory_bytes}{state}>"
        )

    def __reduce__(self) -> Any:
        if not self.is_closed:
            raise copy_error()
        # Copies and pickles of a model with its own parameters have no offloading.
        return type(None), ()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("offloading was closed; the parameters are in memory again")

    def _begin_step(self, model: nn.Module, _args: Any) -> None:
        if (misplaced := find_misplaced(model, self._blocks)) is not None:
            place, name = misplaced
            raise UnsupportedError(
                f"{place} was assigned the parameter {name}, which is on disk while that module runs; call "
                "offloading.close(), assign it, and offload the model again"
            )
        # Releases the groups of a backward pass that failed.
        self._runner.end_all()
        self._runner.counts_uses = torch.is_grad_enabled()
        if torch.is_grad_enabled() and any(stepper.is_begun for stepper in self._attached()):
            raise RuntimeError(
                "the last backward pass has changed parameters (attach(..., in_backward=True)), and its step has not "
                "ended: call optimizer.step() after each backward(). To accumulate gradients, attach the "
                "optimizer without in_backward"
            )
        self._residence.next_step()

    def _checked_conversion(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Make `Module._apply`, which conversions use, raise before it has changed anything."""
        dtypes = {member.dtype for _, member in self._names.values()}

        def run(function: Callable[[torch.Tensor], Any], *args: Any, **kwargs: Any) -> Any:
            for dtype in dtypes:
                made = function(torch.empty(0, dtype=dtype))
                if isinstance(made, torch.Tensor) and (made.dtype, made.device.type) != (dtype, "cpu"):
                    raise RuntimeError(
                        f"the parameters are on disk, and are not converted from {dtype} to {made.dtype} on "
                        f"{made.device}; call offloading.close() first"
                    )
            return apply(function, *args, **kwargs)

        return run

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer is about to update parameters on disk."""
        if hasattr(optimizer, "_check_open"):
            # `attach`, the remedy below, would not help a closed one.
            optimizer._check_open()  # noqa: SLF001
        for param_group in optimizer.param_groups:
            for parameter in param_group["params"]:
                group = self._group_of.get(id(parameter))
                if group is not None and parameter.grad is not None and not self._residence.is_held(group):
                    raise RuntimeError(
                        "the parameters of this optimizer are on disk: call model.offloading.attach(optimizer) once, "
                        "before its first step"
                    )


class UntracedHook:
    """Keeps a hook out of graphs: it depends on threads and files."""

    _torchdynamo_disable = True

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return untraced(self._hook, *args)

    def __reduce__(self) -> NoReturn:
        # A model is copied and pickled with its hooks first.
        raise copy_error()


class StepGuard:
    """Checks each optimizer's step while the object of the method ``check`` exists."""

    def __init__(self, check: Callable[[torch.optim.Optimizer], None]) -> None:
        self._check = weakref.WeakMethod(check)

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        check = self._check()
        if check is not None:
            check(optimizer)


def copy_error() -> TypeError:
    """Return the error for a copy or pickle of an offloaded model."""
    return TypeError(
        "the parameters of this model are on disk, so it can be neither copied nor pickled; save model.state_dict(), "
        "call model.offloading.save(path), or call model.offloading.close() first"
    )
