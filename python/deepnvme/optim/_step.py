"""What all optimizers here do in a step: gather, unscale, clip, and have the kernel change everything."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._deepnvme import Kernel
from deepnvme.optim._root import root
from deepnvme.optim._store import MASTER, MemoryStore, Piece, StateStore, flat

if TYPE_CHECKING:
    from deepnvme._swap import SwapStats

Group = dict[str, Any]
_SHORT = (torch.bfloat16, torch.float16)


class KernelSteps(torch.optim.Optimizer):
    """Comes before one of torch's optimizers, and takes the place of its `step`."""

    _store: StateStore

    def __init__(
        self,
        *arguments: Any,
        threads: int = 0,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
        swap_dir: Any = None,
        memory: str | int | None = None,
        checksums: bool = False,
        **settings: Any,
    ) -> None:
        if (swap_dir is None) != (memory is None):
            msg = "state on disk needs both, where and how much of it is in memory: swap_dir='/mnt/nvme', memory='4GB'"
            raise ValueError(msg)
        super().__init__(*arguments, **settings)
        self._options: dict[str, Any] = {
            "threads": threads,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "max_norm": max_norm,
        }
        self._set_up()
        if swap_dir is not None and memory is not None:
            from deepnvme.optim._swapped import SwapStore  # noqa: PLC0415

            self._store = SwapStore(swap_dir, memory, checksums=checksums)

    def _set_up(self) -> None:
        options = self._options
        # torch's GradScaler leaves unscaling to those that say so.
        self._step_supports_amp_scaling = True
        # torch's fused steps take exact roots, whatever the others do.
        kind = "exact" if self.defaults.get("fused") else root()
        self._kernel = Kernel(threads=options["threads"], root=kind)
        self._store = MemoryStore(self)
        self._stochastic, self._seed = options["stochastic_rounding"], options["seed"]
        self._max_norm: float | None = options["max_norm"]
        self._rounds = 0

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._store, MemoryStore):
            msg = "an optimizer whose state is on disk is neither copied nor pickled; its state_dict() can be"
            raise TypeError(msg)
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # `load_state_dict` comes by here, too.
        if not hasattr(self, "_kernel"):
            self._set_up()

    @property
    def swapping(self) -> SwapStats | None:
        """What state on disk has cost so far; ``None`` where it is in memory."""
        return self._store.stats()

    # What each rule says of itself.

    def _rule(self, group: Group) -> tuple[str, dict[str, float]]:
        """Name the kernel's rule, and its settings."""
        raise NotImplementedError

    def _moments(self, group: Group) -> tuple[str, ...]:
        """Name the moments, in the kernel's order."""
        raise NotImplementedError

    def _begin(self, param: torch.nn.Parameter, group: Group, state: dict[str, Any]) -> None:  # noqa: ARG002
        """Fill the state of a parameter that has none, but for moments, which are zeros."""
        state["step"] = torch.tensor(0.0)

    def _count(self, param: torch.nn.Parameter, state: dict[str, Any]) -> int:  # noqa: ARG002
        """Count a step of a parameter; the first is one."""
        state["step"] += 1
        return int(state["step"].item())

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters that have gradients.

        With a ``GradScaler``, gradients are unscaled on the way, and nothing happens where one of them is not finite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        if found is not None and found.item():
            return loss
        scale = getattr(self, "grad_scale", None)
        unscale = 1.0 if scale is None else float(scale.double().reciprocal().float())
        grads = {param: _gradient(param) for group in self.param_groups for param in group["params"] if _counts(param)}
        clip = 1.0
        if self._max_norm is not None:
            squares, _ = self._kernel.measure(list(grads.values()), unscale=unscale)
            clip = min(1.0, self._max_norm / (math.sqrt(squares) + 1e-6))
        self._rounds += 1
        place, places = 0, {}
        for group in self.param_groups:
            pieces: dict[int, list[Piece]] = {}
            for param in group["params"]:
                if param in grads:
                    piece, step = self._piece(param, group)
                    pieces.setdefault(step, []).append(piece)
                places[param] = place
                place += param.numel()
            for step, some in pieces.items():
                self._change(group, grads, some, places, step=step, unscale=unscale, clip=clip)
        self._store.flush()
        return loss

    def _piece(self, param: torch.nn.Parameter, group: Group) -> tuple[Piece, int]:
        state = self.state[param]
        if not state and not self._store.has(param):
            self._begin(param, group, state)
        step = self._count(param, state)
        names = self._moments(group) + ((MASTER,) if param.dtype in _SHORT else ())
        self._store.begin(param, state, names)
        return Piece(param, 0, param.numel(), names), step

    def _change(
        self,
        group: Group,
        grads: dict[torch.nn.Parameter, torch.Tensor],
        pieces: list[Piece],
        places: dict[torch.nn.Parameter, int],
        *,
        step: int,
        unscale: float,
        clip: float,
    ) -> None:
        rule, settings = self._rule(group)
        moments = self._moments(group)
        self._store.schedule(pieces)
        for batch in self._store.batches(pieces):
            with self._store.lend(batch) as lent:
                parts: list[Any] = []
                for piece, state in zip(batch, lent, strict=True):
                    weights = flat(piece.param)[piece.begin : piece.end]
                    grad = grads[piece.param][piece.begin : piece.end]
                    kept = [state[name] for name in moments]
                    master = state.get(MASTER)
                    at = places[piece.param] + piece.begin
                    if master is None:
                        parts.append((weights, grad, kept, None, at))
                    else:
                        parts.append((master, grad, kept, weights, at))
                self._kernel.step(
                    rule,
                    settings,
                    parts,
                    step=step,
                    unscale=unscale,
                    clip=clip,
                    stochastic=self._stochastic,
                    # Noise of its own in each step, also where parameters count theirs apart.
                    seed=(self._seed << 32 | self._rounds) & (1 << 64) - 1,
                )

    def state_dict(self) -> dict[str, Any]:
        """Give settings and state, as torch's do.

        State on disk is read for it, and takes as much memory as there is of it.
        """
        packed: dict[str, Any] = super().state_dict()
        store = self._store
        if isinstance(store, MemoryStore):
            return packed
        saved = [index for group in packed["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            if store.has(param):
                shaped = {name: _shaped(tensor, param) for name, tensor in store.gather(param).items()}
                packed["state"][index] = {**packed["state"].get(index, {}), **shaped}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of another, torch's own or ours.

        State beside short parameters stays fp32, where torch would round it to the type of the parameter.
        """
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            if param.dtype in _SHORT:
                for name, value in state_dict["state"].get(index, {}).items():
                    if torch.is_tensor(value) and value.is_floating_point() and name != "step":
                        self.state[param][name] = value.detach().to(torch.float32, copy=True)
        for group in self.param_groups:
            for param in group["params"]:
                self._store.forget(param)
                state = self.state.get(param, {})
                names = tuple(name for name in (*self._moments(group), MASTER) if state.get(name) is not None)
                if names:
                    self._store.begin(param, state, names)


def _counts(param: torch.nn.Parameter) -> bool:
    return param.grad is not None


def _gradient(param: torch.nn.Parameter) -> torch.Tensor:
    """Give the gradient, flat, in the order in which the parameter lies in memory."""
    grad = param.grad
    if grad is None:
        raise AssertionError
    if grad.is_sparse or grad.layout != torch.strided:
        msg = (
            "deepnvme.optim has no rule for sparse gradients; make the embedding with sparse=False, or give its "
            "parameters to torch.optim.SparseAdam"
        )
        raise RuntimeError(msg)
    if param.is_complex() or param.dtype not in (torch.float32, *_SHORT):
        msg = f"deepnvme.optim knows parameters of float32, bfloat16 and float16, not {param.dtype}"
        raise TypeError(msg)
    if param.device.type != "cpu":
        msg = f"deepnvme.optim works on the processor; this parameter is on {param.device}: use torch.optim there"
        raise ValueError(msg)
    if grad.dtype == param.dtype and (grad.stride() == param.stride() or _contiguous(grad, param)):
        return flat(grad)
    return flat(torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad))


def _shaped(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Give flat state the shape of its parameter, and the same order in memory."""
    if param.is_contiguous():
        return tensor.view(param.shape)
    return tensor.as_strided(param.shape, param.stride())


def _contiguous(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def scalars(group: Group, names: Iterable[str]) -> dict[str, float]:
    """Take settings out of a group, as numbers; a tensor of one element is one."""
    return {name: float(group[name]) for name in names}
