"""Base of all optimizers: settings, the location of state, and the kinds of state of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._deepnvme import Kernel
from deepnvme._utils.public import WHOLE_MAX, whole
from deepnvme._utils.shards import noise_offset
from deepnvme.errors import InvalidArgumentError
from deepnvme.optim._gradients import swapped_gradient
from deepnvme.optim._running_step import StepPlans, StepProgress
from deepnvme.optim._state_store import FORMATS, FP32, MASTER, MemoryStore, StateKind, StateStore

if TYPE_CHECKING:
    from deepnvme._offload.plan import OffloadPlan
    from deepnvme._swap import SwapStats
    from deepnvme.optim._swap_store import SwapStore

ParamGroup = dict[str, Any]
SIXTEEN_BIT_FLOATS = (torch.bfloat16, torch.float16)
_SQUARES = frozenset(("exp_avg_sq", "max_exp_avg_sq", "sum"))


class OptimizerBase(torch.optim.Optimizer):
    """Settings and state of an optimizer. Derives before one of torch's classes."""

    _store: StateStore
    # Whether parameters have a step count.
    _counts_steps = True
    _make_plan: Callable[[], OffloadPlan] | None = None

    def __init__(
        self,
        *arguments: Any,
        threads: int = 0,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
        error_if_nonfinite: bool = False,
        moments: Literal["fp32", "bf16", "8bit"] = "fp32",
        swap_dir: Any = None,
        memory: str | int | None = None,
        swap_gradients: bool = False,
        checksums: bool = False,
        **settings: Any,
    ) -> None:
        if (swap_dir is None) != (memory is None):
            msg = "state on disk needs both a folder and a memory limit: swap_dir='/mnt/nvme', memory='4GB'"
            raise InvalidArgumentError(msg)
        if swap_gradients and swap_dir is None:
            msg = "swap_gradients needs a folder: swap_dir='/mnt/nvme', memory='4GB'"
            raise InvalidArgumentError(msg)
        if moments not in FORMATS:
            msg = f"moments is {moments!r}; it must be 'fp32', 'bf16' or '8bit'"
            raise InvalidArgumentError(msg)
        if max_norm is not None and not max_norm >= 0:
            raise InvalidArgumentError(f"max_norm is {max_norm}; it must be at least 0, or None for no clipping")
        threads, seed = whole(threads, "threads", 0, 256), whole(seed, "seed", -WHOLE_MAX)
        super().__init__(*arguments, **settings)
        self._options: dict[str, Any] = {
            "threads": threads,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "max_norm": max_norm,
            "error_if_nonfinite": error_if_nonfinite,
            "moments": moments,
        }
        self._set_up()
        if swap_dir is not None and memory is not None:
            from deepnvme.optim._swap_store import open_store  # noqa: PLC0415

            kernel = self._kernel if swap_gradients else None
            self._store = store = open_store(swap_dir, memory, checksums=checksums, kernel=kernel)
            if swap_gradients:
                self._watch(store)
        # State that torch's constructor has created.
        self._adopt_state()

    def _set_up(self) -> None:
        options = self._options
        # torch's GradScaler lets an optimizer unscale if this is set.
        self._step_supports_amp_scaling = True
        # torch's fused steps use exact square roots, whatever its other steps do.
        kind = "exact" if self.defaults.get("fused") else sqrt_mode()
        self._kernel = Kernel(threads=options["threads"], sqrt_mode=kind)
        self._store = MemoryStore(self)
        self._stochastic, self._seed = options["stochastic_rounding"], options["seed"]
        self._max_norm: float | None = options["max_norm"]
        self._error_if_nonfinite: bool = options["error_if_nonfinite"]
        self._format = FORMATS[options["moments"]]
        # The number of each parameter, and the index of its first element among all, which seeds the rounding noise.
        self._places: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self._assign_indices()
        self._plans = StepPlans()
        # The step that has begun and not ended.
        self._progress: StepProgress | None = None
        # Whether loading of state was interrupted.
        self._is_half_loaded = False
        # Functions that undo what others have changed in this optimizer.
        self._detach: list[Callable[[], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._store, MemoryStore):
            msg = "an optimizer with state on disk can be neither copied nor pickled; copy its state_dict()"
            raise TypeError(msg)
        return {**super().__getstate__(), "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # `load_state_dict` also calls this.
        if not hasattr(self, "_kernel"):
            self._set_up()
            self._adopt_state()

    def swap_stats(self) -> SwapStats | None:
        """Return the counters of the state on disk.

        Returns:
            The counters, or ``None`` if the state is in memory.
        """
        return self._store.stats()

    @property
    def has_unfinished_step(self) -> bool:
        """Whether a step was stopped half way, by the disk or by Ctrl-C. The next call of ``step`` goes on with it."""
        return self._progress is not None

    @property
    def plan(self) -> OffloadPlan | None:
        """What a step moves over the disk, for an optimizer of :func:`deepnvme.offload`. ``None`` for any other."""
        return None if self._make_plan is None else self._make_plan()

    # Hooks of each algorithm.

    def _algorithm(self, group: ParamGroup) -> tuple[str, dict[str, float]]:
        """Return the kernel's algorithm and its settings."""
        raise NotImplementedError

    def _moments(self, group: ParamGroup) -> tuple[str, ...]:
        """Return the names of the moments in the kernel's order."""
        raise NotImplementedError

    def _initial(self, param: torch.nn.Parameter, group: ParamGroup) -> float:  # noqa: ARG002
        """Return the initial value of a moment."""
        return 0.0

    def _initialise_count(self, state: dict[str, Any]) -> None:
        """Initialise the state of a new parameter, except moments."""
        state["step"] = torch.tensor(0.0)

    def _next_count(self, param: torch.nn.Parameter, state: dict[str, Any]) -> int:  # noqa: ARG002
        """Return the number of a parameter's next step, starting at 1."""
        return int(state["step"].item()) + 1

    def _kinds(self, param: torch.nn.Parameter, group: ParamGroup) -> tuple[StateKind, ...]:
        """Return the kinds of state of a parameter."""
        initial = self._initial(param, group)
        moments = [StateKind(name, self._format, name in _SQUARES, initial) for name in self._moments(group)]
        return (*moments, *([StateKind(MASTER, FP32)] if param.dtype in SIXTEEN_BIT_FLOATS else []))

    # Gradients on disk.

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add parameters, as torch does.

        Args:
            param_group: a dict with ``"params"`` and settings that differ from the defaults.
        """
        super().add_param_group(param_group)
        if not hasattr(self, "_places"):
            return
        self._assign_indices()
        store = self._store
        if getattr(store, "gradients", None) is not None:
            self._watch(store)  # type: ignore[arg-type]

    def _assign_indices(self) -> None:
        place = sum(param.numel() for param in self._places)
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self._places:
                    self._places[param] = len(self._places), place + noise_offset(param)
                    place += param.numel()

    def _watch(self, store: SwapStore) -> None:
        gradients = store.gradients
        if gradients is None:
            raise AssertionError
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    gradients.watch(param, self._kinds(param, group))
            gradients.close_group()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. Gradients on disk become ``None`` even with ``set_to_none=False``."""
        gradients = getattr(self._store, "gradients", None)
        if gradients is not None:
            for group in self.param_groups:
                gradients.drop(group["params"])
                for param in group["params"]:
                    if swapped_gradient(param) is not None:
                        param.grad = None
        super().zero_grad(set_to_none)

    # State.

    def _adopt_state(self) -> None:
        """Let the store take over the existing state."""
        for group in self.param_groups:
            for param in group["params"]:
                self._store.discard(param)
                state = self.state.get(param, {})
                kinds = tuple(kind for kind in self._kinds(param, group) if state.get(kind.name) is not None)
                if kinds:
                    self._store.initialise(param, state, kinds)

    def _check_settings(self, group: ParamGroup) -> None:
        """Raise the error that a step with these settings would raise."""
        algorithm, settings = self._algorithm(group)
        self._moments(group)
        self._kernel.step(
            algorithm, settings, [], step=1, unscale=1.0, clip=1.0, stochastic=self._stochastic, seed=0, record=None
        )

    def close(self) -> None:
        """Close the store of state on disk. The state and the gradients in it are gone.

        The parameters are as if this optimizer had never been there: other optimizers may train them. The ``.grad`` of
        a gradient on disk becomes ``None``. Without state on disk, this does nothing.
        """
        from deepnvme.optim._swap_store import SwapStore  # noqa: PLC0415

        if isinstance(self._store, SwapStore):
            self._store.close()
            while self._detach:
                self._detach[-1]()
                self._detach.pop()

    def _check_open(self) -> None:
        """Raise ``ClosedError`` if the optimizer was closed, or belongs to the parent process."""
        self._store.check_open()

    def _detach_on_close(self, detach: Callable[[], None]) -> None:
        """Call ``detach`` when the optimizer is closed, if its state is on disk."""
        self._detach.append(detach)

    def _on_disk(self) -> SwapStore:
        from deepnvme.optim._swap_store import SwapStore  # noqa: PLC0415

        if not isinstance(self._store, SwapStore):
            msg = (
                "the state is in memory: deepnvme.save(optimizer.state_dict(), path) saves it, load_state_dict loads it"
            )
            raise InvalidArgumentError(msg)
        self._store.check_open()
        return self._store

    def _check_complete(self) -> None:
        """Check that no step and no load is half done.

        Raises:
            ClosedError: the optimizer was closed.
            RuntimeError: a step or a load is half done.
        """
        self._check_loaded()
        if self._progress is not None:
            msg = "a step stopped half way; call step() again first, or load the last checkpoint"
            raise RuntimeError(msg)

    def _begin_loading(self) -> None:
        """Mark the state as incomplete until loading ends."""
        self._is_half_loaded = True

    def _check_loaded(self) -> None:
        # First: no other remedy helps a closed optimizer.
        self._store.check_open()
        if self._is_half_loaded:
            msg = "loading of the state stopped half way; load it again, or another checkpoint"
            raise RuntimeError(msg)


def scalars(group: ParamGroup, names: Iterable[str]) -> dict[str, float]:
    """Read settings of a param group as numbers. One-element tensors count as numbers."""
    return {name: float(group[name]) for name in names}


_VALUES = 1 << 14


_found: list[str] = []


def sqrt_mode() -> str:
    """Choose the kernel's square root that is bit-identical to `torch.sqrt`; the exact one if none is."""
    if not _found:
        _found.append(_find())
    return _found[0]


def _find() -> str:
    # Every exponent, with mantissas spread as evenly as possible.
    places = torch.arange(_VALUES, dtype=torch.int64)
    bits = (places * 0x7F80_0000 // _VALUES) ^ (places * 0x9E37_79B1 & 0x7F_FFFF)
    values = bits.clamp(0, 0x7F7F_FFFF).to(torch.int32).view(torch.float32)
    expected = values.sqrt()
    for name in Kernel.sqrt_modes():
        taken = values.clone()
        Kernel(threads=1, sqrt_mode=name).sqrt_(taken)
        if torch.equal(taken, expected):
            return name
    return "exact"
