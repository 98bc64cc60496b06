"""Divide the memory between slots, rows, experts and compressed weights. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Slots start at multiples of it, as direct I/O requires.
PAGE_BYTES = 4096
# Groups of one class differ by at most this factor.
_SIZE_RATIO_MAX = 1.25
# Groups to load before they are needed, by default: one is being read while another waits.
PREFETCH = 2
# One more if they are converted on load.
PREFETCH_CONVERTED = 3
# Weights up to this fraction of their size in memory are worth caching in the form they have on disk.
_CACHED_FRACTION_MAX = 0.9
# Groups that are loaded one at a time take half as long again. A large group of up to this fraction of their bytes is
# therefore read again in every step, so that the others can be loaded ahead.
_REREAD_FRACTION_MAX = 0.5
# Rows of embeddings get this fraction of the memory.
ROWS_FRACTION = 1 / 16


@dataclass(frozen=True)
class SlotClass:
    """Equal slots for groups of about the same size."""

    slots: int
    prefetch: int
    slot_bytes: int
    # Uses the memory of the class before it, in turns.
    shares_memory: bool = False


def slot_offsets(classes: Sequence[SlotClass]) -> tuple[list[int], int]:
    """Compute the offset of each class's first slot, and the bytes of all slots."""
    begins: list[int] = []
    end = 0
    for each in classes:
        begins.append(begins[-1] if each.shares_memory else end)
        end = max(end, begins[-1] + each.slots * each.slot_bytes)
    return begins, end


def classify_sizes(group_bytes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Sort layer groups into classes of about the same size.

    Args:
        group_bytes: bytes of each group.

    Returns:
        The class of each group, and the slot size of each class in bytes, largest first.
    """
    class_of = [0] * len(group_bytes)
    slot_bytes: list[int] = []
    for group in sorted(range(len(group_bytes)), key=lambda group: -group_bytes[group]):
        need = -(-max(group_bytes[group], 1) // PAGE_BYTES) * PAGE_BYTES
        if not slot_bytes or need * _SIZE_RATIO_MAX < slot_bytes[-1]:
            slot_bytes.append(need)
        class_of[group] = len(slot_bytes) - 1
    return class_of, slot_bytes


def merge_small_classes(memory: int, class_of: Sequence[int], slot_bytes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Let small groups use larger slots if memory cannot hold one slot of each class.

    Args:
        memory: bytes for all slots.
        class_of: the class of each group.
        slot_bytes: slot size of each class, largest first.
    """
    kept = len(slot_bytes)
    while kept > 1 and sum(slot_bytes[:kept]) > memory:
        kept -= 1
    return [min(index, kept - 1) for index in class_of], list(slot_bytes[:kept])


@dataclass(frozen=True)
class MemorySplit:
    """Bytes for groups in slots, and for rows and experts that are selected by index."""

    groups: int
    rows: int


def split_memory(
    memory: int, group_bytes: Sequence[int], rows_bytes: int, experts_bytes: Sequence[int], item_bytes: int = 0
) -> MemorySplit:
    """Divide memory between layer groups, rows of embeddings, and experts.

    Rows and experts get their proportional share. Groups get enough to load the next one while one is in use, if
    possible. Experts get at least the size of one layer's. Memory that groups cannot use goes to rows.

    Args:
        memory: bytes for all of them.
        group_bytes: bytes of each group.
        rows_bytes: bytes of all embeddings that are read row by row.
        experts_bytes: bytes of the experts of each layer.
        item_bytes: bytes of the rows that are loaded together; at least these must fit.

    Raises:
        MemoryError: one group does not fit together with the experts of one layer or the rows of one lookup.
    """
    class_of, slot_bytes = classify_sizes(group_bytes)
    picked_min = max([item_bytes, *experts_bytes])
    groups_min = slot_bytes[0] if slot_bytes else 0
    if memory < groups_min + picked_min:
        raise MemoryError(f"the largest layer needs {groups_min:,} bytes, and rows and experts need {picked_min:,}")
    # First the rows: their fraction, or all that groups and experts cannot use.
    all_groups = sum(slot_bytes[index] for index in class_of)
    rows = max(int(memory * ROWS_FRACTION), item_bytes, memory - all_groups - sum(experts_bytes))
    # Rows and experts are never needed at the same time, so the rows of one lookup may take memory of experts.
    experts_min = picked_min if experts_bytes else 0
    rows_max = memory - groups_min - experts_min + min(item_bytes, rows_bytes)
    rows = min(rows, rows_bytes, rows_max)
    rows = min(max(rows, 0), memory - groups_min)
    left = memory - rows
    if not experts_bytes:
        return MemorySplit(left, rows) if group_bytes else MemorySplit(0, min(memory, rows_bytes))
    if not group_bytes:
        return MemorySplit(0, min(memory, rows_bytes + sum(experts_bytes)))
    # Then the experts, in proportion to their bytes. But groups need enough to load ahead, and the experts of one layer
    # must fit.
    total = sum(group_bytes) + sum(experts_bytes)
    experts = left * sum(experts_bytes) // total
    loading_ahead = sum(size * min(class_of.count(index), PREFETCH + 1) for index, size in enumerate(slot_bytes))
    experts = max(min(experts, left - loading_ahead), picked_min - rows)
    experts = max(min(experts, left - groups_min, sum(experts_bytes)), 0)
    return MemorySplit(left - experts, rows + experts)


def slot_budget(
    memory: int, class_of: Sequence[int], slot_bytes: Sequence[int], prefetch: int | None, converted: tuple[int, int]
) -> int:
    """Compute the bytes for slots. The rest caches weights in the form they have on disk.

    A byte of cache saves reading a byte. A byte of a resident group saves only the fraction that it has on disk. So
    slots get enough for groups to pass through. More groups stay resident only if the cache can hold the disk bytes of
    all others: then nothing is read, and as little as possible is converted.

    Args:
        memory: bytes for both.
        class_of: the class of each group.
        slot_bytes: slot size of each class.
        prefetch: groups to load before they are needed.
        converted: bytes on disk and bytes in memory of all weights that are converted on load.
    """
    stored, _ = converted
    total = sum(slot_bytes[index] for index in class_of)
    if total <= memory or not is_worth_caching(converted):
        return memory
    early = PREFETCH if prefetch is None else prefetch
    passing = sum(size * min(class_of.count(index), early + 1) for index, size in enumerate(slot_bytes))
    # Resident groups get the memory beyond `passing`. The disk bytes of the others are `stored * (1 - (slots - passing)
    # / total)`.
    slots = (memory * total - stored * (total + passing)) // (total - stored)
    return min(max(slots, passing), memory)


def is_worth_caching(converted: tuple[int, int]) -> bool:
    """Whether caching weights in their disk form takes less memory than the decoded weights.

    Args:
        converted: bytes on disk and bytes in memory of all weights that are converted on load.
    """
    stored, becomes = converted
    return 0 < stored <= becomes * _CACHED_FRACTION_MAX


def share_large_slot(
    memory: int, class_of: Sequence[int], slot_bytes: Sequence[int], prefetch: int | None, classes: Sequence[SlotClass]
) -> tuple[list[int], list[SlotClass]]:
    """Split a large slot for small groups, which use it while the large group is unloaded.

    Without memory for a slot of each class, a small group would occupy a large slot alone, and nothing could be loaded
    while another group is in use. The same holds with memory for just one small slot, but then the large group need not
    be read again. So the slot is not split if the large group is most of the bytes.

    Args:
        memory: bytes for all slots.
        class_of: the class of each group, before merging.
        slot_bytes: slot size of each of those classes, largest first.
        prefetch: groups to load before they are needed.
        classes: the result of :func:`allocate_slots` for the classes that :func:`merge_small_classes` returned.

    Returns:
        The class of each group, and the classes.
    """
    kept = len(classes)
    fitted = [min(index, kept - 1) for index in class_of]
    each_has_one = kept == len(slot_bytes)
    # The class that owns the slot.
    first = kept - 2 if each_has_one else kept - 1
    if first < 0 or any(each.slots > 1 for each in classes[first:]):
        return fitted, list(classes)
    large = classes[first]
    large_groups = sum(index == first for index in class_of)
    small_bytes = sum(index > first for index in class_of) * slot_bytes[-1]
    is_most = large_groups == 1 and large.slot_bytes > small_bytes * _REREAD_FRACTION_MAX
    early = PREFETCH if prefetch is None else prefetch
    if each_has_one and (is_most or early == 0):
        return fitted, list(classes)
    left = memory - sum(each.slots * each.slot_bytes for each in classes[:first])
    shared = _largest_split(large, left, class_of, list(enumerate(slot_bytes))[first + 1 :], early)
    if shared is None:
        return fitted, list(classes)
    begin, small = shared
    now_of = [first + 1 if index >= begin else min(index, first) for index in class_of]
    return now_of, [*classes[:first], replace(large, prefetch=min(early, 1)), small]


def _largest_split(
    large: SlotClass, memory: int, class_of: Sequence[int], small_classes: Sequence[tuple[int, int]], early: int
) -> tuple[int, SlotClass] | None:
    """Find the largest groups of which a slot holds two or more. Larger ones use all of it.

    Args:
        large: the class with the slot.
        memory: bytes for the slot, and for what its small slots may take beyond it.
        class_of: the class of each group.
        small_classes: index and slot size of each smaller class, largest first.
        early: groups to load before they are needed.

    Returns:
        The first class whose groups use the small slots, and these slots. ``None``: no two fit.
    """
    for begin, slot_bytes in small_classes:
        used = max(large.slot_bytes, min(memory, (early + 1) * slot_bytes))
        slots = min(used // slot_bytes, sum(index >= begin for index in class_of))
        if slots > 1:
            return begin, SlotClass(slots, min(early, slots - 1), slot_bytes, shares_memory=True)
    return None


def allocate_slots(
    memory: int, class_of: Sequence[int], slot_bytes: Sequence[int], prefetch: int | None
) -> list[SlotClass]:
    """Divide memory among the classes.

    Each class gets one slot, then as many as are needed to load the next group while one is in use. The rest keeps
    groups resident, largest first, since each resident byte need not be read.

    Args:
        memory: bytes for all slots.
        class_of: the class of each group.
        slot_bytes: slot size of each class.
        prefetch: groups to load before they are needed; default 2, as far as memory allows.

    Raises:
        MemoryError: one slot of each class does not fit.
    """
    members = [class_of.count(index) for index in range(len(slot_bytes))]
    slots = [1] * len(slot_bytes)
    left = memory - sum(slot_bytes)
    if left < 0:
        raise MemoryError(
            f"{memory:,} bytes are too little: one slot for each size of layer needs {sum(slot_bytes):,} at the least"
        )
    early = PREFETCH if prefetch is None else prefetch
    while True:
        # Classes that can use one more slot: first those that cannot load ahead yet, then those that can keep one more.
        open_to = [index for index, count in enumerate(members) if slots[index] < count and slot_bytes[index] <= left]
        if not open_to:
            break
        chosen = min(open_to, key=lambda index: (max(slots[index] - 1, 0) if slots[index] <= early else early, index))
        slots[chosen] += 1
        left -= slot_bytes[chosen]
    fill = [
        min(early, slots[index] - 1) if slots[index] < members[index] else slots[index] - 1
        for index in range(len(slots))
    ]
    return [SlotClass(slots[index], fill[index], slot_bytes[index]) for index in range(len(slots))]
