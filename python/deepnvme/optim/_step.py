"""What all optimizers here do in a step: gather, unscale, clip, and have the kernel change everything."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from deepnvme._deepnvme import Kernel
from deepnvme._utils.arguments import WHOLE_MAX, path_of, whole
from deepnvme.errors import ClosedError, UnsupportedError
from deepnvme.optim._formats import FORMATS, FP32, Kind
from deepnvme.optim._gradients import SwappedGradient, in_order
from deepnvme.optim._progress import ROUNDS, Progress
from deepnvme.optim._root import root
from deepnvme.optim._store import MASTER, MemoryStore, Piece, StateStore, flat, stride_of, without_scales

if TYPE_CHECKING:
    from deepnvme._offload import SwapStats
    from deepnvme.optim._saved import Shards
    from deepnvme.optim._swapped import SwapStore

Group = dict[str, Any]
_SHORT = (torch.bfloat16, torch.float16)
_SQUARES = frozenset(("exp_avg_sq", "max_exp_avg_sq", "sum"))


class KernelSteps(torch.optim.Optimizer):
    """Comes before one of torch's optimizers, and takes the place of its `step`."""

    _store: StateStore
    # Whether parameters have a count of their steps.
    counts_steps = True

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
            msg = "state on disk needs both, where and how much of it is in memory: swap_dir='/mnt/nvme', memory='4GB'"
            raise ValueError(msg)
        if swap_gradients and swap_dir is None:
            msg = "gradients on disk need a place: swap_dir='/mnt/nvme', memory='4GB'"
            raise ValueError(msg)
        if moments not in FORMATS:
            msg = f"moments is {moments!r}; it must be 'fp32', 'bf16' or '8bit'"
            raise ValueError(msg)
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
            from deepnvme.optim._swapped import SwapStore  # noqa: PLC0415

            self._store = store = SwapStore(
                swap_dir, memory, checksums=checksums, kernel=self._kernel if swap_gradients else None
            )
            if swap_gradients:
                self._watch(store)
        # What torch's constructor has made already.
        self._take_over()

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
        self._error_if_nonfinite: bool = options["error_if_nonfinite"]
        self._format = FORMATS[options["moments"]]
        # The number of each parameter's first element, by which noise is drawn.
        self._places: dict[torch.nn.Parameter, int] = {}
        self._number()
        # Of a step that has begun and not ended.
        self._progress: Progress | None = None
        # Whether several calls of `step` are one.
        self._is_part = False
        # Whether state was being loaded, and not all of it has come.
        self._is_half_loaded = False

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
            self._take_over()

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

    def _initial(self, param: torch.nn.Parameter, group: Group) -> float:  # noqa: ARG002
        """Say what elements of a moment begin with."""
        return 0.0

    def _begin(self, state: dict[str, Any]) -> None:
        """Fill the state of a parameter that has none, but for moments."""
        state["step"] = torch.tensor(0.0)

    def _next_count(self, param: torch.nn.Parameter, state: dict[str, Any]) -> int:  # noqa: ARG002
        """Say which step of a parameter comes next; the first is one."""
        return int(state["step"].item()) + 1

    def kinds(self, param: torch.nn.Parameter, group: Group) -> tuple[Kind, ...]:
        """Say which state a parameter has."""
        initial = self._initial(param, group)
        moments = [Kind(name, self._format, name in _SQUARES, initial) for name in self._moments(group)]
        return (*moments, *([Kind(MASTER, FP32)] if param.dtype in _SHORT else []))

    # Gradients on disk.

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as torch does."""
        super().add_param_group(param_group)
        if not hasattr(self, "_places"):
            return
        self._number()
        store = self._store
        if getattr(store, "gradients", None) is not None:
            self._watch(store)  # type: ignore[arg-type]

    def _number(self) -> None:
        place = sum(param.numel() for param in self._places)
        for group in self.param_groups:
            for param in group["params"]:
                if param not in self._places:
                    self._places[param] = place
                    place += param.numel()

    def _watch(self, store: SwapStore) -> None:
        gradients = store.gradients
        if gradients is None:
            raise AssertionError
        for group in self.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    gradients.watch(param, self.kinds(param, group))
            gradients.close_group()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; those on disk become ``None``, whatever is said."""
        gradients = getattr(self._store, "gradients", None)
        if gradients is not None:
            for group in self.param_groups:
                gradients.drop(group["params"])
                for param in group["params"]:
                    if isinstance(param.grad, SwappedGradient):
                        param.grad = None
        super().zero_grad(set_to_none)

    # The step.

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters that have gradients.

        With a ``GradScaler``, gradients are unscaled on the way, and nothing happens where one of them is not finite.

        Where it stops half way, at a failure of the disk or at Ctrl-C, the same again goes on where it stopped: nothing
        is changed twice.

        Raises:
            StepStoppedError: the disk failed half way.
            RuntimeError: with ``error_if_nonfinite``, the norm of the gradients is infinite or not a number; or state
                was being loaded, and not all of it has come.
        """
        self._check_loaded()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = getattr(self, "found_inf", None)
        if found is not None and found.item():
            return loss
        if self._is_part and self._progress is not None:
            self._go_on(self._progress)
            return loss
        progress = self._begun()
        is_done = False
        try:
            self._go_on(progress)
            is_done = True
        except (UnsupportedError, ClosedError):
            # No disk has failed: a gradient is there no more, or in part, or the state is gone. No other try finds it.
            raise
        except OSError as error:
            raise progress.stopped(error) from error
        finally:
            if is_done or progress.is_untouched:
                self._progress = None
        return loss

    def _begun(self) -> Progress:
        """Give the step that has begun and not ended, if its gradients are there still; else begin one."""
        progress = self._progress
        if progress is None or not progress.is_same():
            # The norm is that of all gradients, whatever is stepped one after the other then.
            clip = 1.0 if self._max_norm is None else self._clip(self._max_norm)
            is_noisy = self._stochastic or self._format is not FP32
            progress = self._progress = Progress(clip, counts=is_noisy and not self.counts_steps)
        return progress

    def begin_whole(self) -> Progress:
        """Have all calls of ``step`` be parts of one, until :meth:`end_whole`. Also goes on where one has stopped."""
        self._check_loaded()
        progress = self._begun()
        self._is_part = True
        return progress

    def end_whole(self, *, is_done: bool) -> None:
        """End that. A step that is not done goes on with the next one."""
        self._is_part = False
        if is_done or self._progress is None or self._progress.is_untouched:
            self._progress = None

    def _go_on(self, progress: Progress) -> None:
        """Do what is not done of a step."""
        unscale = self._unscale()
        grads = self._gradients()
        for index, group in enumerate(self.param_groups):
            progress.begin(index, group)
            # Those that have counted as many steps are one call of the kernel, and so are those scaled by as much.
            alike: dict[tuple[int, float], list[Piece]] = {}
            for param in group["params"]:
                if param in grads:
                    progress.see(param)
                    piece, step = self._piece(param, group, progress)
                    # One without elements counts steps, and has no place anywhere.
                    if piece.count:
                        alike.setdefault((step, _factor(grads[param])), []).append(piece)
            for (step, factor), pieces in alike.items():
                self._change(group, grads, pieces, progress, step=step, unscale=unscale, clip=progress.clip * factor)
        gradients = getattr(self._store, "gradients", None)
        for param, grad in grads.items():
            if isinstance(grad, SwappedGradient) and gradients is not None:
                # Where this stops, one that is there still is the one that was seen, and is dropped next time.
                param.grad = None
                progress.used(param)
                gradients.drop([param])

    def _gradient(self, param: torch.nn.Parameter) -> torch.Tensor:
        """Give the gradient, flat, in the order in which the parameter lies in memory; one on disk as it is."""
        grad = param.grad
        if grad is None:
            raise AssertionError
        if isinstance(grad, SwappedGradient):
            if grad.is_with(getattr(self._store, "gradients", None)):
                return grad.checked()
            # Another optimizer has it.
            grad = grad.read()
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
        return in_order(grad, param)

    def _gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        return {param: self._gradient(param) for param in params}

    def _unscale(self) -> float:
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale.double().reciprocal().float())

    def _clip(self, max_norm: float) -> float:
        grads, unscale = self._gradients().values(), self._unscale()
        squares, _ = self._kernel.measure(
            [one for one in grads if not isinstance(one, SwappedGradient)], unscale=unscale
        )
        squares += sum(one.squares() for one in grads if isinstance(one, SwappedGradient)) * unscale**2
        norm = math.sqrt(squares)
        if self._error_if_nonfinite and not math.isfinite(norm):
            msg = (
                f"the norm of the gradients is {norm}, and they cannot be clipped; look for the gradient that is not "
                "finite, or leave out error_if_nonfinite, to have them scaled by that as torch does"
            )
            raise RuntimeError(msg)
        # As torch's clip_grad_norm_ has it: a norm that is not a number makes all gradients not a number.
        coefficient = max_norm / (norm + 1e-6)
        return min(coefficient, 1.0)

    def _piece(self, param: torch.nn.Parameter, group: Group, progress: Progress) -> tuple[Piece, int]:
        state = self.state[param]
        if not state and not self._store.has(param):
            self._begin(state)
        if param not in progress.counted:
            progress.counted[param] = self._next_count(param, state)
        count = progress.counted[param]
        if self.counts_steps:
            state["step"].fill_(count)
        kinds = self.kinds(param, group)
        self._store.begin(param, state, kinds)
        return Piece(param, 0, param.numel(), kinds), count

    def _change(
        self,
        group: Group,
        grads: dict[torch.nn.Parameter, torch.Tensor],
        pieces: list[Piece],
        progress: Progress,
        *,
        step: int,
        unscale: float,
        clip: float,
    ) -> None:
        rule, settings = self._rule(group)
        moments = self._moments(group)
        for given in self._store.batches(pieces):
            batch = [piece for piece in given if self._places[piece.param] + piece.begin not in progress.record]
            if not batch:
                continue
            with self._store.lend(batch) as loans:
                parts: list[Any] = []
                for piece, loan in zip(batch, loans, strict=True):
                    weights = flat(piece.param)[piece.begin : piece.end]
                    grad = grads[piece.param]
                    own = loan.grad if isinstance(grad, SwappedGradient) else grad[piece.begin : piece.end]
                    kept = [loan.state[name] for name in moments]
                    master = loan.state.get(MASTER)
                    at = self._places[piece.param] + piece.begin
                    if master is None:
                        parts.append((weights, own, kept, None, at))
                    else:
                        parts.append((master, own, kept, weights, at))
                self._kernel.step(
                    rule,
                    settings,
                    parts,
                    step=step,
                    unscale=unscale,
                    clip=clip,
                    stochastic=self._stochastic,
                    # Noise of its own in each step, also where no steps are counted; the same after a restart.
                    seed=(self._seed << 32 | group.get(ROUNDS, 0)) & (1 << 64) - 1,
                    record=progress.record,
                )

    # What is saved.

    def state_dict(self) -> dict[str, Any]:
        """Give settings and state, as torch's do; moments are fp32, whatever they are kept as.

        State on disk is read for it, and takes as much memory as there is of it.

        Raises:
            RuntimeError: a step has stopped half way.
        """
        self.check_whole()
        packed: dict[str, Any] = super().state_dict()
        saved = [index for group in packed["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            gathered = self._store.gather(param)
            if gathered:
                shaped = {name: _shaped(tensor, param) for name, tensor in gathered.items()}
                packed["state"][index] = {**without_scales(packed["state"].get(index, {})), **shaped}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of another, torch's own or ours.

        State beside short parameters stays fp32, where torch would round it to the type of the parameter.
        """
        # Until all of it has come: what is half of one state and half of another is nothing to go on with.
        self._is_half_loaded = True
        super().load_state_dict(state_dict)
        self._progress = None
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        ours = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, ours, strict=True):
            if param.dtype in _SHORT:
                for name, value in state_dict["state"].get(index, {}).items():
                    if torch.is_tensor(value) and value.is_floating_point() and name != "step":
                        self.state[param][name] = value.detach().to(torch.float32, copy=True)
        self._take_over()
        self._is_half_loaded = False

    def _take_over(self) -> None:
        """Have the store take the state that there is."""
        for group in self.param_groups:
            for param in group["params"]:
                self._store.forget(param)
                state = self.state.get(param, {})
                kinds = tuple(kind for kind in self.kinds(param, group) if state.get(kind.name) is not None)
                if kinds:
                    self._store.begin(param, state, kinds)

    def check_settings(self, group: Group) -> None:
        """Raise what a step with these settings would raise."""
        rule, settings = self._rule(group)
        self._moments(group)
        self._kernel.step(
            rule, settings, [], step=1, unscale=1.0, clip=1.0, stochastic=self._stochastic, seed=0, record=None
        )

    def save_state(
        self, path: str | os.PathLike[str], *, shards: Shards | None = None, checksums: bool = True
    ) -> dict[str, int]:
        """Save state that is on disk in a file, without a trip through memory.

        XFS and Btrfs share the blocks, elsewhere the kernel copies. The file is a safetensors file. It has its name
        once all of it is on disk; until then, the file that had the name before is untouched. A symbolic link stays,
        and its target is replaced.

        Args:
            path: of the file; one for each rank.
            shards: what each parameter is: the name of a whole tensor, and which of its elements, as they lie in
                memory, is the parameter's first. With that, another number of ranks can load it. Default: each is
                whole, and its name is its number.
            checksums: whether to keep a checksum of each MiB and of all that the file says of itself. The file is read
                once for that. Default True.

        Returns:
            How many bytes went which way: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``.

        Raises:
            deepnvme.Error: the disk or the file system refused; the error names the path.
            RuntimeError: a step has stopped half way.
            ValueError: the state is in memory; ``deepnvme.save(optimizer.state_dict(), path)`` saves that.
        """
        self.check_whole()
        from deepnvme.optim import _saved  # noqa: PLC0415

        return _saved.save(self, self._on_disk(), path_of(path), shards, checksums=checksums)

    def load_state(
        self,
        path: str | bytes | os.PathLike[str] | Sequence[str | bytes | os.PathLike[str]],
        *,
        shards: Shards | None = None,
        verify: Literal["auto", "off", "sample", "full"] = "auto",
    ) -> dict[str, int]:
        """Load what :meth:`save_state` saved; settings of groups and counts of steps, too.

        Args:
            path: of the file, or of all that the ranks saved, however many.
            shards: as in :meth:`save_state`.
            verify: what is compared with checksums before anything is loaded: ``"auto"`` and ``"sample"``, all that the
                file says of itself and one MiB of 32; ``"full"``, every byte; ``"off"``, nothing.

        Returns:
            How many bytes came which way: ``shared_bytes``, ``kernel_bytes``, ``memory_bytes``. What is cut in the same
            way as it was saved takes no trip through memory.

        Raises:
            deepnvme.errors.ChecksumError: bytes differ from those that were saved.
            CorruptFileError: a file was cut, or is none of ``save_state``.
            ValueError: elements are missing, or the state is in memory.
        """
        from deepnvme.optim import _saved  # noqa: PLC0415

        paths = [path] if isinstance(path, (str, bytes, os.PathLike)) else path
        if verify not in ("auto", "off", "sample", "full"):
            msg = f"verify is {verify!r}; it must be 'auto', 'off', 'sample' or 'full'"
            raise ValueError(msg)
        found = _saved.load(self, self._on_disk(), [path_of(one) for one in paths], shards, verify)
        self._progress, self._is_half_loaded = None, False
        return found

    def close(self) -> None:
        """End it, where its state is on disk: that is gone then, and so are gradients there."""
        from deepnvme.optim._swapped import SwapStore  # noqa: PLC0415

        if isinstance(self._store, SwapStore):
            self._store.close()

    def _on_disk(self) -> SwapStore:
        from deepnvme.optim._swapped import SwapStore  # noqa: PLC0415

        if not isinstance(self._store, SwapStore):
            msg = (
                "the state is in memory: deepnvme.save(optimizer.state_dict(), path) saves it, load_state_dict loads it"
            )
            raise ValueError(msg)  # noqa: TRY004
        return self._store

    def check_whole(self) -> None:
        """Refuse to save what is half of one step and half of another, or of one state and another.

        Raises:
            RuntimeError: it is.
        """
        self._check_loaded()
        if self._progress is not None:
            msg = "a step has stopped half way: step() again first, or load the last checkpoint"
            raise RuntimeError(msg)

    def begin_loading(self) -> None:
        """Expect state: until all of it has come, there is nothing to step with, and nothing to save."""
        self._is_half_loaded = True

    def _check_loaded(self) -> None:
        if self._is_half_loaded:
            msg = "loading the state has stopped half way: load it again, or another checkpoint"
            raise RuntimeError(msg)


def _factor(grad: torch.Tensor) -> float:
    return grad.factor if isinstance(grad, SwappedGradient) else 1.0


def _shaped(tensor: torch.Tensor, param: torch.nn.Parameter) -> torch.Tensor:
    """Give flat state the shape of its parameter, and the same order in memory."""
    return tensor.as_strided(param.shape, stride_of(param))


def scalars(group: Group, names: Iterable[str]) -> dict[str, float]:
    """Take settings out of a group, as numbers; a tensor of one element is one."""
    return {name: float(group[name]) for name in names}
