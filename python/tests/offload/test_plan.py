"""The plan of a step: its traffic is the least that any choice of evictions gives."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING

import pytest

from deepnvme._offload.plan import OffloadPlan, PartPlan, plan_parts
from deepnvme._swap.shared import Use

if TYPE_CHECKING:
    from deepnvme._swap.shared import _Action

KIND = "parameters"


def use(key: str, action: _Action = "read") -> Use:
    return Use(KIND, key, action)


def planned(uses: list[Use], memory: int, sizes: dict[str, int] | None = None) -> PartPlan:
    known = {one.key: 1 for one in uses} if sizes is None else sizes
    return plan_parts(uses, known, memory, [KIND])[0]


def least_reads(uses: list[Use], memory: int) -> int:
    """Try all evictions, over two steps, and return the reads of both."""
    steps = [one.key for one in uses] * 2

    @functools.cache
    def from_here(position: int, resident: frozenset[str]) -> int:
        if position == len(steps):
            return 0
        key = steps[position]
        if key in resident:
            return from_here(position + 1, resident)
        if len(resident) < memory:
            return 1 + from_here(position + 1, resident | {key})
        return 1 + min(from_here(position + 1, (resident - {other}) | {key}) for other in resident)

    return from_here(0, frozenset())


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_evictions_reads_less(seed: int) -> None:
    rng = random.Random(seed)
    uses = [use(rng.choice("abcdef")) for _ in range(rng.randrange(2, 11))]
    memory = rng.randrange(1, 4)
    steps = uses * 2
    # The plan counts the second of two steps. Two steps are one step that is twice as long, and is not repeated.
    two = planned(steps, memory).read_bytes
    # The memory that the first round leaves may save reads in the second.
    assert two <= least_reads(uses, memory)
    assert planned(uses, memory).read_bytes * 2 >= two - memory


def test_what_fits_is_neither_read_nor_written() -> None:
    uses = [use("a"), use("b", "change"), use("c", "create"), use("c"), use("c", "delete")]
    assert planned(uses, 3) == PartPlan(KIND, 3, 0, 0)


def test_a_tensor_that_is_deleted_first_is_not_written() -> None:
    uses = [use("a", "create"), use("a"), use("a", "delete"), use("b", "create"), use("b"), use("b", "delete")]
    assert planned(uses, 1) == PartPlan(KIND, 1, 0, 0)


def test_unchanged_tensors_are_read_only() -> None:
    uses = [use(key) for key in "abcd"]
    plan = planned(uses, 1)
    assert (plan.read_bytes, plan.written_bytes) == (4, 0)


def test_changed_tensors_are_written_once_a_step() -> None:
    uses = [use(key, "change") for key in "abcd"]
    plan = planned(uses, 1)
    assert (plan.read_bytes, plan.written_bytes) == (4, 4)


def test_the_last_created_are_read_first_from_memory() -> None:
    # As activations: the backward pass uses them in the reverse order.
    names = [f"a{index}" for index in range(10)]
    uses = [use(name, "create") for name in names]
    for name in reversed(names):
        uses += [use(name), use(name, "delete")]
    plan = planned(uses, 4)
    assert (plan.total_bytes, plan.read_bytes, plan.written_bytes) == (10, 6, 6)


@pytest.mark.parametrize("seed", range(10))
def test_more_memory_is_never_worse(seed: int) -> None:
    rng = random.Random(seed)
    uses = [use(rng.choice("abcdefgh"), rng.choice(["read", "change"])) for _ in range(30)]
    reads = [planned(uses, memory).read_bytes for memory in range(1, 9)]
    assert reads == sorted(reads, reverse=True)
    assert reads[-1] == 0


def test_sizes_count() -> None:
    uses = [use("large"), use("small"), use("other")]
    sizes = {"large": 100, "small": 1, "other": 1}
    assert planned(uses, 102, sizes).read_bytes == 0
    assert planned(uses, 101, sizes).read_bytes > 0


def test_the_slower_of_disk_and_computation_limits() -> None:
    parts = (PartPlan("parameters", 8, 4 * 10**9, 2 * 10**9), PartPlan("activations", 0, 0, 0))
    plan = OffloadPlan(10**9, parts, True, 2e9, 1e9, 3.0)
    assert (plan.disk_s, plan.expected_s, plan.limit) == (4.0, 4.0, "disk")
    slow = OffloadPlan(10**9, parts, True, 2e9, 1e9, 5.0)
    assert (slow.expected_s, slow.limit) == (5.0, "computation")
    text = str(slow)
    assert "expected 5.00 s a step, limited by computation" in text
    assert "4.00 GB" in text
    assert "8 B" not in text.splitlines()[0]


def test_unknown_speeds_give_no_times() -> None:
    parts = (PartPlan("parameters", 8, 4, 4),)
    plan = OffloadPlan(10**9, parts, False, None, None, None)
    assert (plan.disk_s, plan.expected_s, plan.limit) == (None, None, None)
    assert "expected" not in str(plan)
    assert OffloadPlan(10**9, (PartPlan("parameters", 8, 0, 0),), True, None, None, 1.0).expected_s == 1.0
