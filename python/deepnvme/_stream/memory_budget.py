"""Who gets how much of the memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where slots begin, and what direct I/O is aligned to.
PAGE_BYTES = 4096
# Groups of a class differ by no more than this.
_SIZE_RATIO_MAX = 1.25
# Groups fetched before they are called for, where nobody says otherwise: one is being read while another waits.
AHEAD = 2
# Where they are converted on the way, one more is.
AHEAD_CONVERTED = 3
# What has no more than that part of its bytes on disk, of those in memory, is worth to be kept as it is there.
_CACHED_SHARE_MAX = 0.9
# Layers that come one at a time take half as long again: a large one of no more than that part of their bytes is rather
# read in every step, so that they can come ahead.
_REREAD_SHARE_MAX = 0.5
# Rows of embeddings have that part of the memory.
ROWS_SHARE = 16


@dataclass(frozen=True)
class SlotClass:
    """Equal slots for groups of about the same size."""

    slots: int
    ahead: int
    slot_bytes: int
    # In the memory of the class before it, by turns with that.
    shares_memory: bool = False


def slot_offsets(classes: Sequence[SlotClass]) -> tuple[list[int], int]:
    """Say where the slots of each class begin, and how much memory all of them are."""
    begins: list[int] = []
    end = 0
    for each in classes:
        begins.append(begins[-1] if each.shares_memory else end)
        end = max(end, begins[-1] + each.slots * each.slot_bytes)
    return begins, end


def classify_sizes(group_bytes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Group layer groups of about the same size.

    Args:
        group_bytes: what each group needs.

    Returns:
        The class of each group, and the bytes of a slot of each class, the largest first.
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
    """Have small groups use the slots of larger ones, where there is not even memory for a slot of each class.

    Args:
        memory: bytes for all slots.
        class_of: the class of each group.
        slot_bytes: bytes of a slot of each class, the largest first.
    """
    kept = len(slot_bytes)
    while kept > 1 and sum(slot_bytes[:kept]) > memory:
        kept -= 1
    return [min(index, kept - 1) for index in class_of], list(slot_bytes[:kept])


@dataclass(frozen=True)
class MemorySplit:
    """Bytes for what passes through slots, and for what is picked by index."""

    groups: int
    rows: int


def split_memory(
    memory: int, group_bytes: Sequence[int], rows_bytes: int, experts_bytes: Sequence[int], item_bytes: int = 0
) -> MemorySplit:
    """Divide memory between groups, rows of embeddings and experts.

    What is picked gets what it would have if all were kept in proportion. Groups have at least what lets the next come
    while one is in use; experts at least those of one layer; what groups cannot use goes to rows.

    Args:
        memory: bytes for all of them.
        group_bytes: of each group.
        rows_bytes: of all embeddings that are looked up row by row.
        experts_bytes: of the experts of each layer.
        item_bytes: of the rows that come together, so that at least these must fit.

    Raises:
        MemoryError: not even one group, and the experts of one layer, fit.
    """
    class_of, slot_bytes = classify_sizes(group_bytes)
    picked_min = max([item_bytes, *experts_bytes])
    groups_min = slot_bytes[0] if slot_bytes else 0
    if memory < groups_min + picked_min:
        raise MemoryError(f"the largest layer needs {groups_min:,} bytes, and what is picked by index {picked_min:,}")
    all_groups = sum(slot_bytes[index] for index in class_of)
    rows = max(memory // ROWS_SHARE, item_bytes, memory - all_groups - sum(experts_bytes))
    # Rows and experts are never needed at the same time.
    rows = min(
        rows, rows_bytes, memory - groups_min - (picked_min if experts_bytes else 0) + min(item_bytes, rows_bytes)
    )
    rows = min(max(rows, 0), memory - groups_min)
    left = memory - rows
    if not experts_bytes:
        return MemorySplit(left, rows) if group_bytes else MemorySplit(0, min(memory, rows_bytes))
    if not group_bytes:
        return MemorySplit(0, min(memory, rows_bytes + sum(experts_bytes)))
    wanted = sum(size * min(class_of.count(index), AHEAD + 1) for index, size in enumerate(slot_bytes))
    total = sum(group_bytes) + sum(experts_bytes)
    experts = left * sum(experts_bytes) // total
    experts = max(min(experts, left - wanted), picked_min - rows)
    experts = max(min(experts, left - groups_min, sum(experts_bytes)), 0)
    return MemorySplit(left - experts, rows + experts)


def slot_budget(
    memory: int, class_of: Sequence[int], slot_bytes: Sequence[int], ahead: int | None, converted: tuple[int, int]
) -> int:
    """Say how much of the memory is for slots, where the rest has bytes as they are on disk.

    A byte of those spares reading a byte; one of a group that stays in a slot only what it is made of. So slots get what
    groups need to pass through, and groups stay in them as far as the rest has room for all that is stored of the others:
    nothing is read then, and as little as possible is converted.

    Args:
        memory: bytes for both.
        class_of: the class of each group.
        slot_bytes: bytes of a slot of each class.
        ahead: groups fetched before they are called for.
        converted: bytes on disk of what is converted when it comes, and those that they become.
    """
    stored, _ = converted
    total = sum(slot_bytes[index] for index in class_of)
    if total <= memory or not is_worth_caching(converted):
        return memory
    early = AHEAD if ahead is None else ahead
    passing = sum(size * min(class_of.count(index), early + 1) for index, size in enumerate(slot_bytes))
    # Those that stay have what is beyond `passing`; of the others there is `stored * (1 - (slots - passing) / total)`.
    slots = (memory * total - stored * (total + passing)) // (total - stored)
    return min(max(slots, passing), memory)


def is_worth_caching(converted: tuple[int, int]) -> bool:
    """Whether bytes that are kept as they are on disk take less memory than what they become.

    Args:
        converted: bytes on disk of what is converted when it comes, and those that they become.
    """
    stored, becomes = converted
    return 0 < stored <= becomes * _CACHED_SHARE_MAX


def share_large_slot(
    memory: int, class_of: Sequence[int], slot_bytes: Sequence[int], ahead: int | None, classes: Sequence[SlotClass]
) -> tuple[list[int], list[SlotClass]]:
    """Cut a slot into several for small groups, which have it while none of its own is there.

    Where there is no memory for a slot of each class, small groups use the slot of larger ones, and one at a time would
    have all of it: nothing could come while another is in use. Where there is memory for one small slot and no more, it
    is the same, but that the large group need not be read again; so that is left where it is most of the bytes.

    Args:
        memory: bytes for all slots.
        class_of: the class of each group, all by themselves.
        slot_bytes: bytes of a slot of each of those classes, the largest first.
        ahead: groups fetched before they are called for.
        classes: what :func:`allocate_slots` has made of those that :func:`merge_small_classes` has left.

    Returns:
        The class of each group, and the classes.
    """
    kept = len(classes)
    fitted = [min(index, kept - 1) for index in class_of]
    each_has_one = kept == len(slot_bytes)
    # Whose slot it is, and who have it by turns with that.
    first = kept - 2 if each_has_one else kept - 1
    members = [sum(index == first for index in class_of), sum(index > first for index in class_of)]
    if first < 0 or any(each.slots > 1 for each in classes[first:]):
        return fitted, list(classes)
    large = classes[first]
    early = AHEAD if ahead is None else ahead
    is_most = members[0] == 1 and large.slot_bytes > members[1] * slot_bytes[-1] * _REREAD_SHARE_MAX
    if each_has_one and (is_most or early == 0):
        return fitted, list(classes)
    left = memory - sum(each.slots * each.slot_bytes for each in classes[:first])
    # Those that are too large for a part of the slot have all of it.
    for begin, small in list(enumerate(slot_bytes))[first + 1 :]:
        room = max(large.slot_bytes, min(left, (early + 1) * small))
        slots = min(room // small, sum(index >= begin for index in class_of))
        if slots > 1:
            turns = [
                replace(large, ahead=min(early, 1)),
                SlotClass(slots, min(early, slots - 1), small, shares_memory=True),
            ]
            now_of = [first + 1 if index >= begin else min(index, first) for index in class_of]
            return now_of, [*classes[:first], *turns]
    return fitted, list(classes)


def allocate_slots(
    memory: int, class_of: Sequence[int], slot_bytes: Sequence[int], ahead: int | None
) -> list[SlotClass]:
    """Divide memory among the classes.

    Each gets a slot, then as many more as let the next group come while one is in use; what is left goes to groups that
    stay, the largest first, since each byte that stays is a byte that need not be read.

    Args:
        memory: bytes for all slots.
        class_of: the class of each group.
        slot_bytes: bytes of a slot of each class.
        ahead: groups fetched before they are called for; by default 2, as far as there is memory.

    Raises:
        MemoryError: not even one slot for each fits.
    """
    members = [class_of.count(index) for index in range(len(slot_bytes))]
    slots = [1] * len(slot_bytes)
    left = memory - sum(slot_bytes)
    if left < 0:
        raise MemoryError(
            f"{memory:,} bytes are too little: one of each kind of layer needs {sum(slot_bytes):,} at the least"
        )
    early = AHEAD if ahead is None else ahead
    while True:
        # Who can have one more: first those that could not fetch ahead yet, then those that could keep one more.
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
