"""The row `checkpoint`: the state of a training run on the GPU is saved while training goes on."""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import deepnvme
import torch

from common import cache
from common.measure import Sample, timed
from common.sync import sync
from gpubench.data import Mismatch, size_text
from gpubench.rows import RoundLimits, RowResult, construct, run_rounds
from gpubench.tool import Group, Setup, ToolBase

OURS = "Checkpointer, async_"
BASELINE = "torch.save, fsync"

_LAYERS = 8
_BATCH = 64
#: fp32 parameters with two moments each.
_STATE_BYTES = 12
_STEPS_ALONE = 5
_SAVE_S_MAX = 60.0


class Training:
    """A loop that trains a stack of linear layers on the GPU."""

    def __init__(self, setup: Setup) -> None:
        width = max(8, int((setup.nbytes / _STATE_BYTES / _LAYERS) ** 0.5) // 8 * 8)
        device = setup.gpu.compute
        torch.manual_seed(11)
        with torch.device(device):
            layers = [torch.nn.Linear(width, width, bias=False) for _ in range(_LAYERS)]
            self._batch = torch.randn(_BATCH, width)
        self._wait = setup.gpu.wait
        self._model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        self.step()

    def step(self) -> float:
        """Take a step, and return its seconds."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self.optimizer.step()
        self._wait()
        return time.perf_counter() - start

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint has, not copied."""
        return {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Saver(ToolBase, ABC):
    """One way to save the state of a training run."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=setup.scratch))

    def open(self, training: Training) -> None:
        """Prepare for this training run; not timed."""

    @abstractmethod
    def save(self, step: int, state: Any) -> None:
        """Save, or begin to save."""

    def is_done(self, step: int) -> bool:
        """Return whether the checkpoint is on disk."""
        return True

    def finish(self) -> None:
        """Wait for the end of the save; not timed."""

    def path(self, step: int) -> Path:
        """Return the file of a checkpoint."""
        return self.folder / "state.pt"

    def close(self) -> None:
        """See the base."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Async(Saver):
    """``Checkpointer(async_=True)``: copies to pinned memory, then writes in the background."""

    name = OURS
    group: Group = "deepnvme"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        # Its pinned memory holds the whole state, so that `save` waits for copies only.
        self.checkpointer = deepnvme.Checkpointer(self.folder, keep=1, async_=True, memory=setup.nbytes * 9 // 8)

    def save(self, step: int, state: Any) -> None:
        """See the base."""
        self.checkpointer.save(step, state)

    def is_done(self, step: int) -> bool:
        """See the base."""
        latest = self.checkpointer.latest()
        return latest is not None and latest.step == step

    def path(self, step: int) -> Path:
        """See the base."""
        latest = self.checkpointer.latest()
        if latest is None or latest.step != step:
            raise Mismatch(f"the newest checkpoint is not that of step {step}")
        return Path(latest.path)

    def close(self) -> None:
        """See the base."""
        try:
            self.checkpointer.close()
        finally:
            super().close()


class Overlap(Async):
    """The same within ``overlap``: no copy, but the next ``optimizer.step`` waits until the tensors are read."""

    name = "Checkpointer, overlap"

    def open(self, training: Training) -> None:
        """See the base."""
        self._stack = ExitStack()
        self._training = training

    def save(self, step: int, state: Any) -> None:
        """See the base."""
        self._stack.enter_context(self.checkpointer.overlap(self._training.optimizer))
        super().save(step, state)

    def finish(self) -> None:
        """See the base."""
        self._stack.close()


class TorchSave(Saver):
    """``torch.save`` to a new file and an fsync, in the loop."""

    name = BASELINE

    def save(self, step: int, state: Any) -> None:
        """See the base."""
        new = self.folder / "new.pt"
        torch.save(state, new)
        new.replace(self.path(step))
        sync(self.path(step))


KINDS: tuple[type[Saver], ...] = (Async, Overlap, TorchSave)


def checkpoint(setup: Setup, row: RowResult, limits: RoundLimits) -> RowResult:
    """Train, save, and train on until the checkpoint is on disk."""
    row.title = f"checkpoint of {size_text(setup.nbytes)} of a training run on the GPU, until it is on disk"
    row.ours = OURS
    row.note(setup.gpu.compute_note)
    tools = construct(row, KINDS, setup, limits)
    training = Training(setup)
    saved = 0

    def once(one: Saver, is_first: bool) -> Sample:  # noqa: FBT001 - the first round, or a later one
        nonlocal saved
        if is_first:
            one.open(training)
        saved += 1
        step_s = median(training.step() for _ in range(_STEPS_ALONE))
        kept = _copied(training.state())
        cache.wait_for_writeback()
        blocked, steps = 0.0, list[float]()

        def action() -> None:
            nonlocal blocked
            start = time.perf_counter()
            one.save(saved, training.state())
            blocked = time.perf_counter() - start
            while not one.is_done(saved):
                steps.append(training.step())
                if time.perf_counter() - start > _SAVE_S_MAX:
                    raise TimeoutError(f"the checkpoint was not on disk after {_SAVE_S_MAX:.0f} s")

        try:
            sample, _ = timed(action, 1)
        finally:
            one.finish()
        path = one.path(saved)
        extra = {
            "blocked_s": blocked,
            "step_s": step_s,
            "step_while_saving_s": median(steps) if steps else step_s,
            # Steps that a save slows down count as well.
            "lost_s": blocked + sum(steps) - len(steps) * step_s,
        }
        _compare(one.name, deepnvme.load(path, progress=False), kept)
        return replace(sample, bytes_moved=path.stat().st_size, extra=extra)

    return run_rounds(row, tools, limits, once)


def _copied(value: Any) -> Any:
    """Copy all tensors of a state on their device."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, (list, tuple)) else value


def _compare(name: str, loaded: Any, kept: Any, where: str = "") -> None:
    """Compare every element of a state."""
    if isinstance(kept, torch.Tensor):
        if not torch.equal(loaded.to(kept.device), kept):
            raise Mismatch(f"{name} did not save {where} as it was at the call")
    elif isinstance(kept, dict):
        if set(loaded) != set(kept):
            raise Mismatch(f"{name} saved other keys in {where or 'the state'}")
        for key, one in kept.items():
            _compare(name, loaded[key], one, f"{where}.{key}")
    elif isinstance(kept, list):
        if len(loaded) != len(kept):
            raise Mismatch(f"{name} saved {len(loaded)} instead of {len(kept)} elements in {where or 'the state'}")
        for index, one in enumerate(kept):
            _compare(name, loaded[index], one, f"{where}[{index}]")
    elif loaded != kept:
        raise Mismatch(f"{name} saved another {where}")
