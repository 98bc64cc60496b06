"""``deepnvme.Checkpointer``: a folder of checkpoints, saved while training goes on.

``retention`` knows what counts, ``schedule`` whose turn it is, ``background`` has the save that is under way,
``starting`` knows how one begins, ``overlap`` has optimizers wait for it, ``distributed`` knows the other processes,
if there are any.
"""

from __future__ import annotations

import datetime as dt
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from deepnvme._checkpoint.background_save import BackgroundSaves
from deepnvme._checkpoint.distributed.parts import fetch
from deepnvme._checkpoint.distributed.process_group import RankGroup
from deepnvme._checkpoint.distributed.writers import choose_writers
from deepnvme._checkpoint.history import History
from deepnvme._checkpoint.load import load
from deepnvme._checkpoint.save import SaveOptions, require_torch
from deepnvme._checkpoint.save_start import SaveStarter
from deepnvme._utils.arguments import path_of, whole
from deepnvme._utils.terminal import Progress, progress_callback
from deepnvme.errors import ClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Literal

    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from deepnvme._checkpoint.background_save import SaveResult
    from deepnvme._checkpoint.history import Checkpoint
    from deepnvme._deepnvme import Engine

_T = TypeVar("_T")

# How often a checkpoint may be retired while it is being opened.
_TRIES_MAX = 20


@dataclass(frozen=True)
class CheckpointerStats:
    """What saving has cost so far. Of several processes all count the same files, and each its own time."""

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
    that was being written goes with the next save. Files that the manifest does not list are left alone.

    One Checkpointer at a time saves into a folder, from its first save until it is closed; any number of them read.
    Threads that save through one take turns, and a signal handler may save during a save.

    With ``async_=True``, ``save`` returns when the tensors have been copied into page-locked memory, or, of what does
    not fit there, onto the disk; the rest goes on while training does. Inside ``overlap`` nothing is copied: the
    tensors are written from where they are, and the next ``optimizer.step`` waits if they have not been yet. One save
    is under way at a time: the next one waits for it. What goes wrong in the background is raised by the next call.

    Where ``torch.distributed`` is set up, all processes make a Checkpointer and call ``save`` with the same step. Each
    writes its stretch of a state that all have; a state with DTensors becomes a folder, which is restored ``into`` a
    state. Close it before ``destroy_process_group``. `docs/checkpoints.md` says more.

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
        process_group: the processes that save together; a process that saves by itself gives a group of its own.
            Default: all, where ``torch.distributed`` is set up.
        layout: what a state becomes that several processes save: ``"file"`` (default), or ``"parts"``, one file of
            each, where they do not share a folder or one file is slow.
        writers_per_node: how many processes of each machine write. Default: all.

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
        process_group: ProcessGroup | None = None,
        layout: Literal["file", "parts"] = "file",
        writers_per_node: int | None = None,
    ) -> None:
        if format not in ("pt", "safetensors"):
            msg = f"format is {format!r}; it must be 'pt' or 'safetensors'"
            raise ValueError(msg)
        if layout not in ("file", "parts"):
            msg = f"layout is {layout!r}; it must be 'file' or 'parts'"
            raise ValueError(msg)
        keep = None if keep is None else whole(keep, "keep (None keeps all)", 1)
        memory = None if memory is None else whole(memory, "memory")
        if writers_per_node is not None:
            writers_per_node = whole(writers_per_node, "writers_per_node (None has all write)", 1)
        require_torch("Checkpointer")
        # The process may change its folder before the next save.
        self.folder = path_of(folder).absolute()
        self._process = os.getpid()
        self._save_lock = threading.RLock()
        self._nested_saves = 0
        self._has_saved = False
        self._schedule = _SaveSchedule(every)
        self._group = RankGroup(process_group)
        # Asked by whoever trains, at the same time as a save in the background asks the others: it needs its own.
        self._timer_group = RankGroup(process_group) if self._schedule.is_by_time else None
        same: dict[str, object] = {"keep": keep, "every": every, "async_": async_, "format": format}
        same |= {"durability": durability, "checksums": checksums, "layout": layout}
        self._group.check_same(str(self.folder), {**same, "writers_per_node": writers_per_node})
        self._history = History(self.folder, keep, self._group, is_synced=durability == "full")
        options = SaveOptions(engine, durability, checksums)
        writers = choose_writers(self._group, layout, writers_per_node)
        self._starter = SaveStarter(self._group, self._history, writers, f".{format}", options=options, memory=memory)
        self._engine = engine
        self._durability = durability
        self._is_async = async_
        self._progress = progress
        self._counter = _StatsCounter()
        self._background = BackgroundSaves()
        self._overlaps = 0

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that count, the oldest first; those of another process that saves, too."""
        self._check_process()
        self._history.refresh_if_unlocked()
        return list(self._history.entries)

    def latest(self) -> Checkpoint | None:
        """Give the newest checkpoint, or ``None`` where there is none.

        Raises:
            deepnvme.Error: a save in the background has failed.
        """
        self._check_process()
        self._background.raise_failure()
        self._history.refresh_if_unlocked()
        return self._history.entries[-1] if self._history.entries else None

    @property
    def stats(self) -> CheckpointerStats:
        """What saving has cost so far."""
        self._check_process()
        return self._counter.current

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Save a state, if it is the turn of that step; whether it was.

        Args:
            step: the number of the step, from 0 on. One that is there already is replaced.
            state: as for ``deepnvme.save``.
            force: save whatever ``every`` says, as at the end of training.

        Raises:
            deepnvme.Error: this save failed, or the last one did in the background.
            deepnvme.errors.LockedError: another Checkpointer saves into the folder.
        """
        self._check_process(is_to_save=True)
        step = whole(step, "step")
        with self._save_lock:
            if self._nested_saves and not self._group.is_single:
                msg = "a signal handler saves while this process saves together with others; save when that is over"
                raise InvalidArgumentError(msg)
            self._nested_saves += 1
            try:
                return self._save(step, state, force)
            finally:
                self._nested_saves -= 1

    def _save(self, step: int, state: Any, force: bool) -> bool:
        if self._group.is_single:
            # Others have to hear of it: they do when a save begins, which is everybody's turn.
            self._background.raise_failure()
        began = time.perf_counter()
        is_due = self._schedule.is_due(step, began)
        if self._timer_group is not None:
            is_due = self._timer_group.broadcast(is_due)
        if not (is_due or force):
            return False
        self._has_saved = True
        number = self._history.start_number()
        is_copied = self._is_async and not self._overlaps
        # What a signal handler saves has memory of its own: that of the save it interrupted is in use.
        saving, path = self._starter.begin(step, state, is_copied and self._nested_saves == 1, self._wait_for_previous)

        def commit(saved: SaveResult) -> None:
            with self._group.leave_on_error():
                self._history.commit(step, path, saved, saving, number)
            self._counter.add_save(saved[0], time.perf_counter() - began)

        report = (
            progress_callback(self._progress, "saving", path)
            if self._group.is_leader or callable(self._progress)
            else None
        )
        try:
            if self._is_async or self._overlaps:
                self._background.start(saving, commit)
                if not self._overlaps:
                    self._background.wait_for_copies()
            elif self._group.is_single:
                commit(saving.wait(report, True))
            else:
                self._background.start(saving, commit)
                self._background.wait_with_progress(report)
        except BaseException:
            self._history.release_name(path)
            raise
        self._schedule.note(began)
        self._counter.add_stall(time.perf_counter() - began)
        return True

    def _wait_for_previous(self) -> None:
        """Wait for the save before this one."""
        self._background.wait()

    def _check_process(self, *, is_to_save: bool = False) -> None:
        if os.getpid() == self._process or not (is_to_save or self._has_saved or not self._group.is_single):
            return
        text = f"{self.folder}: this Checkpointer belongs to process {self._process}, which this one was forked from"
        msg = f"{text}; make a new one here, or use it in its parent"
        raise ClosedError(msg)

    def restore(self, step: int | None = None, **options: Any) -> Any:
        """Load a checkpoint: the newest one, or the one of that step.

        Args:
            step: which one. Default: the newest.
            **options: as for ``deepnvme.load``: ``device``, ``into``, ``only``, ``verify``, ...

        Raises:
            FileNotFoundError: there is none.
            deepnvme.errors.ChecksumError: the file is not the one that was saved.
        """
        self._check_process()
        self._background.wait()
        options.setdefault("engine", self._engine)
        return self._with_checkpoint(step, lambda found: self._restore(found, options))

    def _with_checkpoint(self, step: int | None, use: Callable[[Checkpoint], _T]) -> _T:
        """Use a checkpoint. Another process, or thread, may retire it meanwhile: then there is a newer one."""
        self._history.refresh_if_unlocked()
        for _ in range(_TRIES_MAX):
            before = self._history.entries
            found = self._history.find(step)
            try:
                return use(found)
            except FileNotFoundError:
                if not self._group.is_single:
                    raise
                is_other = self._history.refresh() or self._history.entries != before
                if not is_other:
                    raise
        return use(self._history.find(step))

    def _restore(self, found: Checkpoint, options: dict[str, Any]) -> Any:
        found.check()
        if not found.is_sharded:
            return load(found.path, **options)
        if not {"engine", "into"} <= set(options) <= {"engine", "into", "verify"}:
            msg = (
                f"{found.path} is sharded: processes have saved parts of tensors. Give restore(into=state), with a "
                "state whose tensors say which parts this process wants, and nothing else but engine and verify"
            )
            raise ValueError(msg)
        from deepnvme._checkpoint.distributed import sharded  # noqa: PLC0415

        rest = {name: value for name, value in options.items() if name != "into"}
        return sharded.restore(self._group, found, options["into"], rest)

    def fetch_parts(self, step: int | None = None) -> int:
        """Bring the parts of a checkpoint here that lie on other machines' own disks, and give the bytes of that.

        For ``layout="parts"`` in folders that machines do not share; all processes call it, and then ``restore``. It
        takes 16 MiB of memory, and on each machine the room of what it lacks, until the checkpoint is retired.

        Args:
            step: which one. Default: the newest.

        Raises:
            FileNotFoundError: there is none, or a part of it is nowhere.
            deepnvme.errors.PeerError: another process has failed.
        """
        self._check_process()
        self._background.wait()
        return fetch(self._group, self._history.find(step), self._durability)

    def wait(self) -> None:
        """Wait until the save that is under way is in the manifest, and raise what went wrong with it."""
        self._check_process()
        self._background.wait()

    def wait_for_tensors(self) -> None:
        """Wait until the tensors of the save that is under way may change. ``overlap`` does that before each step."""
        self._check_process()
        if self._background.holds_tensors:
            began = time.perf_counter()
            self._background.wait_for_tensors()
            self._counter.add_stall(time.perf_counter() - began)
        self._background.raise_failure()

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
        self._check_process(is_to_save=True)
        self._overlaps += 1
        try:
            with _before_each_step(optimizers, self._wait_in_hook):
                yield self
        finally:
            self._overlaps -= 1
            if not self._is_async:
                self.wait()

    def close(self) -> None:
        """Wait for the save that is under way, let others save into the folder, and free the memory.

        Closing twice does nothing, and a save after it takes the folder again.

        Of several processes the connections are closed, too: what is there can still be listed and restored, unless it
        is sharded.
        """
        self._check_process()
        with self._save_lock:
            try:
                self._background.wait()
            finally:
                self._starter.free()
                self._history.unlock()
                if self._timer_group is not None:
                    self._timer_group.close()
                self._group.close()

    def __enter__(self) -> Self:
        self._check_process()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        steps = [entry.step for entry in self._history.entries]
        return f"<deepnvme.Checkpointer {str(self.folder)!r}, steps={steps}>"

    def _wait_in_hook(self) -> None:
        # That a save failed is raised by the next call, not in the middle of a step. Ctrl-C is raised here: if it were
        # kept, the optimizer would go on to change what is being written.
        try:
            self.wait_for_tensors()
        except Exception as error:  # noqa: BLE001
            self._background.add_failure(error)


class _SaveSchedule:
    """Every so many steps, or so long after the last save; each call where nothing was said."""

    def __init__(self, every: int | dt.timedelta | None) -> None:
        is_time = every is None or isinstance(every, dt.timedelta)
        self._every = every if is_time else whole(every, "every (a number of steps, or a timedelta)", 1)
        self._last: float | None = None

    @property
    def is_by_time(self) -> bool:
        """Whether a clock says it: those of several processes differ."""
        return isinstance(self._every, dt.timedelta)

    def is_due(self, step: int, now: float) -> bool:
        """Whether a state of that step, at that time in seconds, is to be saved."""
        if self._every is None:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._last is None or now - self._last >= self._every.total_seconds()

    def note(self, now: float) -> None:
        """Count the time from here. A save that failed is not noted: the next one is due as it was."""
        self._last = now


class _StatsCounter:
    """Adds up. Threads report it at the same time, and so does a signal handler that saves during a save.

    It takes no lock, which a handler would wait for that interrupted its holder: each number is put into a list.
    """

    def __init__(self) -> None:
        self._stalls: list[float] = []
        self._saves: list[tuple[int, float]] = []

    @property
    def current(self) -> CheckpointerStats:
        """What there is so far."""
        saves = list(self._saves)
        nbytes, seconds = sum(nbytes for nbytes, _ in saves), sum(seconds for _, seconds in saves)
        return CheckpointerStats(len(saves), nbytes, sum(list(self._stalls)), float(seconds))

    def add_stall(self, seconds: float) -> None:
        """Training has waited."""
        self._stalls.append(seconds)

    def add_save(self, nbytes: int, seconds: float) -> None:
        """One more checkpoint counts."""
        self._saves.append((nbytes, seconds))


@contextmanager
def _before_each_step(optimizers: tuple[torch.optim.Optimizer, ...], wait: Callable[[], None]) -> Iterator[None]:
    """Call ``wait`` before each step of these optimizers, and when the block ends."""
    hooks = [optimizer.register_step_pre_hook(lambda *_: wait()) for optimizer in optimizers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        wait()
