"""The plan of a training step whose tensors share one bound: what goes over the disk, and what limits it. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepnvme._utils.public import public

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from deepnvme._swap.shared import Use

_MB, _GB = 10**6, 10**9


@public
@dataclass(frozen=True)
class PartPlan:
    """One kind of tensors in an :class:`OffloadPlan`.

    Attributes:
        name: ``"parameters"``, ``"gradients"``, ``"state"`` or ``"activations"``.
        total_bytes: the most bytes of such tensors that exist at a time.
        read_bytes: bytes that a step reads from disk.
        written_bytes: bytes that a step writes to disk.

    Example:
        >>> model, optimizer = deepnvme.offload(
        ...     torch.nn.Linear(256, 256), torch.optim.AdamW, memory="64MB", swap_dir="."
        ... )
        >>> [part.name for part in optimizer.plan.parts]
        ['parameters', 'gradients', 'state', 'activations']
        >>> optimizer.close()
    """

    name: str
    total_bytes: int
    read_bytes: int
    written_bytes: int


@public
@dataclass(frozen=True)
class OffloadPlan:
    """What a training step moves over the disk. ``optimizer.plan`` of an optimizer of :func:`deepnvme.offload`.

    Before the first step it is an estimate without activations. Afterwards it is computed from the last step, so it
    follows a change of the batch. Print it for a table.

    Attributes:
        memory_bytes: the bound that all parts share.
        parts: the kinds of tensors.
        is_measured: whether it is of a step that was made.
        read_bytes_per_s: the speed of reads, measured when the model was offloaded; ``None`` if that failed.
        write_bytes_per_s: the speed of writes.
        compute_s: the seconds of the last step, from the first use of a weight to the end of ``step()``, without waits
            for the disk; ``None`` before the first step.

    Example:
        >>> model, optimizer = deepnvme.offload(
        ...     torch.nn.Linear(256, 256), torch.optim.AdamW, memory="64MB", swap_dir="."
        ... )
        >>> optimizer.plan.read_bytes
        0
        >>> optimizer.close()
    """

    memory_bytes: int
    parts: tuple[PartPlan, ...]
    is_measured: bool
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    compute_s: float | None

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads."""
        return sum(part.read_bytes for part in self.parts)

    @property
    def written_bytes(self) -> int:
        """Bytes that a step writes."""
        return sum(part.written_bytes for part in self.parts)

    @property
    def disk_s(self) -> float | None:
        """Seconds that the disk needs for a step; ``None`` if its speed is unknown."""
        if self.read_bytes + self.written_bytes == 0:
            return 0.0
        if self.read_bytes_per_s is None or self.write_bytes_per_s is None:
            return None
        return self.read_bytes / self.read_bytes_per_s + self.written_bytes / self.write_bytes_per_s

    @property
    def expected_s(self) -> float | None:
        """Expected seconds of a step: disk and computation overlap, and the slower one counts."""
        if self.disk_s is None or self.compute_s is None:
            return None
        return max(self.disk_s, self.compute_s)

    @property
    def limit(self) -> str | None:
        """``"disk"`` or ``"computation"``, whichever takes longer; ``None`` if that is unknown."""
        if self.disk_s is None or self.compute_s is None:
            return None
        return "disk" if self.disk_s > self.compute_s else "computation"

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "most at a time", "read a step", "written a step")]
        for part in self.parts:
            unknown = not self.is_measured and part.name == "activations"
            sizes = (part.total_bytes, part.read_bytes, part.written_bytes)
            rows.append((part.name, *("?" if unknown else _size_text(size) for size in sizes)))
        rows.append(("all", "", _size_text(self.read_bytes), _size_text(self.written_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        origin = "the last step" if self.is_measured else "estimated; the first step measures the activations"
        head = f"{_size_text(self.memory_bytes)} of memory for all parts ({origin})"
        return "\n".join([head, *lines, *self._times()])

    def _times(self) -> list[str]:
        lines = []
        if self.read_bytes_per_s is not None and self.write_bytes_per_s is not None and self.disk_s is not None:
            speeds = f"reads {self.read_bytes_per_s / _GB:.2f} GB/s, writes {self.write_bytes_per_s / _GB:.2f} GB/s"
            lines.append(f"disk {self.disk_s:.2f} s a step ({speeds})")
        if self.compute_s is not None:
            lines.append(f"computation {self.compute_s:.2f} s a step")
        if self.expected_s is not None:
            lines.append(f"expected {self.expected_s:.2f} s a step, limited by {self.limit}")
        return lines


def _size_text(nbytes: int) -> str:
    return f"{nbytes / _GB:.2f} GB" if nbytes >= _GB else f"{nbytes / _MB:.1f} MB"


@dataclass(slots=True)
class _Resident:
    """A tensor in memory: whether it was changed since it was written."""

    is_dirty: bool
    next_use: int


def plan_parts(
    uses: Sequence[Use], sizes: Mapping[str, int], memory: int, names: Iterable[str]
) -> tuple[PartPlan, ...]:
    """Compute the traffic of a step that repeats, if memory holds the tensors that are used next.

    Args:
        uses: the uses of a step, in order.
        sizes: the bytes of each key.
        memory: bytes of memory.
        names: the kinds of tensors, also those without a use.
    """
    simulation = _Simulation(sizes, memory)
    # The second round begins with the memory that the first one leaves.
    simulation.run(uses)
    simulation.reset_counters()
    simulation.run(uses)
    return tuple(
        PartPlan(name, simulation.peaks[name], simulation.read[name], simulation.written[name]) for name in names
    )


class _Simulation:
    """Memory that evicts the tensor whose next use is last, as a swapper with a schedule does."""

    def __init__(self, sizes: Mapping[str, int], memory: int) -> None:
        self._sizes, self._memory = sizes, memory
        self._resident: dict[str, _Resident] = {}
        self._bytes = 0
        self._live: dict[str, str] = {}
        self._on_disk: set[str] = set()
        # The next uses of resident tensors, the last first. Outdated entries are skipped.
        self._queue: list[tuple[int, str]] = []
        self._live_bytes: defaultdict[str, int] = defaultdict(int)
        self.reset_counters()

    def reset_counters(self) -> None:
        """Forget the traffic so far."""
        self.read: defaultdict[str, int] = defaultdict(int)
        self.written: defaultdict[str, int] = defaultdict(int)
        self.peaks: defaultdict[str, int] = defaultdict(int, self._live_bytes)

    def run(self, uses: Sequence[Use]) -> None:
        """Make the uses of one step."""
        next_uses = _next_uses(uses)
        self._queue = []
        for key, found in self._resident.items():
            # All of these were queued with the positions of the last step.
            found.next_use = next_uses.first.get(key, 2 * len(uses))
            heapq.heappush(self._queue, (-found.next_use, key))
        for position, use in enumerate(uses):
            size = self._sizes.get(use.key, 0)
            if use.action == "delete":
                self._end(use, size)
                continue
            if use.key not in self._live:
                self._live[use.key] = use.kind
                self._live_bytes[use.kind] += size
                self.peaks[use.kind] = max(self.peaks[use.kind], self._live_bytes[use.kind])
                if use.action != "create":
                    # It existed before the step.
                    self._on_disk.add(use.key)
            if use.key not in self._resident:
                if use.action != "create" and use.key in self._on_disk:
                    self.read[use.kind] += size
                self._make_room(size)
                self._resident[use.key] = _Resident(False, 0)
                self._bytes += size
            found = self._resident[use.key]
            found.is_dirty |= use.action != "read"
            found.next_use = next_uses.after[position]
            heapq.heappush(self._queue, (-found.next_use, use.key))

    def _end(self, use: Use, size: int) -> None:
        if self._live.pop(use.key, None) is not None:
            self._live_bytes[use.kind] -= size
        self._on_disk.discard(use.key)
        if self._resident.pop(use.key, None) is not None:
            self._bytes -= size

    def _make_room(self, size: int) -> None:
        while self._bytes + size > self._memory and self._queue:
            negative, key = heapq.heappop(self._queue)
            found = self._resident.get(key)
            if found is None or found.next_use != -negative:
                continue
            del self._resident[key]
            self._bytes -= self._sizes.get(key, 0)
            if found.is_dirty:
                self.written[self._live[key]] += self._sizes.get(key, 0)
                self._on_disk.add(key)


@dataclass(frozen=True)
class _NextUses:
    # The first position of each key, and after each position the next one of its key, in this step or the next.
    first: dict[str, int]
    after: list[int]


def _next_uses(uses: Sequence[Use]) -> _NextUses:
    first: dict[str, int] = {}
    for position, use in enumerate(uses):
        if use.action != "delete":
            first.setdefault(use.key, position)
    after, coming = [0] * len(uses), {key: position + len(uses) for key, position in first.items()}
    for position in range(len(uses) - 1, -1, -1):
        use = uses[position]
        if use.action == "delete":
            # Nothing reads it before it is created again.
            coming[use.key] = 3 * len(uses)
            continue
        after[position] = coming[use.key]
        coming[use.key] = position
    return _NextUses(first, after)
