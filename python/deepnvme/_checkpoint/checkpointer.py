"""``deepnvme.Checkpointer``: a folder of checkpoints, saved while training goes on.

``history`` decides which checkpoints count, ``save_start`` begins a save, ``background_save`` runs it, and
``distributed`` coordinates several processes.
"""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from deepnvme._checkpoint.background_save import BackgroundSaves, before_each_step
from deepnvme._checkpoint.distributed.parts import fetch
from deepnvme._checkpoint.distributed.process_group import RankGroup
from deepnvme._checkpoint.distributed.save import choose_writers
from deepnvme._checkpoint.history import History
from deepnvme._checkpoint.load import load
from deepnvme._checkpoint.save import SaveOptions
from deepnvme._checkpoint.save_start import CheckpointerStats, SaveSchedule, SaveStarter, StatsCounter
from deepnvme._utils.closing import ClosesAtEnd
from deepnvme._utils.interpreter import check_interpreter
from deepnvme._utils.interrupts import is_of_handler, make_lock
from deepnvme._utils.public import parse_bytes, public, to_absolute_path, whole
from deepnvme._utils.tensors import require_torch
from deepnvme._utils.terminal import ProgressArgument, progress_callback
from deepnvme.errors import ClosedError, InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Literal

    import torch
    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from deepnvme._checkpoint.background_save import Commit, RunningSave, SaveResult
    from deepnvme._checkpoint.checkpoint import Checkpoint
    from deepnvme._deepnvme import Engine

_T = TypeVar("_T")

# Attempts to open a checkpoint that other processes retire at the same time.
_TRIES_MAX = 20


@public
class Checkpointer(ClosesAtEnd):
    """Save checkpoints into a folder, keep the newest ones, and restore them.

    Each checkpoint of one process is one file in the format of ``deepnvme.save``, such as ``step-00000010.pt``.
    ``manifest.json`` lists the complete checkpoints. It is replaced atomically once a new file is complete and on
    disk, so a crash leaves the newest complete checkpoint. The next save removes the remains of an interrupted one.
    Other files that the manifest does not list are never touched. The newest checkpoint is the one that was saved last,
    whatever its step. If a run saves step 20, goes back, and saves step 10, then step 10 is the newest.

    One Checkpointer at a time saves into a folder, from its first save until it is closed. Any number may read.
    Threads that save through one Checkpointer take turns. In a single process, a signal handler may save during a save.

    With ``async_=True``, ``save`` returns once the tensors are copied to pinned memory. If they don't fit, it
    waits until the last tensor is copied. Inside ``overlap`` nothing is copied: the tensors are read where they
    are, and the next ``optimizer.step`` waits until they have been read. One save runs at a time; the next one waits
    for it. If a background save fails, the next call raises its error.

    With ``torch.distributed``, every process makes a Checkpointer and calls ``save`` with the same step. Each writes
    its own byte range of a replicated state. A state with DTensors becomes a folder, and is restored with ``into``.
    Close the Checkpointer before ``destroy_process_group``.

    Args:
        folder: where to save. If missing, it is created by the first save; with several processes, at once.
        keep: how many checkpoints to keep. Default 3; ``None`` keeps all.
        every: which calls of ``save`` write a checkpoint: steps that are a multiple of this number, or a minimum time
            between checkpoints (``datetime.timedelta``). Default: every call.
        async_: save in the background. Default False.
        memory: with ``async_``, bytes of pinned memory for background saves, or text such as ``"4GB"``. It is kept
            until ``close``. Default: the size of the first state that is saved, at most a quarter of the machine's
            available memory, for all its processes together. If a later state is larger, ``save`` waits until its last
            tensor is copied.
        format: ``"pt"`` (default), which takes nested states, or ``"safetensors"``, which takes flat dicts of tensors
            only.
        engine: the engine that transfers the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        checksums: as for ``deepnvme.save``. Default True.
        progress: as for ``deepnvme.save``; background saves show nothing. Default: a bar on a terminal.
        process_group: the processes that save together. A process that saves alone passes a group of its own.
            Default: all processes, if ``torch.distributed`` is initialised.
        layout: how several processes save one state: ``"file"`` (default), one shared file, or ``"parts"``, one file
            for each writer, for folders that are not shared or where a single file is slow.
        writers_per_node: how many processes of each machine write. Default: all.

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between the processes.

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
        memory: int | str | None = None,
        format: Literal["pt", "safetensors"] = "pt",  # noqa: A002 (what users would type)
        engine: Engine | None = None,
        durability: Literal["none", "data", "full"] = "full",
        checksums: bool = True,
        progress: ProgressArgument = None,
        process_group: ProcessGroup | None = None,
        layout: Literal["file", "parts"] = "file",
        writers_per_node: int | None = None,
    ) -> None:
        memory_nbytes: int | None = None
        options = SaveOptions()

        def check() -> None:
            nonlocal keep, memory_nbytes, options, writers_per_node
            if format not in ("pt", "safetensors"):
                msg = f"format is {format!r}; it must be 'pt' or 'safetensors'"
                raise InvalidArgumentError(msg)
            if layout not in ("file", "parts"):
                msg = f"layout is {layout!r}; it must be 'file' or 'parts'"
                raise InvalidArgumentError(msg)
            keep = None if keep is None else whole(keep, "keep", 1, otherwise="None to keep all")
            memory_nbytes = None if memory is None else parse_bytes(memory)
            if memory is not None and not async_:
                msg = "memory is for background saves; pass async_=True as well, or leave it out"
                raise InvalidArgumentError(msg)
            if writers_per_node is not None:
                writers_per_node = whole(writers_per_node, "writers_per_node", 1, otherwise="None for all")
            self._schedule = SaveSchedule(every)
            options = SaveOptions(engine, durability, checksums)
            progress_callback(progress, "saving", folder)
            # The process may change its working directory before the next save.
            self.folder = to_absolute_path(folder)

        require_torch("Checkpointer")
        self._process = os.getpid()
        self._save_lock = make_lock()
        self._nested_saves = 0
        self._has_saved = False
        # First of all: an argument that one rank refuses is an error of all.
        self._group = RankGroup(process_group)
        self._group.run_on_all(check)
        same: dict[str, object] = {"keep": keep, "every": every, "async_": async_, "format": format}
        same |= {"durability": durability, "checksums": checksums, "layout": layout}
        self._group.check_same(str(self.folder), {**same, "writers_per_node": writers_per_node})
        # A group of its own: the training thread uses it while a background save uses the other.
        with self._group.leave_on_error():
            self._timer_group = RankGroup(process_group) if self._schedule.is_by_time else None
        if self._timer_group is not None:
            self._timer_group.join_with(self._group)
        self._history = History(self.folder, keep, self._group, is_synced=durability == "full")
        writers = choose_writers(self._group, layout, writers_per_node)
        self._starter = SaveStarter(
            self._group, self._history, writers, f".{format}", options=options, memory=memory_nbytes
        )
        self._engine = engine
        self._durability = durability
        self._is_async = async_
        self._progress = progress
        self._counter = StatsCounter()
        self._background = BackgroundSaves()
        self._overlaps = 0

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first, including those saved by other processes."""
        self._check_process()
        self._history.refresh_if_unlocked()
        return list(self._history.entries)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint, or ``None`` if there is none.

        Raises:
            deepnvme.Error: a background save failed.
        """
        self._check_process()
        self._background.raise_failure()
        self._history.refresh_if_unlocked()
        found = self._history.entries[-1] if self._history.entries else None
        if found is not None and self._group.is_single and not os.path.lexists(found.path):
            # Somebody has removed it. `restore` would take the one before.
            self._history.refresh()
            return self._history.entries[-1] if self._history.entries else None
        return found

    def stats(self) -> CheckpointerStats:
        """Return the cost of saving so far."""
        self._check_process()
        return self._counter.current

    def save(self, step: int, state: Any, *, force: bool = False) -> bool:
        """Save if this step is due.

        Args:
            step: the step number, from 0. An existing checkpoint of this step is replaced.
            state: as for ``deepnvme.save``.
            force: save even if ``every`` does not require it, as at the end of training.

        Returns:
            Whether it saved, or began to save in the background.

        Raises:
            deepnvme.Error: this save failed, or the previous background save did.
            deepnvme.errors.LockedError: another Checkpointer is saving into the folder.
            TypeError, ValueError: the format cannot store the state; the message names the key.
        """
        self._check_process(is_to_save=True)
        with self._group.leave_on_error():
            if isinstance(step, Mapping):
                raise TypeError("step is a dict; the step comes first: save(step, state)")
            step = whole(step, "step")
        with self._save_lock:
            if self._nested_saves and not self._group.is_single:
                msg = "a signal handler cannot save while this process saves together with others; save after that"
                raise InvalidArgumentError(msg)
            self._nested_saves += 1
            try:
                return self._save(step, state, force)
            except Exception:
                # In a child that a signal handler forked meanwhile, any step may fail: the parent holds the folder.
                self._check_process(is_to_save=True)
                raise
            finally:
                self._nested_saves -= 1

    def _save(self, step: int, state: Any, force: bool) -> bool:
        if self._group.is_single:
            # Several processes raise it together, when a save begins.
            self._background.raise_failure()
        if self._nested_saves == 1:
            # A save that was interrupted twice may have left one behind.
            self._background.abandon_waiting()
        began = time.perf_counter()
        is_due = self._schedule.is_due(step, began)
        if self._timer_group is not None:
            with self._timer_group.leave_on_error():
                is_due = self._timer_group.broadcast(is_due)
        if not (is_due or force):
            return False
        self._has_saved = True
        number = self._history.start_number()
        is_copied = self._is_async and not self._overlaps
        # A save in a signal handler gets its own memory: the interrupted save is using the other.
        path, begun_before = None, self._background.begun
        try:
            saving, path = self._starter.begin(
                step, state, is_copied and self._nested_saves == 1, self._wait_for_previous
            )
            self._run(saving, self._commit_of(step, path, saving, number, began), path)
        except BaseException as error:
            if path is not None:
                self._history.release_name(path)
            self._background.abandon_waiting()
            if self._background.begun == begun_before:
                # Otherwise the other ranks wait forever for this rank's part of the save.
                self._group.leave_unless_shared(error)
            raise
        self._schedule.note(began)
        self._counter.add_stall(time.perf_counter() - began)
        return True

    def _commit_of(self, step: int, path: Path, saving: RunningSave, number: int, began: float) -> Commit:
        """Return the function that adds a written checkpoint to the history."""

        def commit(saved: SaveResult, check_wanted: Callable[[], None]) -> None:
            with self._group.leave_on_error():
                self._history.commit(step, path, saved, saving, number, check_wanted)
            self._counter.add_save(saved[0], time.perf_counter() - began)

        return commit

    def _run(self, saving: RunningSave, commit: Commit, path: Path) -> None:
        """Write and commit a checkpoint, or begin to."""
        report = (
            progress_callback(self._progress, "saving", path)
            if self._group.is_leader or callable(self._progress)
            else None
        )
        if self._is_async or self._overlaps:
            self._background.start(saving, commit)
            if not self._overlaps:
                self._background.wait_last_read()
        elif self._group.is_single:
            try:
                commit(saving.wait(report, True), lambda: None)
            except BaseException:
                # Ctrl-C may come once the file is complete. The exception may outlive this call, and the save with it.
                saving.discard()
                raise
        else:
            self._background.start(saving, commit, waits_for_caller=True)
            self._background.wait_with_progress(report)

    def _wait_for_previous(self) -> None:
        """Wait for the previous save."""
        try:
            self._background.wait()
        except BaseException as error:
            if self._background.is_running:
                # Its exchanges with the other ranks would mix with those of the next save.
                self._group.leave(f"{type(error).__name__} during a save", error)
            raise

    def _check_process(self, *, is_to_save: bool = False) -> None:
        check_interpreter()
        if os.getpid() == self._process or not (is_to_save or self._has_saved or not self._group.is_single):
            return
        text = f"{self.folder}: this Checkpointer belongs to process {self._process}, the parent of this fork"
        msg = f"{text}; make a new one here, or use it in the parent"
        raise ClosedError(msg)

    def restore(self, step: int | None = None, **options: Any) -> Any:
        """Load a checkpoint: the newest, or that of a given step.

        Args:
            step: the step of the checkpoint. Default: the newest.
            **options: as for ``deepnvme.load``: ``device``, ``into``, ``only``, ``verify``, ... A sharded checkpoint
                needs ``into``, and takes only ``engine`` and ``verify`` besides.

        Returns:
            The saved state; with ``into``, the object passed as ``into``.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            deepnvme.errors.ChecksumError: the file is not the one that was saved.
            deepnvme.errors.InvalidArgumentError: the checkpoint is sharded, and ``into`` is missing or another option
                is given.

        Example:
            >>> checkpointer = deepnvme.Checkpointer("checkpoints")
            >>> checkpointer.save(7, {"weight": torch.ones(3)})
            True
            >>> checkpointer.restore(7, verify="full")["weight"]
            tensor([1., 1., 1.])
        """
        self._check_process()
        self._background.wait()
        options.setdefault("engine", self._engine)
        return self._with_checkpoint(step, lambda found: self._restore(found, options))

    def _with_checkpoint(self, step: int | None, use: Callable[[Checkpoint], _T]) -> _T:
        """Use a checkpoint. If another process or thread retires it meanwhile, retry with the newer one."""
        self._history.refresh_if_unlocked()
        for _ in range(_TRIES_MAX):
            before = self._history.entries
            try:
                found = self._history.find(step)
            except Exception as error:
                if any(entry.is_sharded for entry in before):
                    # Other ranks may have found theirs, and wait.
                    self._group.leave_unless_shared(error)
                raise
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
        if not found.is_sharded:
            found.check()
            return load(found.path, **options)
        from deepnvme._checkpoint.distributed import sharded  # noqa: PLC0415

        return sharded.restore(self._group, found, options)

    def fetch_parts(self, step: int | None = None) -> int:
        """Copy parts that are on other machines' local disks to this machine.

        For ``layout="parts"`` in folders that machines do not share. All processes call it before ``restore``. It uses
        16 MiB of memory, and disk space for the missing parts until the checkpoint is removed.

        Args:
            step: the step of the checkpoint. Default: the newest.

        Returns:
            The bytes copied to this machine.

        Raises:
            FileNotFoundError: there is no such checkpoint, or no machine has one of its parts.
            deepnvme.errors.PeerError: another process has failed.
        """
        self._check_process()
        self._background.wait()
        return fetch(self._group, lambda: self._history.find(step), self._durability)

    def wait(self) -> None:
        """Wait until the current save is in the manifest. Raises the save's error if it failed."""
        self._check_process()
        self._background.wait()

    def wait_for_tensors(self) -> None:
        """Wait until the tensors of the current save may change. ``overlap`` does this before each step."""
        self._check_process()
        if self._background.holds_tensors:
            began = time.perf_counter()
            self._background.wait_all_read()
            self._counter.add_stall(time.perf_counter() - began)
        self._background.raise_failure()

    @contextmanager
    def overlap(self, *optimizers: torch.optim.Optimizer) -> Iterator[Self]:
        """Let saves in this block read tensors where they are, without a copy, while the next batch is computed.

        The caller promises that only these optimizers change the tensors. Before each of their steps, the current save
        finishes reading them. Call ``wait_for_tensors`` before changing other state (module buffers, a scheduler). The
        end of the block waits until the tensors have been read, and without ``async_`` until the save is in the
        manifest.

        Args:
            *optimizers: the optimizers whose ``step`` waits.

        Yields:
            The Checkpointer.

        Raises:
            TypeError: an argument is not an optimizer of torch.

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
            with before_each_step(optimizers, self._wait_in_hook):
                yield self
        finally:
            self._overlaps -= 1
            if not self._is_async:
                self.wait()

    def close(self) -> None:
        """Wait for the current save, unlock the folder, and free the memory.

        Closing twice does nothing. A later save locks the folder again.

        With several processes, this also closes their connections. Checkpoints can still be listed, and restored unless
        they are sharded.

        Raises:
            deepnvme.Error: the background save failed. The folder is unlocked all the same.
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

    def _check_open(self) -> None:
        self._check_process()

    def __repr__(self) -> str:
        steps = [entry.step for entry in self._history.entries]
        return f"<deepnvme.Checkpointer {str(self.folder)!r}, steps={steps}>"

    def _wait_in_hook(self) -> None:
        # The next call raises the save's failure, not the middle of a step. Ctrl-C is raised here: otherwise the
        # optimizer would change what is being written.
        try:
            self.wait_for_tensors()
        except Exception as error:
            if is_of_handler(error):
                raise
            self._background.add_failure(error)
