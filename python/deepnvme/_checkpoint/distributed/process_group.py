"""The processes that save one folder of checkpoints, the name of their group, and their communication.

They use a gloo group of their own, separate from the collectives of training and its GPUs, so that background threads
can use it. After an error of one process all of them raise one, so that none waits for a process that gave up.

torch names a group after the number of groups that this process has made. Processes that made different numbers of
groups before wait for each other under different names. So our groups get names of their own, and torch does not count
them: later groups of others have equal names everywhere.
"""

from __future__ import annotations

import contextvars
import datetime as dt
import os
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from traceback import clear_frames
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from deepnvme._utils.interrupts import POLL_INTERVAL_S, SignalSafeEvent, is_of_handler
from deepnvme._utils.public import warn_caller
from deepnvme.errors import CancelledError, InvalidArgumentError, PeerError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# Groups of Checkpointers that were dropped without `close`. Their connections close when the next group is made: the
# garbage collector may run in the middle of a call of torch that goes through all groups.
_dropped: list[ProcessGroup] = []

T = TypeVar("T")
_Raised = TypeVar("_Raised", bound=BaseException)

# How long the fastest process waits for the slowest to write its share. The end of a process is noticed at once; this
# is for machines that vanish. torch's own gloo groups have the same default.
TIMEOUT = dt.timedelta(minutes=30)
# A rank that waits longer than this for the others to make their Checkpointers says so, once.
PATIENCE_S = 30.0
# Of `torch.distributed` as it is initialised now: how often each set of ranks has made a group.
_made: Counter[tuple[int, ...]] = Counter()
_world: weakref.ref[Any] | None = None
# The name that the next group of this thread gets.
_of_thread = threading.local()


@dataclass
class _Failure:
    """An error in another process, as text: some exceptions cannot be sent."""

    text: str


class RankGroup:
    """The ranks of a process group, or a single process. All ranks make one at the same time.

    Args:
        process_group: the ranks. Default: all, or this process alone if ``torch.distributed`` is not initialised.
    """

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self._process = os.getpid()
        self.torch_group: ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self._shared_error: BaseException | None = None
        self._left_because: str | None = None
        self._has_new_name = True
        # Groups of the same ranks that this one takes along if it leaves. Weak: a cycle would keep dropped ones open.
        self._partners: list[weakref.ref[RankGroup]] = []
        if process_group is not None or _is_initialised():
            self._join(process_group)
        self.hosts: list[str] = self.all_gather(socket.gethostname())

    def __del__(self) -> None:
        # If `__init__` failed, some fields are missing.
        group = vars(self).get("torch_group")
        if group is not None and self._process == os.getpid() and self._has_new_name:
            _dropped.append(group)

    def _join(self, process_group: ProcessGroup | None) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        while _dropped:
            _destroy(_dropped.pop())
        if dist.get_rank(process_group) < 0:
            msg = "this process is not in process_group; only members can make a Checkpointer with it"
            raise InvalidArgumentError(msg)
        # Up to torch 2.7 this call requires a group, even for all ranks.
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        name = own_name(ranks)
        # Without a name of ours, torch numbers groups of all ranks, and so never gives one of them an earlier name.
        is_numbered = name is None and len(ranks) == dist.get_world_size()
        self._has_new_name = name is not None or is_numbered

        def connect() -> ProcessGroup:
            with name or nullcontext():
                made = dist.new_group(ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=not is_numbered)
            return cast("ProcessGroup", made)

        self.torch_group = _rendezvous(connect, _timeout_of(process_group or dist.group.WORLD))
        self.rank, self.size = dist.get_rank(self.torch_group), len(ranks)

    @property
    def is_leader(self) -> bool:
        """Whether this process decides for all, and writes files that exist once."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether there is no other process."""
        return self.size == 1

    def name(self, rank: int) -> str:
        """Return a rank and its machine, for messages."""
        return f"rank {rank} on {self.hosts[rank]}"

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order."""
        if self.is_single:
            return [value]
        import torch.distributed as dist  # noqa: PLC0415

        values: list[Any] = [None] * self.size
        self._collective(lambda: dist.all_gather_object(values, value, group=self._open_group()))
        return cast("list[T]", values)

    def broadcast(self, value: T) -> T:
        """Return the leader's value."""
        if self.is_single:
            return value
        import torch.distributed as dist  # noqa: PLC0415

        values: list[Any] = [value]
        leader = dist.get_global_rank(self._open_group(), 0)
        self._collective(lambda: dist.broadcast_object_list(values, src=leader, group=self._open_group()))
        return cast("T", values[0])

    def broadcast_tensor(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill the tensor with that of a rank."""
        import torch.distributed as dist  # noqa: PLC0415

        source = dist.get_global_rank(self._open_group(), rank)
        self._collective(lambda: dist.broadcast(tensor, src=source, group=self._open_group()))

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run ``work`` on every rank and return all results.

        If ranks fail, each of them raises its own error, and the others a ``PeerError`` that repeats the first. Ctrl-C
        leaves the group, since the others may come late. So must ``work`` if collectives of its own fail on one rank.
        """
        if self.is_single:
            return [work()]
        failed: BaseException | None = None
        own: T | _Failure
        try:
            own = work()
        except BaseException as error:
            if self._left_because is not None or self.is_shared_error(error):
                raise
            if not isinstance(error, Exception):
                self.leave(f"{type(error).__name__}: {error}", error)
                raise
            failed = error
            own = _Failure(f"{type(error).__name__}: {error}")
        results = self.all_gather(own)
        if failed is not None:
            self._shared_error = failed
            raise failed
        failures = [(rank, result) for rank, result in enumerate(results) if isinstance(result, _Failure)]
        if failures:
            rank, failure = failures[0]
            others = len(failures) - 1
            more = f" (and {others} other{'s' if others > 1 else ''})" if others else ""
            self._shared_error = PeerError(f"{self.name(rank)}{more} failed, so all ranks fail: {failure.text}")
            raise self._shared_error
        return cast("list[T]", results)

    def is_shared_error(self, error: BaseException) -> bool:
        """Whether all ranks raise an error because of this one, so that none of them goes on."""
        return error is self._shared_error

    def raise_on_all(self, message: str) -> NoReturn:
        """Raise an error that all other ranks raise at the same place."""
        raise self.shared(InvalidArgumentError(message))

    def shared(self, error: _Raised) -> _Raised:
        """Return an error after noting that all ranks raise one at the same place."""
        self._shared_error = error
        return error

    def check_same(self, what: str, values: dict[str, object]) -> None:
        """Raise an error on all ranks if their values differ."""
        gathered = self.all_gather(values)
        for rank, others in enumerate(gathered):
            for key, value in gathered[0].items():
                if others[key] != value:
                    text = f"{key} is {others[key]!r} at {self.name(rank)} and {value!r} at {self.name(0)}"
                    self.raise_on_all(f"{what}: {text}; use the same value everywhere")

    @contextmanager
    def leave_on_error(self) -> Iterator[None]:
        """Leave the group if the block fails with an error that the other ranks don't know, so that they don't wait."""
        try:
            yield
        except BaseException as error:
            self.leave_unless_shared(error)
            raise

    def leave_unless_shared(self, error: BaseException) -> None:
        """Leave the group because of an error, unless all ranks raise it."""
        if not self.is_shared_error(error):
            self.leave(f"{type(error).__name__}: {error}", error)

    def leave(self, why: str, error: BaseException | None = None) -> None:
        """Close the connections. Ranks that wait for this process get an error and leave as well."""
        # A forked child has copies of its parent's connections.
        is_member = self._process == os.getpid() and not self.is_single
        if self.torch_group is not None and is_member and self._left_because is None:
            self._left_because = why
            # They close with the last reference to the group, and torch's frames have some.
            for failed in (error, self._shared_error):
                _clear_frames(failed, set())
            self._destroy()
            for reference in self._partners:
                partner = reference()
                if partner is not None:
                    partner.leave(why, error)

    def join_with(self, other: RankGroup) -> None:
        """Make both groups leave if one does."""
        self._partners.append(weakref.ref(other))
        other._partners.append(weakref.ref(self))

    def close(self) -> None:
        """Leave the group after the last exchange.

        The connections stay open if a later group could get the name of this one, and would then find its addresses.
        """
        if self.torch_group is not None and self._left_because is None:
            self._left_because = "it was closed"
            if self._has_new_name:
                self._destroy()

    def _destroy(self) -> None:
        group, self.torch_group = self.torch_group, None
        assert group is not None
        _destroy(group)

    def check_open(self) -> None:
        """Raise an error if this process has left the group."""
        if self._left_because is not None:
            text = f"this Checkpointer has left the group of the other processes ({self._left_because}); make a new one"
            raise PeerError(f"{text} in every process")

    def _open_group(self) -> ProcessGroup:
        self.check_open()
        assert self.torch_group is not None
        return self.torch_group

    def _collective(self, work: Callable[[], object]) -> None:
        # `work` must not hold the group: after `leave`, the connections close with the last reference to it.
        try:
            run_interruptibly(work)
        except PeerError:
            raise
        # torch has no exception class for a closed connection, and its message is about sockets.
        except (RuntimeError, ValueError) as error:
            self.raise_lost(error)
        except BaseException as error:
            # Ctrl-C, or no room for a thread. The others wait for an answer that does not come.
            self.leave(f"{type(error).__name__}: {error}", error)
            raise

    def raise_lost(self, error: Exception) -> NoReturn:
        """Leave the group, and report that the other ranks no longer answer.

        An error that a signal handler has raised is raised unchanged.
        """
        if is_of_handler(error):
            self.leave(f"{type(error).__name__}: {error}", error)
            raise error
        why = f"another process ended, or did not answer within {TIMEOUT}: {error}"
        self.leave(why, error)
        raise PeerError(why) from error


def _clear_frames(error: BaseException | None, seen: set[int]) -> None:
    """Clear the frames of an error and of those before it. torch's `CheckpointException` has `failures`."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    clear_frames(error.__traceback__)
    others = [failure[0] for failure in getattr(error, "failures", {}).values()]
    for other in (error.__cause__, error.__context__, *others):
        _clear_frames(other, seen)


def _destroy(group: ProcessGroup) -> None:
    """Close the connections of a group."""
    import torch.distributed as dist  # noqa: PLC0415

    # The training script may have destroyed all groups already.
    with suppress(ValueError, AssertionError):
        dist.destroy_process_group(group)


def _rendezvous(connect: Callable[[], ProcessGroup], timeout: dt.timedelta) -> ProcessGroup:
    """Connect all ranks.

    Raises:
        PeerError: the ranks could not be connected, or another one has not come within this time. The thread that
            waits for it stays behind. It closes the connections once they are made, so that no late rank waits.
    """
    has_warned = False
    lock = threading.Lock()
    is_wanted = True
    made: list[ProcessGroup] = []

    def make() -> ProcessGroup:
        # Nothing else may refer to the group: its connections close with the last reference.
        made.append(connect())
        with lock:
            if is_wanted:
                return made[0]
        _destroy(made.pop())
        msg = "the call that connected the processes has ended"
        raise CancelledError(msg)

    def check(waited_s: float) -> None:
        nonlocal has_warned
        if waited_s > PATIENCE_S and not has_warned:
            has_warned = True
            warn_caller(
                "this process waits for the other ranks to make their Checkpointer; make it in all processes, not only "
                "in one (`if rank == 0:`), or pass a process_group that contains this process alone"
            )
        if waited_s > timeout.total_seconds():
            msg = (
                f"no other process connected within {timeout}: one has ended, or does not make a Checkpointer; make "
                "it in all processes, not only in one (`if rank == 0:`), or pass a process_group that contains this "
                "process alone"
            )
            raise PeerError(msg)

    try:
        return run_interruptibly(make, check)
    except (RuntimeError, ValueError) as error:
        msg = f"the processes could not be connected: {error}"
        raise PeerError(msg) from error
    except BaseException:
        with lock:
            is_wanted = False
        while made:
            _destroy(made.pop())
        raise


def run_interruptibly(work: Callable[[], T], check: Callable[[float], None] | None = None) -> T:
    """Run work that waits for other ranks in C++, which checks no signals. So Ctrl-C works: another thread runs it.

    Threads that get no signals run it themselves. After Ctrl-C, the other thread stays behind until the ranks answer,
    or until the group is left and its connections close.

    Args:
        work: it runs with the caller's grad mode, device and context.
        check: is called at intervals with the seconds so far, even where the caller gets no signals.
    """
    if check is None and threading.current_thread() is not threading.main_thread():
        return work()
    done: list[T] = []
    failed: list[BaseException] = []
    is_over = SignalSafeEvent()
    run_here = _with_state_of_this_thread(work)

    def run() -> None:
        try:
            done.append(run_here())
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)
        finally:
            is_over.set()

    threading.Thread(target=run, name="deepnvme-collective", daemon=True).start()
    began = time.monotonic()
    while not is_over.wait(POLL_INTERVAL_S):
        if check is not None:
            check(time.monotonic() - began)
    # Removed from the lists: a traceback refers to them, and would keep itself alive.
    if failed:
        raise failed.pop()
    return done.pop()


def _with_state_of_this_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Make work run in another thread with what torch and Python keep for each thread."""
    import torch  # noqa: PLC0415

    context = contextvars.copy_context()
    grad_mode, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def run() -> T:
        if device is not None:
            torch.cuda.set_device(device)
        with torch.inference_mode(is_inference), torch.set_grad_enabled(grad_mode):
            return context.run(work)

    return run


def _timeout_of(group: Any) -> dt.timedelta:
    """Return how long the ranks of a group wait for each other.

    It is at most ``TIMEOUT``, which is also the answer if torch does not tell.
    """
    import torch  # noqa: PLC0415

    for device in ("cpu", "cuda"):
        with suppress(Exception):
            own: dt.timedelta = group._get_backend(torch.device(device)).options._timeout  # noqa: SLF001
            return min(TIMEOUT, own)
    return TIMEOUT


def _is_initialised() -> bool:
    # Importing torch.distributed takes long. If nobody imported it, it is not initialised.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())


def own_name(ranks: Sequence[int]) -> AbstractContextManager[object] | None:
    """Return a block in which torch gives one group of these ranks a name of its own, or ``None`` if it cannot.

    All of these ranks call this in the same order.
    """
    import torch.distributed.distributed_c10d as c10d  # noqa: PLC0415

    # Earlier versions of torch take the number of groups that exist, which this cannot replace.
    if "group_count" not in c10d._hash_ranks_to_str.__code__.co_names:  # noqa: SLF001
        return None
    return _OwnName(c10d._world, f"deepnvme.{_next_number(ranks)}")  # noqa: SLF001


def _next_number(ranks: Sequence[int]) -> int:
    global _world  # noqa: PLW0603
    import torch.distributed as dist  # noqa: PLC0415

    world = dist.group.WORLD
    if _world is None or _world() is not world:
        _made.clear()
        _world = weakref.ref(world)
    key = tuple(sorted(ranks))
    _made[key] += 1
    return _made[key]


class _OwnName:
    def __init__(self, world: Any, name: str) -> None:
        self._world = world
        self._name = name

    def __enter__(self) -> None:
        # It stays there, and counts for all other groups.
        if not isinstance(self._world.group_count, _Count):
            self._world.group_count = _Count(self._world.group_count)
        _of_thread.name = self._name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _of_thread.name = None


class _Count(int):
    """torch's count of groups. In a thread that has a name for a group, it reads as that name, and does not grow."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the text from which torch makes the name of a group."""
        name: str | None = getattr(_of_thread, "name", None)
        return super().__str__() if name is None else name

    def __add__(self, other: int) -> int:
        """Count a group, except in a thread that has a name for it."""
        return _Count(int(self) + (other if getattr(_of_thread, "name", None) is None else 0))
