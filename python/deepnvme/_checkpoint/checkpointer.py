"""``deepnvme.Checkpointer``: a folder of checkpoints, saved while training goes on.

``retention`` knows what counts, ``schedule`` whose turn it is, ``background`` has the save that is under way,
``overlap`` has optimizers wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.background import Background, staging_for
from deepnvme._checkpoint.overlap import before_each_step
from deepnvme._checkpoint.progress import Progress, watcher
from deepnvme._checkpoint.reading import load
from deepnvme._checkpoint.retention import Retained
from deepnvme._checkpoint.schedule import Schedule
from deepnvme._checkpoint.stats import CheckpointerStats, Tally
from deepnvme._checkpoint.writing import SaveOptions, check_torch, described, start_archive, start_tensors

if TYPE_CHECKING:
    import datetime as dt
    from types import TracebackType
    from typing import Literal

    import torch
    from typing_extensions import Self

    from deepnvme._checkpoint.manifest import Checkpoint
    from deepnvme._deepnvme import Engine, _Saving


class Checkpointer:
    """Saves checkpoints into a folder, keeps the last ones, and finds them again.

    Each checkpoint is one file, as of ``deepnvme.save``; ``manifest.json`` lists those that count, and is replaced at
    once when a file is whole and on disk. After a crash the newest whole checkpoint is there; what is left of the one
    that was being written goes with the next save.

    With ``async_=True``, ``save`` returns when the tensors have been copied into page-locked memory, or, of what does
    not fit there, onto the disk; the rest goes on while training does. Inside ``overlap`` nothing is copied: the
    tensors are written from where they are, and the next ``optimizer.step`` waits if they have not been yet. One save
    is under way at a time: the next one waits for it. What goes wrong in the background is raised by the next call.

    Args:
        folder: where; it is made if it is not there.
        keep: how many checkpoints stay. Default 3; ``None`` keeps all.
        every: which calls of ``save`` save: those whose step is a multiple of that number, or that come so long after
            the last one (``datetime.timedelta``). Default: each.
        async_: save in the background. Default False.
        memory: bytes of page-locked memory for that, kept until ``close``. Default: as much as the first state has,
            and a quarter of what is available at the most.
        format: ``"pt"`` (default) or ``"safetensors"``.
        engine: which engine moves the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        checksums: as for ``deepnvme.save``. Default True.
        progress: as for ``deepnvme.save``; in the background nothing is shown. Default: a bar on a terminal.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> with deepnvme.Checkpointer("checkpoints", keep=2, async_=True) as checkpointer:
        ...     for step in range(5):
        ...         _ = checkpointer.save(step, {"model": model.state_dict(), "step": step})
        >>> [checkpoint.step for checkpoint in checkpointer.checkpoints]
        [3, 4]
        >>> deepnvme.Checkpointer("checkpoints").restore()["step"]
        4
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | dt.timedelta | None = None,
        async_: bool = False,
        memory: int | None = None,
        format: Literal["pt", "safetensors"] = "pt",  # noqa: A002 (what users would type)
        engine: Engine | None = None,
        durability: Literal["none", "data", "full"] = "full",
        checksums: bool = True,
        progress: Progress = None,
    ) -> None:
        if format not in ("pt", "safetensors"):
            msg = f"format is {format!r}; it must be 'pt' or 'safetensors'"
            raise ValueError(msg)
        check_torch("Checkpointer")
        self.folder = Path(folder)
        self._schedule = Schedule(every)
        self._retained = Retained(self.folder, keep, durability)
        self._is_async = async_
        self._memory = memory
        self._suffix = format
        self._options = SaveOptions(engine, durability, checksums)
        self._progress = progress
        self._tally = Tally()
        self._background = Background()
        self._overlaps = 0

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that count, the oldest first."""
        return list(self._retained.entries)

    def latest(self) -> Checkpoint | None:
        """Give the newest checkpoint, or ``None`` where there is none.

        Raises:
            deepnvme.Error: a save in the background has failed.
        """
        self._background.check()
        return self._retained.entries[-1] if self._retained.entries else None

    @property
    def stats(self) -> CheckpointerStats:
        """What saving has cost so far."""
        return self._tally.now

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Save a state, if it is the turn of that step; whether it was.

        Args:
            step: the number of the step, from 0 on. One that is there already is replaced.
            state: as for ``deepnvme.save``.
            force: save whatever ``every`` says, as at the end of training.

        Raises:
            deepnvme.Error: this save failed, or the last one did in the background.
        """
        self._background.check()
        began = time.perf_counter()
        if not (self._schedule.is_due(step, began) or force):
            return False
        self.wait()
        path = self._retained.new_path(step, self._suffix)
        saving = self._start(state, path)

        def commit(saved: tuple[int, int, int, int]) -> None:
            self._retained.commit(step, path, saved)
            self._tally.add_save(saved[0], time.perf_counter() - began)

        if self._is_async or self._overlaps:
            self._background.start(saving, commit)
            if not self._overlaps:
                self._background.wait_for_copies()
        else:
            commit(saving.wait(watcher(self._progress, "saving", path), True))
        self._schedule.note(began)
        self._tally.add_stall(time.perf_counter() - began)
        return True

    def restore(self, step: int | None = None, **options: Any) -> Any:
        """Load a checkpoint: the newest one, or the one of that step.

        Args:
            step: which one. Default: the newest.
            **options: as for ``deepnvme.load``: ``device``, ``into``, ``only``, ``verify``, ...

        Raises:
            FileNotFoundError: there is none.
            deepnvme.errors.ChecksumError: the file is not the one that was saved.
        """
        self.wait()
        found = self._retained.find(step)
        found.check()
        options.setdefault("engine", self._options.engine)
        return load(found.path, **options)

    def wait(self) -> None:
        """Wait until the save that is under way is in the manifest, and raise what went wrong with it."""
        self._background.wait()

    def wait_for_tensors(self) -> None:
        """Wait until the tensors of the save that is under way may change. ``overlap`` does that before each step."""
        if self._background.holds_tensors:
            began = time.perf_counter()
            self._background.wait_for_tensors()
            self._tally.add_stall(time.perf_counter() - began)
        self._background.check()

    @contextmanager
    def overlap(self, *optimizers: torch.optim.Optimizer) -> Iterator[Self]:
        """Let saves in this block write the tensors from where they are, while the next batch is computed.

        The caller promises that nothing but these optimizers changes the tensors; before each of their steps, the save
        that is under way has read them all. For what else changes state (buffers of a model, a scheduler), call
        ``wait_for_tensors`` first.

        Args:
            *optimizers: whose ``step`` waits.

        Example:
            >>> model = torch.nn.Linear(2, 3)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> checkpointer = deepnvme.Checkpointer("checkpoints")
            >>> with checkpointer.overlap(optimizer):
            ...     for step in range(3):
            ...         model(torch.randn(4, 2)).sum().backward()
            ...         _ = optimizer.step()
            ...         _ = checkpointer.save(step, {"model": model.state_dict()})
            >>> checkpointer.latest().step
            2
        """
        self._overlaps += 1
        try:
            with before_each_step(optimizers, self._wait_in_hook):
                yield self
        finally:
            self._overlaps -= 1
            if not self._is_async:
                self.wait()

    def close(self) -> None:
        """Wait for the save that is under way, and free the memory. Closing twice does nothing."""
        try:
            self.wait()
        finally:
            self._options = replace(self._options, staging=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        steps = [entry.step for entry in self._retained.entries]
        return f"<deepnvme.Checkpointer {str(self.folder)!r}, steps={steps}>"

    def _start(self, state: Any, path: Path) -> _Saving:
        options = self._options
        if self._is_async and not self._overlaps:
            if options.staging is None:
                options = self._options = replace(options, staging=staging_for(state, self._memory))
        else:
            options = replace(options, staging=None)
        if self._suffix == "safetensors":
            return start_tensors(path, described(state), options)
        return start_archive(state, path, options)

    def _wait_in_hook(self) -> None:
        # That a save failed is raised by the next call, not in the middle of a step. Ctrl-C is raised here: if it were
        # kept, the optimizer would go on to change what is being written.
        try:
            self.wait_for_tensors()
        except Exception as error:  # noqa: BLE001
            self._background.note_failure(error)
