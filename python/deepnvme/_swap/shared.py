"""One swapper for several users, such as parameters, optimizer state and activations: one bound, and one order.

Each user has a :class:`SwapperPart`, with keys of its own. The parts record in which order they use tensors in a step.
That order is the schedule of the next step, so memory always holds the tensors that are needed next, whosever they are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepnvme._utils.heap import HEAP
from deepnvme._utils.interrupts import make_lock
from deepnvme.errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from deepnvme._swap.swapper import Swapper
    from deepnvme._swap.values import Borrowed, SwapStats

    _Action = Literal["create", "read", "change", "delete"]

# Maximum length of the recorded order. No step of a real model is as long.
_USES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Use:
    """A use of a tensor in a step.

    Attributes:
        kind: the kind of tensor.
        key: its key in the shared swapper.
        action: ``"create"`` if it is new or replaced, ``"delete"`` for its end.
    """

    kind: str
    key: str
    action: _Action


class SharedSwapper:
    """A swapper, and the order of the uses of all its parts.

    Args:
        swapper: closed when all parts are.
    """

    def __init__(self, swapper: Swapper) -> None:
        self.swapper = swapper
        self._lock = make_lock()
        self._uses: list[Use] = []
        self._order: list[str] = []
        self._open: set[str] = set()
        # The bytes of each key that was ever created.
        self.sizes: dict[str, int] = {}
        self.step: tuple[Use, ...] = ()
        """The uses of the last step. Empty before its end."""
        self.compute_s: float | None = None
        """Seconds from the first use of the last step to its end, without waits for the disk."""
        self._began = (0.0, 0.0)

    def part(self, name: str, kinds: Mapping[str, str] | None = None) -> SwapperPart:
        """Make a part.

        Args:
            name: all of its keys begin with it.
            kinds: names for its uses, by the beginning of the key. Default: the name of the part.
        """
        self._open.add(name)
        return SwapperPart(self, name, kinds or {})

    @property
    def has_order(self) -> bool:
        """Whether the order of a step is known."""
        return bool(self._order)

    def record(self, kind: str, key: str, action: _Action, nbytes: int | None = None) -> None:
        """Record a use in the step that runs."""
        has_room = len(self._uses) < _USES_MAX
        if nbytes is not None and has_room:
            self.sizes[key] = nbytes
        HEAP.moved(self.sizes.get(key, 0))
        if not self._uses and action != "delete":
            self._began = self._clock()
        if has_room:
            self._uses.append(Use(kind, key, action))

    def end_step(self) -> None:
        """Schedule the next step in the order of the one that ends."""
        with self._lock:
            uses, self._uses = self._uses, []
            order = [use.key for use in uses if use.action != "delete"]
            is_new = order != self._order and len(order) > 1
            if is_new:
                self._order = order
            self.step = tuple(uses)
            (now, stalled), (began, stalled_before) = self._clock(), self._began
            self.compute_s = max(0.0, now - began - (stalled - stalled_before))
        if is_new and not self.swapper.is_closed:
            self.swapper.schedule(order, repeat=True)

    def _clock(self) -> tuple[float, float]:
        return time.perf_counter(), self.swapper.stats().stalled_s

    def close_part(self, name: str) -> None:
        """Close the swapper if no other part is open."""
        self._open.discard(name)
        if not self._open:
            self.swapper.close()


class SwapperPart:
    """The tensors of one user of a shared swapper. Methods are those of :class:`deepnvme.Swapper`."""

    def __init__(self, shared: SharedSwapper, name: str, kinds: Mapping[str, str]) -> None:
        self.shared = shared
        self._name, self._kinds, self._swapper = name, kinds, shared.swapper
        self._is_closed = False

    def _key(self, key: str) -> str:
        return f"{self._name}/{key}"

    def _record(self, key: str, action: _Action, nbytes: int | None = None) -> None:
        kind = next((kind for prefix, kind in self._kinds.items() if key.startswith(prefix)), self._name)
        self.shared.record(kind, self._key(key), action, nbytes)

    def _check_open(self) -> None:
        if self._is_closed:
            msg = f"the {self._name} of this training run were closed, and are not on disk any more"
            raise ClosedError(msg)

    @property
    def is_closed(self) -> bool:
        """Whether this part or the swapper is closed, or belongs to the parent of this forked process."""
        return self._is_closed or self._swapper.is_closed

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Copy a tensor under a key."""
        self._check_open()
        self._swapper.put(self._key(key), tensor)
        self._record(key, "create", tensor.nbytes)

    def create(self, key: str, shape: Sequence[int], dtype: torch.dtype) -> Borrowed:
        """Create a tensor that the block fills."""
        self._check_open()
        nbytes = dtype.itemsize
        for extent in shape:
            nbytes *= extent
        self._record(key, "create", nbytes)
        return self._swapper.create(self._key(key), shape, dtype)

    def borrow(self, key: str, *, shared: bool = False) -> Borrowed:
        """Lend a tensor for a block."""
        self._check_open()
        self._record(key, "read" if shared else "change")
        return self._swapper.borrow(self._key(key), shared=shared)

    def prefetch(self, keys: Iterable[str]) -> None:
        """Start to read tensors."""
        self._check_open()
        self._swapper.prefetch([self._key(key) for key in keys])

    def schedule(self, keys: Iterable[str], *, repeat: bool = True) -> None:
        """State the order of the next uses of this part, until that of a whole step is known."""
        self._check_open()
        if not self.shared.has_order:
            self._swapper.schedule([self._key(key) for key in keys], repeat=repeat)

    def delete(self, key: str) -> None:
        """Delete a tensor."""
        self._check_open()
        self._swapper.delete(self._key(key))
        self._record(key, "delete")

    def read(self, key: str, offset: int, out: torch.Tensor) -> torch.Tensor:
        """Copy a part of a tensor."""
        self._check_open()
        self._record(key, "read")
        return self._swapper.read(self._key(key), offset, out)

    def import_(self, key: str, fd: int, offset: int, nbytes: int) -> dict[str, int]:
        """Store a range of an open file under a key."""
        self._check_open()
        routes = self._swapper.import_(self._key(key), fd, offset, nbytes)
        self._record(key, "create", nbytes)
        return routes

    def export(self, key: str, fd: int, offset: int = 0) -> dict[str, int]:
        """Copy a tensor into an open file."""
        self._check_open()
        return self._swapper.export(self._key(key), fd, offset)

    def stats(self) -> SwapStats:
        """Return the counters of the shared swapper."""
        return self._swapper.stats()

    def close(self) -> None:
        """Delete the tensors of this part. The last one closes the swapper."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            there = self._swapper.keys()
            for key in there:
                if key.startswith(f"{self._name}/"):
                    self._delete_quietly(key)
        except ClosedError:
            pass
        self.shared.close_part(self._name)

    def _delete_quietly(self, key: str) -> None:
        try:
            self._swapper.delete(key)
        except KeyError:
            return
