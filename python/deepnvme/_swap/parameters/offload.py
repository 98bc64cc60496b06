"""``deepnvme.offload_parameters``: a model whose parameters are on disk while no block uses them."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepnvme._checkpoint.lazy import LazyTensor
from deepnvme._checkpoint.save import SaveOptions
from deepnvme._stream.wrapped import wrap
from deepnvme._swap.parameters.meta import give_places
from deepnvme._swap.parameters.passes import Passes
from deepnvme._swap.parameters.residence import Residence
from deepnvme._swap.parameters.saving import Copies
from deepnvme._swap.parameters.stepping import Stepping
from deepnvme._swap.parameters.units import find_blocks
from deepnvme._swap.swapper import Swapper
from deepnvme._utils.arguments import parse_bytes
from deepnvme.errors import ClosedError, UnsupportedError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from deepnvme._deepnvme import Engine
    from deepnvme._swap.parameters.units import Unit
    from deepnvme._swap.stats import SwapStats
    from deepnvme._utils.terminal import Progress


class Offloaded:
    """How a model's parameters come and go. ``model.offloading`` of what :func:`offload_parameters` was given."""

    def __init__(self, model: nn.Module, memory: int, swapper: Swapper) -> None:
        self.memory_bytes = memory
        self._model = weakref.ref(model)
        self._blocks = find_blocks(model, memory)
        self._units = list(dict.fromkeys(unit for block in self._blocks for unit in block.units))
        self._unit_of = {id(member.parameter): unit for unit in self._units for member in unit.members}
        self._names = {member.name: (unit, member) for unit in self._units for member in unit.members}
        self._swapper = swapper
        self._residence = Residence(swapper, self._units)
        self._passes = Passes(self._residence, self._through)
        self._steppings: list[weakref.ref[Stepping]] = []
        for unit in self._units:
            self._residence.put(unit)
        self._undo = [wrap(block.module, self._passes.around(block)) for block in self._blocks]
        hooks = [
            model.register_forward_pre_hook(self._begin_step),
            # It marks what it is given, which a bound method does not allow.
            model.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                lambda *arguments: self._fill_state(*arguments)  # noqa: PLW0108
            ),
            register_optimizer_step_pre_hook(_Refusal(self)),
        ]
        self._undo += [hook.remove for hook in hooks]
        self.is_closed = False
        # Whether a state dict gets what is on disk.
        self._is_filling = True

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters that come and go."""
        return sum(unit.nbytes for unit in self._units)

    def stats(self) -> SwapStats:
        """Tell what it has cost so far."""
        return self._swapper.stats()

    @contextmanager
    def gathered(self, parameters: Iterable[nn.Parameter], *, write: bool = False) -> Iterator[None]:
        """Have parameters in memory for a ``with`` block, as far as they are offloaded.

        Args:
            parameters: and with them, those that come and go together with them. Others stay as they are.
            write: they are changed; what a block uses just now cannot be.

        Raises:
            MemoryError: they are more than ``memory``.
            TypeError: it is not given parameters.
        """
        self._check_open()
        if isinstance(parameters, (torch.Tensor, torch.nn.Module)):
            raise TypeError("gathered takes several parameters: offloading.gathered([layer.weight])")
        found = {id(parameter): self._unit_of.get(id(parameter)) for parameter in parameters}
        units = list(dict.fromkeys(unit for unit in found.values() if unit is not None))
        wanted = sum(unit.nbytes for unit in units)
        if wanted > self.memory_bytes:
            raise MemoryError(f"these parameters have {wanted:,} bytes, and there is memory for {self.memory_bytes:,}")
        with self._residence.held(units, exclusive=write):
            yield

    def attach(self, optimizer: torch.optim.Optimizer, *, in_backward: bool = False) -> None:
        """Have an optimizer's steps go through one group of parameters after the other, in memory while it is changed.

        For optimizers that treat each parameter by itself, as all of ``torch.optim`` but ``LBFGS`` do. The state of the
        optimizer stays where the optimizer has it; nothing else about it is different.

        Args:
            optimizer: of the model's parameters.
            in_backward: change the parameters of a block as soon as its backward pass is through, while they are in
                memory, and free their gradients: a third less is read, and no more than a block's gradients are in
                memory. ``step()`` changes what is left, and has to be called after each ``backward()``. So gradients
                are neither added up over several passes nor clipped by the norm of all, and there is no ``GradScaler``:
                all of these need all gradients before the first parameter is changed. Default: ``step()`` changes
                everything.

        Raises:
            UnsupportedError: it treats them together, or is attached already.
            ValueError: it has none of the model's parameters.
        """
        self._check_open()
        model = self._model()
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if model is not None and theirs.isdisjoint(map(id, model.parameters())):
            raise ValueError("this optimizer has none of the model's parameters; attach the one that trains the model")
        if any(stepping.is_of(optimizer) for stepping in self._attached()):
            raise UnsupportedError("this optimizer is attached already, and it is attached once")
        stepping = Stepping(
            optimizer,
            self._residence,
            self._unit_of,
            in_backward=in_backward,
            begins=self._passes.end_failed,
            ended=self._passes.end_step,
        )
        self._steppings.append(weakref.ref(stepping))
        if in_backward:
            self._undo.append(stepping.close)

    def _attached(self) -> Iterator[Stepping]:
        for known in self._steppings:
            stepping = known()
            if stepping is not None:
                yield stepping

    def _through(self, unit: Unit) -> None:
        for stepping in self._attached():
            stepping.backward_through(unit)

    def load_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Load what ``model.state_dict()`` gave, block by block.

        Args:
            state: names to tensors.
            strict: all names, and no others, have to be there.

        Raises:
            RuntimeError: names or shapes are others.
        """
        self._check_open()
        model = self._model()
        if model is None:
            raise ClosedError("the model is gone")
        wrong = [
            f"{name} is {tuple(state[name].shape)}, not {tuple(member.shape)}"
            for name, (_, member) in self._names.items()
            if name in state and state[name].shape != member.shape
        ]
        if wrong:
            raise RuntimeError(f"the state does not fit: {'; '.join(wrong)}")
        # A tied parameter is in the state by each of its names.
        others = {name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in self._unit_of}
        rest = {name: tensor for name, tensor in state.items() if name not in others}
        answer = model.load_state_dict(rest, strict=False)
        missing = [name for name in answer.missing_keys if name not in others] + sorted(others - state.keys())
        if strict and (missing or answer.unexpected_keys):
            raise RuntimeError(f"the state lacks {missing} and has {answer.unexpected_keys}")
        for unit in self._units:
            with self._residence.held([unit], exclusive=True):
                for member in unit.members:
                    if member.name in state:
                        tensor = state[member.name]
                        # One that is still in its file is not kept, so that the model is never in memory as a whole.
                        member.parameter.data.copy_(tensor.read() if isinstance(tensor, LazyTensor) else tensor)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: str | int | None = None,
        durability: Literal["none", "data", "full"] = "full",
        checksums: bool = True,
        progress: Progress = None,
    ) -> int:
        """Save the model's state in safetensors files and an index, without ever having all of it in memory.

        ``deepnvme.load(folder, lazy=True)`` and Hugging Face's loaders read them. The index is what changes last, so
        that there is the old state or the new one.

        Args:
            path: ``*.safetensors``; the shards have a number before the end, the index ``.index.json`` after it.
            max_shard_bytes: bytes of one file, which are in memory while it is written, beside what is there for
                parameters. Default: a quarter of that.
            durability: as in :func:`deepnvme.save`.
            checksums: as in :func:`deepnvme.save`.
            progress: as in :func:`deepnvme.save`.

        Returns:
            The bytes of all files.
        """
        self._check_open()
        model = self._model()
        if model is None:
            raise ClosedError("the model is gone")
        limit = self.memory_bytes // 4 if max_shard_bytes is None else parse_bytes(max_shard_bytes, "max_shard_bytes")
        self._is_filling = False
        try:
            state = model.state_dict(keep_vars=True)
        finally:
            self._is_filling = True
        options = SaveOptions(None, durability, checksums)
        return Copies(state, self._copy).save(path, limit, options, progress)

    def _copy(self, parameter: torch.Tensor) -> torch.Tensor:
        unit = self._unit_of.get(id(parameter))
        if unit is None:
            return parameter.detach()
        with self._residence.held([unit]):
            return parameter.detach().clone()

    def close(self) -> None:
        """Give the model its parameters back, in memory.

        Raises:
            OSError: some cannot be read. Those stay where they are, and the next call tries again.
        """
        if self.is_closed:
            return
        self._passes.end_all()
        for unit in self._units:
            self._residence.restore(unit)
        for undo in self._undo:
            undo()
        self.is_closed = True
        # An optimizer that was attached steps all at once now.
        self._unit_of.clear()
        self._swapper.close()

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the parameters are in memory again: the model was given back")

    def _begin_step(self, _model: nn.Module, _args: Any) -> None:
        # What a backward that failed has left behind.
        self._passes.end_all()
        self._passes.counts_uses = torch.is_grad_enabled()
        if torch.is_grad_enabled() and any(stepping.is_begun for stepping in self._attached()):
            raise RuntimeError(
                "the last backward pass has changed parameters (attach(..., in_backward=True)), and its step has not "
                "ended: call optimizer.step() after each backward(). To add up the gradients of several, attach the "
                "optimizer without in_backward"
            )
        self._residence.next_step()

    def _fill_state(self, model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        if not self._is_filling:
            return
        copies: dict[int, torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            unit = self._unit_of.get(id(parameter))
            if unit is None or prefix + name not in state:
                continue
            if id(parameter) not in copies:
                with self._residence.held([unit]):
                    for member in unit.members:
                        copies[id(member.parameter)] = member.parameter.detach().clone()
            state[prefix + name] = copies[id(parameter)]

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Say so where an optimizer is about to change what is on disk."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                unit = self._unit_of.get(id(parameter))
                if unit is not None and parameter.grad is not None and not self._residence.is_held(unit):
                    raise RuntimeError(
                        "the parameters of this optimizer are on disk: call model.offloading.attach(optimizer) once, "
                        "before its first step"
                    )


class _Refusal:
    """Looks at each optimizer's step, for as long as the model is there."""

    def __init__(self, offloaded: Offloaded) -> None:
        self._offloaded = weakref.ref(offloaded)

    def __call__(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        offloaded = self._offloaded()
        if offloaded is not None:
            offloaded.refuse(optimizer)


def offload_parameters(
    model: nn.Module,
    *,
    memory: str | int,
    swap_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    checksums: bool = False,
    engine: Engine | None = None,
) -> Offloaded:
    """Keep a model's parameters on disk while it is trained; blocks have them in memory while they run.

    Each block's parameters come before its forward and its backward, and leave after it. The order is learnt in the
    first step, and from then on the next blocks come while one computes. What is computed is bit for bit the same. It
    works with activation checkpointing, shared and frozen parameters, gradient accumulation and ``torch.autocast``.

    Frozen parameters are written once, when they go to disk; those that are trained after each step. Gradients stay in
    memory.

    Args:
        model: with its parameters in host memory, or on the meta device, where they become zeros without ever being in
            memory as a whole; ``load_state_dict`` fills them. It is changed, and is itself what is trained.
        memory: bytes that parameters may take at a time, such as ``"4GB"``. Those of a few KiB stay in memory besides.
        swap_dir: the folder on the NVMe disk, or several, one for each disk. Nothing in it outlives the process.
        checksums: keep a checksum of all that is written, and compare it with what is read.
        engine: moves the bytes. Default: the default engine.

    Returns:
        ``model.offloading``: ``attach(optimizer)``, ``gathered(parameters)``, ``load_state_dict(state)``, ``stats()``,
        ``close()``. ``model.state_dict()`` is as always, and takes as much memory as it says.

    Raises:
        MemoryError: the memory is less than one block needs.
        UnsupportedError: the model cannot be offloaded, and why.

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
    earlier = getattr(model, "offloading", None)
    if isinstance(earlier, Offloaded) and not earlier.is_closed:
        raise UnsupportedError(
            "the parameters of this model are offloaded already; model.offloading.close() comes first"
        )
    give_places(model)
    for name, parameter in model.named_parameters():
        if parameter.device.type != "cpu":
            raise UnsupportedError(f"{name} is on {parameter.device}; parameters of the host are offloaded")
        if parameter.layout is not torch.strided or parameter.is_nested or parameter.is_quantized:
            raise UnsupportedError(f"{name} is not one block of memory, and cannot be offloaded")
    nbytes = parse_bytes(memory)
    swapper = Swapper(swap_dir, memory=nbytes, checksums=checksums, engine=engine)
    try:
        offloaded = Offloaded(model, nbytes, swapper)
    except BaseException:
        swapper.close()
        raise
    model.offloading = offloaded  # type: ignore[assignment]
    return offloaded
