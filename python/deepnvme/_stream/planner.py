"""Plan how a model is streamed within a memory limit. Pure.

A file range is read without a copy if its offset within a page is the same in memory and in the file. So the layout
keeps neighbours of the file together in a slot, and preserves each run's offset within a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from deepnvme._deepnvme import _cacheable_bytes, _sees_used_pages
from deepnvme._modules.partition import LayerGroup, Limits, Partition, RowLookup, Weight, merge_tied, partition
from deepnvme._stream.layer_cache import place_resident
from deepnvme._stream.memory_budget import (
    PAGE_BYTES,
    PREFETCH_CONVERTED,
    ROWS_FRACTION,
    SlotClass,
    allocate_slots,
    classify_sizes,
    is_worth_caching,
    merge_small_classes,
    share_large_slot,
    slot_budget,
    slot_offsets,
    split_memory,
)
from deepnvme._stream.row_cache import can_gather, item_bytes, page_bytes, page_rounded_bytes
from deepnvme._stream.weight_origin import CACHE_LINE_BYTES, conversions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from deepnvme._stream.weight_origin import Conversion, Origin

# The fraction of the memory for groups that one may take, so that one can be in use while others are loaded.
_GROUP_FRACTION = 1 / 4
# The fraction if most weights are converted on load: the smaller the slots, the more memory caches disk bytes.
_GROUP_FRACTION_CONVERTED = 1 / 16
# A single layer above this fraction of the memory has a slot of its own.
_LARGE_FRACTION = 1 / 8
# Modules whose weights take at most this fraction of the memory, and at most so many bytes, are resident, up to a total
# fraction.
_RESIDENT_FRACTION, _RESIDENT_BYTES_MAX, _ALL_RESIDENT_FRACTION = 1 / 1024, 1 << 20, 1 / 8
# Experts are read one by one if those of a layer exceed this fraction of the memory.
_EXPERTS_FRACTION = 1 / 64
# On a GPU, only embeddings beyond this fraction are read row by row.
_GATHERED_FRACTION = 1 / 2
# The search for sufficient memory is precise to the result divided by this.
_SEARCH_PRECISION = 64


@dataclass(frozen=True)
class Slots:
    """Where the groups are loaded."""

    layouts: list[GroupLayout]
    class_of: list[int]
    classes: list[SlotClass]
    # For compressed weights.
    compressed_bytes_max: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return slot_offsets(self.classes)[1]


@dataclass(frozen=True)
class Plan:
    """The groups that are loaded together, and the memory for them."""

    partition: Partition
    slots: Slots
    resident_bytes: int
    row_cache_bytes: int
    # Host memory for rows that are gathered for a GPU.
    gathered_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """All memory that weights can take."""
        return self.resident_bytes + self.row_cache_bytes + self.slots.nbytes + self.slots.compressed_bytes_max


@dataclass(frozen=True)
class PlanInput:
    """The inputs of a plan."""

    root: nn.Module
    # Bytes of each weight in memory, by `id` of the module's tensor.
    sizes: Mapping[int, int]
    origin_of: Mapping[str, Origin]
    # Length of each file.
    file_bytes: Mapping[int, int]
    on_host: bool
    prefetch: int | None

    def plan(self, memory: int) -> Plan:
        """Make a plan for a number of bytes.

        Raises:
            MemoryError: they are too few.
        """
        large = sum(nbytes for nbytes in self._leaf_sizes(memory) if nbytes > int(memory * _LARGE_FRACTION))
        left = memory - int(memory * ROWS_FRACTION) - large
        limits = Limits(
            group_bytes_max=int(max(left, int(memory * _LARGE_FRACTION)) * self._group_fraction()),
            resident_bytes_max=min(int(memory * _RESIDENT_FRACTION), _RESIDENT_BYTES_MAX),
            all_resident_bytes_max=int(memory * _ALL_RESIDENT_FRACTION),
            rows_bytes_min=self._rows_bytes_min(memory),
            experts_bytes_min=int(memory * _EXPERTS_FRACTION) if self.on_host and _sees_used_pages() else None,
        )
        found = self._partition(limits)
        found.groups = merge_tied(found.groups)
        _, resident_bytes = place_resident(found.resident, self.origin_of)
        layouts = [lay_out_group(self._origins(group.weights), self.file_bytes) for group in found.groups]
        group_bytes = [layout.nbytes for layout in layouts]
        in_place = found.lookups if self.on_host else []
        rows = [self._origins(lookup.weights) for lookup in in_place if is_embedding(lookup)]
        page = page_bytes([self._origins(lookup.weights) for lookup in in_place])
        experts = [
            sum(page_rounded_bytes(each.memory_nbytes, page) for each in self._origins(lookup.weights))
            for lookup in in_place
            if not is_embedding(lookup)
        ]
        rows_bytes = sum(page_rounded_bytes(each.memory_nbytes, page) for origins in rows for each in origins)
        item = max((item_bytes(origins, page) for origins in rows), default=0)
        split = split_memory(memory - resident_bytes, group_bytes, rows_bytes, experts, item)
        classified = classify_sizes(group_bytes)
        class_of, slot_bytes = merge_small_classes(split.groups, *classified)
        prefetch = self._prefetch_of(found.groups)
        # Weights in GPU memory are not cached in another form: the CPU would have to convert them.
        converted = _cacheable_bytes([[*each.conversions] for each in layouts]) if self.on_host else (0, 0)
        for_all = slot_budget(split.groups, class_of, slot_bytes, prefetch, converted)
        classes = allocate_slots(for_all, class_of, slot_bytes, prefetch)
        if self.on_host:
            class_of, classes = share_large_slot(for_all, *classified, prefetch, classes)
        slots = Slots(layouts, class_of, classes)
        passes = sum(classified[1][index] for index in classified[0]) > split.groups
        left = split.groups - slots.nbytes if passes and is_worth_caching(converted) else 0
        slots = replace(slots, compressed_bytes_max=min(left, converted[0]))
        gathered = 0 if self.on_host else int(memory * ROWS_FRACTION)
        return Plan(found, slots, resident_bytes, split.rows, gathered)

    def _rows_bytes_min(self, memory: int) -> int:
        # In GPU memory, rows of an embedding that fits whole are faster.
        return int(memory * (ROWS_FRACTION if self.on_host else _GATHERED_FRACTION))

    def _partition(self, limits: Limits) -> Partition:
        found = partition(self.root, self.sizes, limits)
        if self.on_host or all(can_gather(origin) for each in found.lookups for origin in self._origins(each.weights)):
            return found
        return partition(self.root, self.sizes, replace(limits, rows_bytes_min=None))

    def _group_fraction(self) -> float:
        origins = set(self.origin_of.values())
        plain = sum(origin.memory_nbytes for origin in origins if origin.is_raw)
        is_converted = self.on_host and 2 * plain < sum(origin.memory_nbytes for origin in origins)
        return _GROUP_FRACTION_CONVERTED if is_converted else _GROUP_FRACTION

    def _prefetch_of(self, groups: Sequence[LayerGroup]) -> int | None:
        is_raw = all(origin.is_raw for group in groups for origin in self._origins(group.weights))
        return PREFETCH_CONVERTED if self.prefetch is None and not is_raw else self.prefetch

    def _leaf_sizes(self, memory: int) -> set[int]:
        """List the sizes of modules that can only be loaded whole."""
        leaves = [module for module in self.root.modules() if next(module.children(), None) is None]
        sizes = {leaf: sum(self.sizes.get(id(tensor), 0) for tensor in leaf.parameters()) for leaf in leaves}
        rows_min = 0 if self.on_host else self._rows_bytes_min(memory)
        return {nbytes for leaf, nbytes in sizes.items() if not isinstance(leaf, nn.Embedding) or nbytes < rows_min}

    def _origins(self, weights: list[Weight]) -> list[Origin]:
        return [self.origin_of[weight.name] for weight in weights]


def is_embedding(lookup: RowLookup) -> bool:
    """Whether rows are selected, not experts."""
    return isinstance(lookup.module, nn.Embedding)


def plan_within(model: PlanInput, memory: int) -> Plan:
    """Make a plan for a number of bytes.

    Raises:
        MemoryError: they are too few. The message says how many are enough.
    """
    try:
        return model.plan(memory)
    except MemoryError as error:
        needed = find_sufficient_memory(model.plan, memory)
        remedy = f"; memory={needed} is enough" if needed else ""
        raise MemoryError(f"memory={memory} is too little for this model ({error}){remedy}") from None


def find_sufficient_memory(plan: Callable[[int], Plan], too_little: int) -> int | None:
    """Find an amount of memory that is sufficient, and little more.

    Args:
        plan: raises ``MemoryError`` if the memory is too little.
        too_little: an amount for which it does.
    """

    def fits(memory: int) -> bool:
        try:
            plan(memory)
        except MemoryError:
            return False
        return True

    found = too_little
    while not fits(found):
        too_little, found = found, 2 * found
        if found >= 1 << 62:
            return None
    while found - too_little > max(found // _SEARCH_PRECISION, 1):
        middle = (too_little + found) // 2
        too_little, found = (too_little, middle) if fits(middle) else (middle, found)
    return found


# Gaps up to this size are read along.
_GAP_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class GroupLayout:
    """The layout of a group in its slot."""

    # Reads: source, offset in it, bytes, offset in the slot.
    reads: tuple[tuple[int, int, int, int], ...]
    # Weights that are decoded on load.
    conversions: tuple[Conversion, ...]
    # Offset of each weight in the slot, in the order they were given.
    offsets: tuple[int, ...]
    nbytes: int


def lay_out_group(origins: Sequence[Origin], file_bytes: Mapping[int, int]) -> GroupLayout:
    """Lay out the weights of a group.

    Args:
        origins: the origin of each weight. Repeated origins share their bytes.
        file_bytes: length of each source.
    """
    places: dict[Origin, int] = {}
    mirrored = sorted({origin for origin in origins if origin.is_page_congruent}, key=_start)
    reads: list[tuple[int, int, int, int]] = []
    at = 0
    run: list[Origin] = []

    def close() -> None:
        nonlocal at
        if not run:
            return
        source = run[0].ranges[0].source
        begin = run[0].ranges[0].offset // PAGE_BYTES * PAGE_BYTES
        last = run[-1].ranges[0]
        end = min(-(-(last.offset + last.nbytes) // PAGE_BYTES) * PAGE_BYTES, file_bytes[source])
        for origin in run:
            places[origin] = at + origin.ranges[0].offset - begin
        reads.append((source, begin, end - begin, at))
        at += -(-(end - begin) // PAGE_BYTES) * PAGE_BYTES
        run.clear()

    for origin in mirrored:
        byte_range = origin.ranges[0]
        if run:
            before = run[-1].ranges[0]
            gap = byte_range.offset - before.offset - before.nbytes
            if before.source != byte_range.source or not 0 <= gap <= _GAP_BYTES_MAX:
                close()
        run.append(origin)
    close()
    # The remaining weights consist of several ranges, or their file offset is misaligned for their dtype or differs
    # from the offset in memory.
    for origin in origins:
        if origin in places or not origin.is_raw:
            continue
        at += origin.line_offset
        places[origin] = at
        for byte_range in origin.ranges:
            reads.append((byte_range.source, byte_range.offset, byte_range.nbytes, at))
            at += byte_range.nbytes
        at = -(-at // PAGE_BYTES) * PAGE_BYTES
    converted, at = place_converted(origins, places, at)
    return GroupLayout(tuple(reads), tuple(converted), tuple(places[origin] for origin in origins), at)


def place_converted(origins: Iterable[Origin], places: dict[Origin, int], at: int) -> tuple[list[Conversion], int]:
    """Place the weights that have no place yet: those that are decoded on load.

    Returns:
        Their conversions, and the end of the last.
    """
    converted: list[Conversion] = []
    for origin in origins:
        if origin not in places:
            places[origin] = at + origin.line_offset
            converted += conversions(origin, places[origin])
            at += -(-(origin.line_offset + origin.memory_nbytes) // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
    return converted, at


def _start(origin: Origin) -> tuple[int, int]:
    return origin.ranges[0].source, origin.ranges[0].offset
