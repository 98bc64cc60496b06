"""The processes that keep a folder of checkpoints together, and what they say to each other.

They talk through a gloo group of their own, which neither the collectives of training nor its GPUs notice, also from a
thread in the background. What goes wrong in one of them is raised in all: nobody waits for somebody who has given up.
"""

from __future__ import annotations

import datetime as dt
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from deepnvme.errors import InvalidArgumentError, PeerError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")

# How long the fastest waits for the slowest, whose share has to be on the disk by then. The end of a process is noticed
# at once; this is for machines that vanish. It is what torch's own groups wait.
TIMEOUT = dt.timedelta(minutes=30)


@dataclass
class _Failure:
    """What went wrong in another process: exceptions themselves cannot all be sent."""

    text: str


class RankGroup:
    """The processes of a group, or a process alone. All of them make one at the same time.

    Args:
        process_group: whose processes. Default: all, or this one where ``torch.distributed`` has not been set up.
    """

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self.torch_group: ProcessGroup | None = None
        self.rank, self.size = 0, 1
        self._shared_error: BaseException | None = None
        self._left_because: str | None = None
        self._is_whole_world = True
        if process_group is not None or _is_initialized():
            self._join(process_group)
        self.hosts: list[str] = self.all_gather(socket.gethostname())

    def _join(self, process_group: ProcessGroup | None) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        if dist.get_rank(process_group) < 0:
            msg = "this process is not in process_group; only its members can make a Checkpointer with it"
            raise ValueError(msg)
        # Up to torch 2.7 this question needs the group by name, also where it is that of all.
        ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        # A group of all gets a name that no other had. One of some, which the others do not hear of, has that of an
        # earlier one again once that is gone, and would find its addresses.
        self._is_whole_world = len(ranks) == dist.get_world_size()
        group = dist.new_group(
            ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=not self._is_whole_world
        )
        self.torch_group = cast("ProcessGroup", group)
        self.rank, self.size = dist.get_rank(self.torch_group), len(ranks)

    @property
    def is_leader(self) -> bool:
        """Whether this process decides, and writes what there is one of."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    @property
    def is_first_on_host(self) -> bool:
        """Whether no process of a lower rank is on this machine."""
        return self.hosts.index(self.hosts[self.rank]) == self.rank

    def name(self, rank: int) -> str:
        """Say which process that is, for messages."""
        return f"rank {rank} on {self.hosts[rank]}"

    def all_gather(self, value: T) -> list[T]:
        """Give what all have, in the order of ranks."""
        if self.is_single:
            return [value]
        import torch.distributed as dist  # noqa: PLC0415

        values: list[Any] = [None] * self.size
        with self._collective():
            dist.all_gather_object(values, value, group=self._open_group())
        return cast("list[T]", values)

    def broadcast(self, value: T) -> T:
        """Give what the leader has."""
        if self.is_single:
            return value
        import torch.distributed as dist  # noqa: PLC0415

        values: list[Any] = [value]
        with self._collective():
            leader = dist.get_global_rank(self._open_group(), 0)
            dist.broadcast_object_list(values, src=leader, group=self._open_group())
        return cast("T", values[0])

    def broadcast_tensor(self, tensor: torch.Tensor, rank: int) -> None:
        """Fill the tensor with what that process has in it."""
        import torch.distributed as dist  # noqa: PLC0415

        with self._collective():
            dist.broadcast(tensor, src=dist.get_global_rank(self._open_group(), rank), group=self._open_group())

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Have each do its work, and give all results; where one has failed, all raise that."""
        if self.is_single:
            return [work()]
        failed: BaseException | None = None
        mine: T | _Failure
        try:
            mine = work()
        except BaseException as error:
            if self._left_because is not None:
                raise
            failed = error
            mine = _Failure(f"{type(error).__name__}: {error}")
        results = self.all_gather(mine)
        if failed is not None:
            self._shared_error = failed
            raise failed
        failures = [(rank, result) for rank, result in enumerate(results) if isinstance(result, _Failure)]
        if failures:
            rank, failure = failures[0]
            more = f" (and {len(failures) - 1} others)" if len(failures) > 1 else ""
            self._shared_error = PeerError(f"{self.name(rank)}{more} failed, and so all do: {failure.text}")
            raise self._shared_error
        return cast("list[T]", results)

    def is_shared_error(self, error: BaseException) -> bool:
        """Whether all raise that here: none of them goes on."""
        return error is self._shared_error

    def raise_on_all(self, message: str) -> NoReturn:
        """Raise what all the others raise here, too."""
        self._shared_error = InvalidArgumentError(message)
        raise self._shared_error

    def check_same(self, what: str, values: dict[str, object]) -> None:
        """Refuse where not all have the same of something."""
        everybodys = self.all_gather(values)
        for rank, others in enumerate(everybodys):
            for key, value in everybodys[0].items():
                if others[key] != value:
                    text = f"{key} is {others[key]!r} at {self.name(rank)} and {value!r} at {self.name(0)}"
                    self.raise_on_all(f"{what}: {text}; give the same everywhere")

    @contextmanager
    def leave_on_error(self) -> Iterator[None]:
        """Part from the others when the block ends with an error that they do not know of, so that they do not wait."""
        try:
            yield
        except BaseException as error:
            if not self.is_shared_error(error):
                self.leave(f"{type(error).__name__}: {error}", error)
            raise

    def leave(self, why: str, error: BaseException | None = None) -> None:
        """Close the connections. Whoever waits for this process gets an error, and parts, too."""
        if self.torch_group is not None and not self.is_single and self._left_because is None:
            self._left_because = why
            if error is not None:
                # They are closed with the last reference to the group, and the frames of torch have some.
                clear_frames(error.__traceback__)
            self._destroy()

    def close(self) -> None:
        """Leave, when all is said."""
        if self.torch_group is not None and self._left_because is None:
            self._left_because = "it was closed"
            if self._is_whole_world:
                self._destroy()

    def _destroy(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        # The trainer may have ended all groups, and this one with them.
        with suppress(ValueError, AssertionError):
            dist.destroy_process_group(self.torch_group)
        self.torch_group = None

    def check_open(self) -> None:
        """Raise, where this process has left the others."""
        if self._left_because is not None:
            text = (
                f"this Checkpointer has parted from those of the other processes ({self._left_because}); make a new one"
            )
            raise PeerError(f"{text} in all of them")

    def _open_group(self) -> ProcessGroup:
        self.check_open()
        assert self.torch_group is not None
        return self.torch_group

    @contextmanager
    def _collective(self) -> Iterator[None]:
        try:
            yield
        except PeerError:
            raise
        # What torch raises for a closed connection has no class of its own, and a text about sockets.
        except (RuntimeError, ValueError) as error:
            self.raise_lost(error)

    def raise_lost(self, error: Exception) -> NoReturn:
        """Say that the others do not answer any more."""
        why = f"another process has ended, or has not answered within {TIMEOUT}: {error}"
        self.leave(why, error)
        raise PeerError(why) from error


def _is_initialized() -> bool:
    # Who has not imported it has not set it up, and importing it takes long.
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and bool(dist.is_initialized())
