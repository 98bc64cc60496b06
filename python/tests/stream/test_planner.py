"""Pure decisions on random models: groups, layouts, and the split of memory."""

from __future__ import annotations

import itertools
import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepnvme._modules.partition import Limits, Partition, Weight, partition
from deepnvme._stream.layer_cache import place_resident
from deepnvme._stream.memory_budget import (
    allocate_slots,
    classify_sizes,
    merge_small_classes,
    share_large_slot,
    slot_budget,
    slot_offsets,
    split_memory,
)
from deepnvme._stream.planner import PlanInput, find_sufficient_memory, lay_out_group
from deepnvme._stream.weight_origin import CACHE_LINE_BYTES, ByteRange, Origin

SIZES = st.lists(st.integers(1, 5_000_000), min_size=1, max_size=40)


@given(SIZES)
def test_every_unit_fits_the_slots_of_its_class(sizes: list[int]) -> None:
    class_of, slot_bytes = classify_sizes(sizes)
    assert slot_bytes == sorted(slot_bytes, reverse=True)
    for size, index in zip(sizes, class_of, strict=True):
        assert size <= slot_bytes[index] <= max(2 * size, size + 8192), "slots are not much larger than what is in them"
        assert slot_bytes[index] % 4096 == 0


@given(SIZES, st.integers(1, 60_000_000), st.one_of(st.none(), st.integers(0, 5)))
def test_slots_never_have_more_than_the_memory(sizes: list[int], memory: int, ahead: int | None) -> None:
    class_of, slot_bytes = merge_small_classes(memory, *classify_sizes(sizes))
    if memory < slot_bytes[0]:
        with pytest.raises(MemoryError, match="at the least"):
            allocate_slots(memory, class_of, slot_bytes, ahead)
        return
    classes = allocate_slots(memory, class_of, slot_bytes, ahead)
    assert sum(each.slots * each.slot_bytes for each in classes) <= memory
    for index, each in enumerate(classes):
        assert 1 <= each.slots <= class_of.count(index)
        assert 0 <= each.prefetch < each.slots or each.slots == 1
        assert ahead is None or each.slots == class_of.count(index) or each.prefetch <= ahead
    for size, index in zip(sizes, class_of, strict=True):
        assert size <= classes[index].slot_bytes
    # The rest is too little for one more slot of any class that could use it.
    left = memory - sum(each.slots * each.slot_bytes for each in classes)
    for index, each in enumerate(classes):
        assert each.slots == class_of.count(index) or each.slot_bytes > left


@given(SIZES, st.floats(1, 2), st.one_of(st.none(), st.integers(0, 5)))
def test_small_groups_share_a_large_slot_in_turns(sizes: list[int], part: float, ahead: int | None) -> None:
    class_of, slot_bytes = classify_sizes(sizes)
    memory = int(slot_bytes[0] * part)
    fitted, kept = merge_small_classes(memory, class_of, slot_bytes)
    before = allocate_slots(memory, fitted, kept, ahead)
    now_of, classes = share_large_slot(memory, class_of, slot_bytes, ahead, before)
    begins, nbytes = slot_offsets(classes)
    assert nbytes <= memory
    for size, index in zip(sizes, now_of, strict=True):
        assert size <= classes[index].slot_bytes
    assert set(now_of) == set(range(len(classes))), "no class without units"
    if not classes[-1].shares_memory:
        assert (now_of, classes) == (fitted, before)
        return
    *others, large, small = classes
    assert others == before[: len(others)]
    assert (large.slots, large.slot_bytes, large.shares_memory) == (1, before[len(others)].slot_bytes, False)
    assert (small.shares_memory, begins[-1]) == (True, begins[-2])
    assert 2 <= small.slots <= now_of.count(len(classes) - 1)
    assert small.prefetch < small.slots
    assert large.prefetch <= 1
    if ahead is not None:
        assert max(small.prefetch, large.prefetch) <= ahead


@pytest.mark.parametrize(
    ("memory", "slots"), [(1_000_000, 4), (1_190_000, 4), (1_210_000, 4), (1_390_000, 4), (1_410_000, 2)]
)
def test_a_large_unit_and_small_ones(memory: int, slots: int) -> None:
    classified = classify_sizes([200_000] * 12 + [999_424])
    fitted, kept = merge_small_classes(memory, *classified)
    class_of, classes = share_large_slot(memory, *classified, None, allocate_slots(memory, fitted, kept, None))
    assert class_of == [1] * 12 + [0]
    assert [each.slots for each in classes] == [1, slots]
    assert classes[1].shares_memory == (memory < 1_400_000), "two small tensors have memory of their own"
    assert classes[1].prefetch > 0, "something can come while another is in use"


def test_groups_too_large_for_a_part_of_the_slot_use_all_of_it() -> None:
    classified = classify_sizes([40_960] * 20 + [614_400] * 3 + [999_424])
    fitted, kept = merge_small_classes(1_100_000, *classified)
    class_of, classes = share_large_slot(1_100_000, *classified, None, allocate_slots(1_100_000, fitted, kept, None))
    assert class_of == [1] * 20 + [0] * 4
    assert [each.slots for each in classes] == [1, 20]


def test_a_group_with_most_bytes_is_not_read_again_for_the_others() -> None:
    classified = classify_sizes([200_000] * 4 + [999_424])
    for memory, shares in [(1_190_000, True), (1_210_000, False)]:
        fitted, kept = merge_small_classes(memory, *classified)
        _, classes = share_large_slot(memory, *classified, None, allocate_slots(memory, fitted, kept, None))
        assert classes[1].shares_memory == shares


@given(SIZES, st.integers(0, 60_000_000), st.integers(1, 10_000_000))
def test_more_memory_never_means_fewer_slot_bytes(sizes: list[int], memory: int, more: int) -> None:
    class_of, slot_bytes = classify_sizes(sizes)
    memory += sum(slot_bytes)
    small, large = (allocate_slots(each, class_of, slot_bytes, None) for each in (memory, memory + more))
    assert [each.slots for each in small] <= [each.slots for each in large]


@given(SIZES, st.floats(0.1, 1.2), st.floats(0.1, 1.1), st.one_of(st.none(), st.integers(0, 5)))
def test_slots_leave_room_for_compressed_weights(
    sizes: list[int], part: float, ratio: float, ahead: int | None
) -> None:
    class_of, slot_bytes = classify_sizes(sizes)
    total = sum(slot_bytes[index] for index in class_of)
    memory = max(int(total * part), sum(slot_bytes))
    becomes = sum(sizes)
    stored = int(becomes * ratio)
    slots = slot_budget(memory, class_of, slot_bytes, ahead, (stored, becomes))
    assert sum(slot_bytes) <= slots <= memory
    if total <= memory or ratio > 0.9:
        assert slots == memory
        return
    early = 2 if ahead is None else ahead
    passing = sum(size * min(class_of.count(index), early + 1) for index, size in enumerate(slot_bytes))
    # Disk bytes of the groups without a slot of their own.
    needed = stored * (1 - (slots - passing) / total)
    if slots < memory:
        assert slots >= passing
    if passing < slots < memory:
        assert slots + needed <= memory + 2
    if slots == passing:
        assert memory <= slots + stored + 1, "all stored bytes leave no room for decoded ones"


@given(
    st.integers(0, 80_000_000),
    st.lists(st.integers(1, 5_000_000), max_size=20),
    st.integers(0, 20_000_000),
    st.lists(st.integers(1, 8_000_000), max_size=8),
    st.integers(1, 65536),
)
def test_memory_is_divided_completely_or_refused(
    memory: int, units: list[int], rows: int, experts: list[int], item: int
) -> None:
    item = min(item, rows)
    largest = max((-(-unit // 4096) * 4096 for unit in units), default=0)
    needed = largest + max([item, *experts])
    if memory < needed:
        with pytest.raises(MemoryError):
            split_memory(memory, units, rows, experts, item)
        return
    split = split_memory(memory, units, rows, experts, item)
    assert split.groups >= largest
    assert split.rows >= max([item, *experts])
    assert split.groups + split.rows <= memory
    assert split.rows <= rows + sum(experts)
    everything = sum(-(-unit // 4096) * 4096 * 5 // 4 + 4096 for unit in units) + rows + sum(experts)
    if memory >= everything and not experts:
        assert split.rows == rows, "where there is memory for all, all stays"


@st.composite
def origins(draw: st.DrawFn) -> tuple[list[Origin], dict[int, bytes]]:
    """Weights in ranges of two random files."""
    random = Random(draw(st.integers(0, 1 << 30)))
    files = {index: random.randbytes(draw(st.integers(20_000, 90_000))) for index in (0, 1)}
    found = []
    for _ in range(draw(st.integers(1, 12))):
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]))
        pieces = []
        for _ in range(draw(st.integers(1, 3))):
            source = draw(st.integers(0, 1))
            elements = draw(st.integers(1, 700))
            room = len(files[source]) - elements * dtype.itemsize
            offset = draw(st.integers(0, room)) // draw(st.sampled_from([1, 8, 64])) * draw(st.sampled_from([1, 8]))
            pieces.append(ByteRange(source, min(offset, room), elements * dtype.itemsize))
        count = sum(piece.nbytes for piece in pieces) // dtype.itemsize
        reference_line_offset = draw(st.sampled_from([None, None, 0, 8, 48]))
        found.append(Origin(tuple(pieces), dtype, (count,), reference_line_offset=reference_line_offset))
    repeated = draw(st.lists(st.sampled_from(found), max_size=3))
    return found + repeated, files


@given(origins())
def test_every_byte_of_every_weight_is_read_to_its_place(drawn: tuple[list[Origin], dict[int, bytes]]) -> None:
    weights, files = drawn
    layout = lay_out_group(weights, {index: len(content) for index, content in files.items()})
    slot = bytearray(b"\xa5" * layout.nbytes)
    written = bytearray(layout.nbytes)
    for source, offset, nbytes, at in layout.reads:
        assert offset + nbytes <= len(files[source]), "nothing is read beyond the end"
        assert at + nbytes <= layout.nbytes
        assert not any(written[at : at + nbytes]), "nothing is read twice to the same place"
        written[at : at + nbytes] = b"\1" * nbytes
        slot[at : at + nbytes] = files[source][offset : offset + nbytes]
    for origin, place in zip(weights, layout.offsets, strict=True):
        content = b"".join(files[each.source][each.offset : each.offset + each.nbytes] for each in origin.ranges)
        assert bytes(slot[place : place + origin.nbytes]) == content
        assert place % CACHE_LINE_BYTES == origin.line_offset
        assert place % origin.dtype.itemsize == 0


@given(origins())
def test_resident_weights_do_not_overlap(drawn: tuple[list[Origin], dict[int, bytes]]) -> None:
    weights = [Weight(nn.Identity(), "weight", str(index)) for index in range(len(drawn[0]))]
    places, nbytes = place_resident(weights, {str(index): origin for index, origin in enumerate(drawn[0])})
    spans = sorted((place, place + origin.nbytes) for origin, place in places.items())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= nbytes
    assert all(place % CACHE_LINE_BYTES == origin.line_offset for origin, place in places.items())


class Block(nn.Module):
    """A layer that calls its children and uses a weight of its own."""

    def __init__(self, width: int, depth: int, shared: nn.Module | None) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(width, device="meta"))
        self.layers = nn.Sequential(*(nn.Linear(width, width, device="meta") for _ in range(depth)))
        self.shared = shared

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(hidden) * self.own
        return self.shared(hidden) if self.shared is not None else hidden


class Tower(nn.Module):
    def __init__(self, blocks: list[tuple[int, int, bool]], rows: int) -> None:
        super().__init__()
        shared = nn.Linear(16, 16, device="meta")
        self.token = nn.Parameter(torch.empty(1, 16, device="meta"))
        self.embed = nn.Embedding(rows, 16, device="meta")
        self.blocks = nn.ModuleList(
            Block(16 * width, depth, shared if is_shared else None) for width, depth, is_shared in blocks
        )
        self.head = nn.Linear(16, rows, bias=False, device="meta")
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        result: torch.Tensor = self.head(hidden)
        return result


TOWERS = st.builds(
    Tower,
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.booleans()), min_size=1, max_size=6),
    st.integers(2, 3000),
)


def sizes_of(model: nn.Module) -> dict[int, int]:
    return {id(each): each.nbytes for each in model.parameters()}


def on_disk(model: nn.Module) -> dict[str, Origin]:
    """Place the weights one after another, as in a file."""
    at, found, seen = 0, {}, {}
    for name, each in model.named_parameters(remove_duplicate=False):
        if id(each) not in seen:
            seen[id(each)] = ByteRange(0, at, each.nbytes)
            at += each.nbytes
        found[name] = Origin((seen[id(each)],), each.dtype, tuple(each.shape))
    return found


def everywhere(found: Partition) -> list[tuple[int, str]]:
    groups, picks = (each.weights for each in found.groups), (each.weights for each in found.lookups)
    weights = [*found.resident, *(weight for several in (*groups, *picks) for weight in several)]
    return [(id(weight.module), weight.attribute) for weight in weights]


@given(TOWERS, st.integers(1, 200_000))
def test_each_weight_of_each_module_comes_from_one_place(model: Tower, memory: int) -> None:
    limits = Limits(memory // 4, memory // 1024, memory // 8, memory // 16, memory // 64)
    found = partition(model, sizes_of(model), limits)
    expected = {(id(module), name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)}
    assert sorted(everywhere(found)) == sorted(expected)
    grouped = {id(group.module) for group in found.groups}
    for group in found.groups:
        inside = {id(child) for child in group.module.modules()} - {id(group.module)}
        assert not inside & grouped, "no group is inside another: who has one never waits for a second"
        assert {id(weight.module) for weight in group.weights} <= inside | {id(group.module)}
    # A weight of the root module, which no layer loads, is resident.
    assert any(weight.name == "token" for weight in found.resident)


@settings(deadline=None)
@given(TOWERS, st.integers(1, 400_000), st.booleans())
def test_a_plan_fits_its_memory_or_names_a_sufficient_amount(model: Tower, memory: int, on_host: bool) -> None:
    origin_of = on_disk(model)
    end = max(piece.offset + piece.nbytes for origin in origin_of.values() for piece in origin.ranges)
    facts = PlanInput(model, sizes_of(model), origin_of, {0: end}, on_host, None)
    try:
        plan = facts.plan(memory)
    except MemoryError:
        needed = find_sufficient_memory(facts.plan, memory)
        assert needed is not None
        assert needed > memory
        plan, memory = facts.plan(needed), needed
    assert plan.nbytes <= memory
    for layout, index in zip(plan.slots.layouts, plan.slots.class_of, strict=True):
        assert layout.nbytes <= plan.slots.classes[index].slot_bytes


def test_nothing_is_enough_for_a_plan_that_never_fits() -> None:
    def plan(_memory: int) -> Any:
        raise MemoryError

    assert find_sufficient_memory(plan, 1000) is None


def test_a_module_that_uses_the_weights_of_its_children_comes_whole() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
    found = partition(encoder, sizes_of(encoder), Limits(10_000, 10, 10, None, None))
    assert [len(group.weights) for group in found.groups] == [12, 12], "one kernel takes all weights of a layer"
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, batch_first=True), 2)
    found = partition(decoder, sizes_of(decoder), Limits(10_000, 10, 10, None, None))
    whole = [group for group in found.groups if isinstance(group.module, nn.MultiheadAttention)]
    assert len(whole) == 4
    assert all(len(group.weights) == 4 for group in whole), "in_proj and out_proj, with their biases"


def test_many_small_weights_do_not_fill_the_memory() -> None:
    model = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2000))
    memory = 2000 * 1024 // 4
    found = partition(model, sizes_of(model), Limits(memory // 4, 2048, memory // 8, None, None))
    assert len(found.resident) == math.floor(memory / 8 / 1024)
    assert len(found.groups) == 2000 - len(found.resident)


def test_weights_for_a_gpu_begin_at_a_cache_line() -> None:
    """Also those that do not in their file. Only weights that do are read together, page by page."""
    weights = [
        Origin((ByteRange(0, offset, 4096),), torch.bfloat16, (2048,)).for_device(torch.device("cuda"))
        for offset in (8, 4104, 8256, 12352)
    ]
    layout = lay_out_group(weights, {0: 40_000})
    assert [place % CACHE_LINE_BYTES for place in layout.offsets] == [0] * 4
    read = {begin: (nbytes, at) for _, begin, nbytes, at in layout.reads}
    assert [read[offset] for offset in (8, 4104)] == [(4096, place) for place in layout.offsets[:2]]
    assert read[8192][0] == 12288
    assert sorted(read) == [8, 4104, 8192]
