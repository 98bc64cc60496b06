"""Units of a file that pass through bounded memory."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch

from deepnvme import errors
from deepnvme.integrations._sglang.offloader import LayerStreamer, Slot

if TYPE_CHECKING:
    from pathlib import Path


def write_units(path: Path, sizes: list[list[int]]) -> tuple[list[list[tuple[str, int, int]]], bytes]:
    """Lay out the pieces of units in a file, with gaps. Returns the units and the file's bytes."""
    units: list[list[tuple[str, int, int]]] = []
    at = 3
    for pieces in sizes:
        units.append([])
        for nbytes in pieces:
            units[-1].append((str(path), at, nbytes))
            at += nbytes + 5
    content = os.urandom(at)
    path.write_bytes(content)
    return units, content


def check(streamer: LayerStreamer, units: list[list[tuple[str, int, int]]], content: bytes, unit: int) -> None:
    streamer.run(unit, lambda slot: check_slot(slot, units[unit], content))


def check_slot(slot: Slot, pieces: list[tuple[str, int, int]], content: bytes) -> None:
    for index, (_, offset, nbytes) in enumerate(pieces):
        tensor = slot.tensor(index)
        assert tensor.dtype == torch.uint8
        assert tensor.shape == (nbytes,)
        assert bytes(tensor.numpy()) == content[offset : offset + nbytes]


@pytest.mark.parametrize("seed", range(25))
def test_every_unit_has_the_bytes_of_the_file(tmp_path: Path, seed: int) -> None:
    chooser = random.Random(seed)
    sizes = [
        [chooser.randrange(1, 9000) for _ in range(chooser.randrange(1, 4))] for _ in range(chooser.randrange(1, 9))
    ]
    units, content = write_units(tmp_path / "weights", sizes)
    largest = max(map(sum, sizes))
    slots = chooser.randrange(1, len(units) + 2)
    ahead = chooser.choice([None, 0, 1, 2, 50])
    streamer = LayerStreamer(units, memory=slots * largest, prefetch_layers=ahead)
    for step in range(60):
        unit = step % len(units) if chooser.random() < 0.8 else chooser.randrange(len(units))
        check(streamer, units, content, unit)
    # Partly used pages count, so that small units have some more room.
    assert streamer.stats()["slots"] <= len(units)
    streamer.close()
    streamer.close()
    with pytest.raises(errors.ClosedError):
        check(streamer, units, content, 0)


def test_units_that_fit_stay_in_memory(tmp_path: Path) -> None:
    units, content = write_units(tmp_path / "weights", [[4096]] * 10)
    whole = LayerStreamer(units, memory=10 * 4096)
    part = LayerStreamer(units, memory=6 * 4096, prefetch_layers=2)
    for streamer in (whole, part):
        for _ in range(10):
            for unit in range(10):
                check(streamer, units, content, unit)
    assert whole.stats()["bytes_read"] == 10 * 4096
    # An LRU cache would read everything in every round.
    assert part.stats()["bytes_read"] < 8 * 100 * 4096 / 10


def test_the_next_units_are_read_while_one_is_in_use(tmp_path: Path) -> None:
    units, _ = write_units(tmp_path / "weights", [[500_000]] * 6)
    streamer = LayerStreamer(units, memory=3 * 500_000)

    def wait_for_reads(_: Slot) -> None:
        ahead = streamer.stats()["fetches_ahead"]
        end = time.monotonic() + 0.5
        while streamer.stats()["fetches_ahead"] == ahead and time.monotonic() < end:
            time.sleep(0.001)

    for unit in [*range(6)] * 3:
        streamer.run(unit, wait_for_reads)
    stats = streamer.stats()
    assert stats["fetches_ahead"] > stats["fetches"] / 2


def test_units_in_use_keep_their_memory(tmp_path: Path) -> None:
    units, content = write_units(tmp_path / "weights", [[300_000]] * 5)
    streamer = LayerStreamer(units, memory=2 * 300_000)

    def with_both(first: Slot, second: Slot) -> None:
        with pytest.raises(MemoryError, match="all 2 slots of its size are in use"):
            check(streamer, units, content, 0)
        check_slot(first, units[3], content)
        check_slot(second, units[1], content)

    streamer.run(3, lambda first: streamer.run(1, lambda second: with_both(first, second)))
    streamer.run(1, lambda _: check(streamer, units, content, 0))


def test_a_file_that_shrinks_raises(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    units, content = write_units(path, [[60_000, 70_000]] * 4)
    streamer = LayerStreamer(units, memory=2 * 130_000)
    check(streamer, units, content, 0)
    os.truncate(path, units[2][1][1] + 100)
    with pytest.raises(errors.ChangedFileError, match="weights"):
        for unit in (1, 2, 3):
            check(streamer, units, content, unit)


def test_memory_for_less_than_a_unit_is_refused(tmp_path: Path) -> None:
    units, _ = write_units(tmp_path / "weights", [[100], [5000]])
    with pytest.raises(ValueError, match="largest unit takes 5000"):
        LayerStreamer(units, memory=4999)


def test_no_units_need_no_memory() -> None:
    assert LayerStreamer([], memory=1).stats()["slots"] == 0
