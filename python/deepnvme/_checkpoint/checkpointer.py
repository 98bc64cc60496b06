"""``deepnvme.Checkpointer``: a folder of checkpoints, saved while training goes on."""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint import manifest
from deepnvme._checkpoint.manifest import Checkpoint
from deepnvme._checkpoint.progress import Progress, watcher
from deepnvme._checkpoint.reading import load
from deepnvme._checkpoint.writing import SaveOptions, check_torch, described, start_archive, start_tensors
from deepnvme._deepnvme import __version__, _SaveStaging

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Literal

    import torch
    from typing_extensions import Self

    from deepnvme._deepnvme import Engine, _Saving

# Of the memory that is available, the part that staging takes at the most, unless it is told.
_MEMORY_SHARE = 4


@dataclass(frozen=True)
class CheckpointerStats:
    """What saving has cost so far."""

    saves: int
    """Checkpoints that are in the manifest."""
    nbytes: int
    """Bytes of those."""
    stall_s: float
    """How long ``save``, and the optimizers of ``overlap``, have kept training waiting, in seconds."""
    write_s: float
    """How long the files took, from the call of ``save`` to the name, in seconds."""


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
        if keep is not None and keep < 1:
            msg = f"keep is {keep}; at least 1 checkpoint stays, or all with None"
            raise ValueError(msg)
        if isinstance(every, int) and every < 1:
            msg = f"every is {every}; it is a number of steps from 1 on, or a timedelta"
            raise ValueError(msg)
        if format not in ("pt", "safetensors"):
            msg = f"format is {format!r}; it must be 'pt' or 'safetensors'"
            raise ValueError(msg)
        check_torch("Checkpointer")
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep = keep
        self._every = every
        self._is_async = async_
        self._memory = memory
        self._suffix = format
        self._options = SaveOptions(engine, durability, checksums)
        self._progress = progress
        self._entries = manifest.read(self.folder)
        self._stats = CheckpointerStats(0, 0, 0.0, 0.0)
        self._last_save: float | None = None
        self._overlaps = 0
        self._current: _Background | None = None
        self._failed: BaseException | None = None

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that count, the oldest first."""
        return list(self._entries)

    def latest(self) -> Checkpoint | None:
        """Give the newest checkpoint, or ``None`` where there is none.

        Raises:
            deepnvme.Error: a save in the background has failed.
        """
        self._raise()
        return self._entries[-1] if self._entries else None

    @property
    def stats(self) -> CheckpointerStats:
        """What saving has cost so far."""
        return self._stats

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Save a state, if it is the turn of that step; whether it was.

        Args:
            step: the number of the step, from 0 on. One that is there already is replaced.
            state: as for ``deepnvme.save``.
            force: save whatever ``every`` says, as at the end of training.

        Raises:
            deepnvme.Error: this save failed, or the last one did in the background.
        """
        if step < 0:
            msg = f"step is {step}; steps are counted from 0 on"
            raise ValueError(msg)
        self._raise()
        if not (force or self._is_due(step)):
            return False
        began = time.perf_counter()
        self.wait()
        self._last_save = time.monotonic()
        path = self.folder / manifest.file_name(step, self._suffix)
        is_background = self._is_async or self._overlaps > 0
        options = self._options
        if self._is_async and not self._overlaps:
            options = replace(options, staging=self._staging(state))
        saving = self._start(state, path, options)
        if is_background:
            self._current = _Background(self, saving, step, path, began)
            if not self._overlaps:
                saving.wait_filled()
                self._current.give_back()
        else:
            saved = saving.wait(watcher(self._progress, "saving", path), True)
            self._commit(step, path, saved, time.perf_counter() - began)
        self._add_stall(time.perf_counter() - began)
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
        found = [entry for entry in self._entries if step is None or entry.step == step]
        if not found:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            steps = ", ".join(str(entry.step) for entry in self._entries) or "none"
            msg = f"{self.folder}: there is {what}; those that are there: {steps}"
            raise FileNotFoundError(msg)
        found[-1].check()
        options.setdefault("engine", self._options.engine)
        return load(found[-1].path, **options)

    def wait(self) -> None:
        """Wait until the save that is under way is in the manifest, and raise what went wrong with it."""
        if self._current is not None:
            self._current.join()
        self._raise()

    def wait_for_tensors(self) -> None:
        """Wait until the tensors of the save that is under way may change. ``overlap`` does that before each step."""
        if self._current is not None and not self._current.given_back:
            began = time.perf_counter()
            self._current.saving.wait_filled()
            self._current.give_back()
            self._add_stall(time.perf_counter() - began)
        self._raise()

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
        # What a hook raised would end the training loop in the middle of a step; so it waits, and `save` raises.
        hooks = [optimizer.register_step_pre_hook(lambda *_: self._wait_in_hook()) for optimizer in optimizers]
        self._overlaps += 1
        try:
            yield self
        finally:
            self._overlaps -= 1
            for hook in hooks:
                hook.remove()
            self._wait_in_hook()
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
        steps = [entry.step for entry in self._entries]
        return f"<deepnvme.Checkpointer {str(self.folder)!r}, steps={steps}>"

    def _is_due(self, step: int) -> bool:
        if self._every is None:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._last_save is None or time.monotonic() - self._last_save >= self._every.total_seconds()

    def _start(self, state: Any, path: Path, options: SaveOptions) -> _Saving:
        if self._suffix == "safetensors":
            return start_tensors(path, described(state), options)
        return start_archive(state, path, options)

    def _staging(self, state: Any) -> _SaveStaging:
        if self._options.staging is None:
            nbytes = self._memory
            if nbytes is None:
                from deepnvme._checkpoint.names import tensors_of  # noqa: PLC0415

                # Tensors that share memory count each: too much is no harm.
                wanted = sum(tensor.nbytes for _, tensor in tensors_of(state)) + (4 << 20)
                nbytes = min(wanted, _available() // _MEMORY_SHARE)
            self._options = replace(self._options, staging=_SaveStaging(nbytes))
        staging = self._options.staging
        assert staging is not None
        return staging

    def _wait_in_hook(self) -> None:
        try:
            self.wait_for_tensors()
        except BaseException as error:  # noqa: BLE001
            self._failed = error

    def _raise(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _add_stall(self, seconds: float) -> None:
        self._stats = replace(self._stats, stall_s=self._stats.stall_s + seconds)

    def _commit(self, step: int, path: Path, saved: tuple[int, int, int, int], seconds: float) -> None:
        import torch  # noqa: PLC0415

        nbytes, offset, index_nbytes, crc64 = saved
        now = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
        entry = Checkpoint(
            step, path, nbytes, now, offset, index_nbytes, f"{crc64:016x}", str(torch.__version__), __version__
        )
        entries = sorted([*(old for old in self._entries if old.step != step), entry], key=lambda one: one.step)
        if self._keep is not None:
            # The one that was just saved stays, also where its step is not the highest.
            others = [old for old in entries if old is not entry]
            entries = sorted([*others[len(others) - (self._keep - 1) :], entry] if self._keep > 1 else [entry],
                             key=lambda one: one.step)  # fmt: skip
        manifest.write(self.folder, entries, self._options.durability)
        self._entries = entries
        manifest.remove_others(self.folder, entries)
        stats = self._stats
        self._stats = replace(
            stats, saves=stats.saves + 1, nbytes=stats.nbytes + nbytes, write_s=stats.write_s + seconds
        )


def _available() -> int:
    """Bytes of memory that programs can have without swapping."""
    with Path("/proc/meminfo").open() as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 30


class _Background:
    """A save that goes on by itself, and the thread that puts it into the manifest."""

    def __init__(self, owner: Checkpointer, saving: _Saving, step: int, path: Path, began: float) -> None:
        self.saving = saving
        self.given_back = False
        self._work = (owner, step, path, began)
        # Not a daemon: at the end of the program the save is finished.
        self._thread = threading.Thread(target=self._run, name="deepnvme-checkpointer")
        self._thread.start()

    def _run(self) -> None:
        owner, step, path, began = self._work
        try:
            saved = self.saving.wait(None, False)
            owner._commit(step, path, saved, time.perf_counter() - began)  # noqa: SLF001
        except BaseException as error:  # noqa: BLE001
            owner._failed = error  # noqa: SLF001

    def give_back(self) -> None:
        """Note that the tensors may change."""
        self.given_back = True

    def join(self) -> None:
        """Wait until it is over."""
        while self._thread.is_alive():
            self._thread.join(0.05)
