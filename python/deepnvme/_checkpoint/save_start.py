"""Start the save of a state, of one process, of several, or sharded: which calls save, their memory, and their cost."""

from __future__ import annotations

import datetime as dt
import importlib
from array import array
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.background_save import RunningSave
from deepnvme._checkpoint.nested_states import has_dtensors, local_nbytes
from deepnvme._checkpoint.save import SAFETENSORS_SUFFIX, SaveOptions, checked_tensors, start_archive, start_safetensors
from deepnvme._deepnvme import _SaveStaging
from deepnvme._utils.memory import available_bytes
from deepnvme._utils.public import public, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deepnvme._checkpoint.distributed.process_group import RankGroup
    from deepnvme._checkpoint.distributed.save import Writers
    from deepnvme._checkpoint.history import History

# The default limit of staging memory, as a fraction of the available memory.
_MEMORY_FRACTION = 1 / 4
# The available memory, where the system does not tell.
_AVAILABLE_BYTES = 1 << 30
# Bytes of a file besides its tensors.
_REST_BYTES = 4 << 20
_OR_A_TIME = "a time such as datetime.timedelta(minutes=10)"


class SaveSchedule:
    """Decides which calls save: every Nth step, or a minimum time apart; by default all of them."""

    def __init__(self, every: int | dt.timedelta | None) -> None:
        is_time = every is None or isinstance(every, dt.timedelta)
        self._every = every if is_time else whole(every, "every", 1, otherwise=_OR_A_TIME)
        self._last: float | None = None

    @property
    def is_by_time(self) -> bool:
        """Whether the clock decides. The clocks of several processes differ."""
        return isinstance(self._every, dt.timedelta)

    def is_due(self, step: int, now: float) -> bool:
        """Whether to save a state of this step, at this time in seconds."""
        if self._every is None:
            return True
        if isinstance(self._every, int):
            return step % self._every == 0
        return self._last is None or now - self._last >= self._every.total_seconds()

    def note(self, now: float) -> None:
        """Count the time from here. Failed saves do not count, so the next one stays due."""
        self._last = now


class SaveStarter:
    """Starts saves, and owns their staging memory."""

    def __init__(
        self,
        group: RankGroup,
        history: History,
        writers: Writers,
        suffix: str,
        *,
        options: SaveOptions,
        memory: int | None,
    ) -> None:
        self._group = group
        self._history = history
        self._writers = writers
        self._suffix = suffix
        self._options = options
        self._memory = memory
        # Imported now: a signal handler that saves during the first save would find a half-imported module.
        importlib.import_module("deepnvme._checkpoint.pickler")

    def begin(self, step: int, state: Any, is_copied: bool, ready: Callable[[], None]) -> tuple[RunningSave, Path]:
        """Start a save once ``ready`` returns. With several processes, an error of ``ready`` is raised in all."""
        if self._group.is_single and not has_dtensors(state):
            ready()
            path = self._history.reserve(step, self._suffix)
            with self._release_on_error(path):
                return self._start(state, path, is_copied), path
        from deepnvme._checkpoint.distributed import save as one_state  # noqa: PLC0415

        with self._group.leave_on_error():
            serialised, path = one_state.agree_on_state(
                self._group, self._history, step, state, self._suffix, self._writers, ready
            )
            with self._release_on_error(path):
                if serialised is None:
                    from deepnvme._checkpoint.distributed import sharded  # noqa: PLC0415

                    nbytes = local_nbytes(state)
                    return sharded.start(
                        self._group, path, state, lambda: self._staged_options(nbytes, is_copied)
                    ), path
                nbytes = self._writers.local_nbytes(self._group, serialised.nbytes)
                return one_state.start(
                    self._group, path, serialised, self._writers, lambda: self._staged_options(nbytes, is_copied)
                ), path

    @contextmanager
    def _release_on_error(self, path: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._history.release_name(path)
            raise

    def free(self) -> None:
        """Free the memory."""
        self._options = replace(self._options, staging=None)

    def _start(self, state: Any, path: Path, is_copied: bool) -> RunningSave:
        options = self._staged_options(local_nbytes(state), is_copied)
        if self._suffix == SAFETENSORS_SUFFIX:
            return start_safetensors(path, checked_tensors(state), options, is_private=True)
        return start_archive(state, path, options, is_private=True, warns=True)

    def _staged_options(self, nbytes: int, is_copied: bool) -> SaveOptions:
        """Return how to write a file, with staging memory for this many bytes if tensors are copied first."""
        if not is_copied:
            return replace(self._options, staging=None)
        if self._options.staging is None:
            # Tensors that share memory are counted twice: too much is harmless.
            local_processes = self._group.hosts.count(self._group.hosts[self._group.rank])
            self._options = replace(self._options, staging=staging_for_nbytes(nbytes, self._memory, local_processes))
        return self._options


def staging_for_state(state: Any, limit_bytes: int | None) -> _SaveStaging:
    """Allocate staging memory for the tensors of a state."""
    # Tensors that share memory are counted twice: too much is harmless.
    return staging_for_nbytes(local_nbytes(state), limit_bytes)


def staging_for_nbytes(tensors_nbytes: int, limit_bytes: int | None, local_processes: int = 1) -> _SaveStaging:
    """Allocate staging memory for this many bytes of tensors. ``local_processes`` of this machine do the same."""
    available = available_bytes()
    if limit_bytes is None:
        share = int((_AVAILABLE_BYTES if available is None else available) * _MEMORY_FRACTION) // local_processes
        limit_bytes = min(tensors_nbytes + _REST_BYTES, share)
    elif available is not None:
        # A bound that the machine cannot reach. A save that needs more waits for the disk.
        limit_bytes = min(limit_bytes, available)
    return _SaveStaging(limit_bytes)


@public
@dataclass(frozen=True)
class CheckpointerStats:
    """The cost of saving so far. Every process counts the same files; the times are its own.

    Attributes:
        saves: checkpoints that were added to the manifest.
        nbytes: their size in bytes.
        stall_s: seconds that ``save``, and the optimizers of ``overlap``, blocked training.
        write_s: seconds from each call of ``save`` until its file got its name, summed up.

    Example:
        >>> checkpointer = deepnvme.Checkpointer("checkpoints")
        >>> checkpointer.save(1, {"weight": torch.ones(3)})
        True
        >>> checkpointer.stats().saves
        1
    """

    saves: int
    nbytes: int
    stall_s: float
    write_s: float


class StatsCounter:
    """Adds up the statistics. Threads update them at the same time, and so may a signal handler.

    There is no lock, because a handler would wait forever for the thread that it interrupted. The numbers are appended
    to arrays instead.
    """

    def __init__(self) -> None:
        # Signal handlers and other threads add to them as well, so one call adds a whole entry.
        self._stalls = array("d")
        self._saves = array("d")  # bytes and seconds of each

    @property
    def current(self) -> CheckpointerStats:
        """The statistics so far."""
        saves = self._saves[:]
        nbytes, seconds = int(sum(saves[0::2])), sum(saves[1::2])
        return CheckpointerStats(len(saves) // 2, nbytes, sum(self._stalls[:]), float(seconds))

    def add_stall(self, seconds: float) -> None:
        """Count time that training waited."""
        self._stalls.append(seconds)

    def add_save(self, nbytes: int, seconds: float) -> None:
        """Count one more checkpoint."""
        self._saves.extend((nbytes, seconds))
