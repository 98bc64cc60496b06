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
from deepnvme.integrations._sglang.offloader import LayerStreamer

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
    slot = streamer.acquire(unit)
    for index, (_, offset, nbytes) in enumerate(units[unit]):
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
        slot = streamer.acquire(unit)
        read = [bytes(slot.tensor(index).numpy()) for index in range(len(units[unit]))]
        assert read == [content[offset : offset + nbytes] for _, offset, nbytes in units[unit]]
        streamer.release(unit)
    # Partly used pages count, so that small units have some more room.
    assert streamer.stats()["slots"] <= len(units)
    streamer.close()
    streamer.close()
    with pytest.raises(errors.ClosedError):
        streamer.acquire(0)


def test_units_that_fit_stay_in_memory(tmp_path: Path) -> None:
    units, content = write_units(tmp_path / "weights", [[4096]] * 10)
    whole = LayerStreamer(units, memory=10 * 4096)
    part = LayerStreamer(units, memory=6 * 4096, prefetch_layers=2)
    for streamer in (whole, part):
        for _ in range(10):
            for unit in range(10):
                slot = streamer.acquire(unit)
                assert bytes(slot.tensor(0).numpy()) == content[units[unit][0][1] :][:4096]
                streamer.release(unit)
    assert whole.stats()["bytes_read"] == 10 * 4096
    # An LRU cache would read everything in every round.
    assert part.stats()["bytes_read"] < 8 * 100 * 4096 / 10


def test_the_next_units_are_read_while_one_is_in_use(tmp_path: Path) -> None:
    units, _ = write_units(tmp_path / "weights", [[500_000]] * 6)
    streamer = LayerStreamer(units, memory=3 * 500_000)
    units_in_turn = [*range(6)] * 3
    for unit in units_in_turn:
        streamer.acquire(unit)
        ahead = streamer.stats()["fetches_ahead"]
        end = time.monotonic() + 0.5
        while streamer.stats()["fetches_ahead"] == ahead and time.monotonic() < end:
            time.sleep(0.001)
        streamer.release(unit)
    stats = streamer.stats()
    assert stats["fetches_ahead"] > stats["fetches"] / 2


def test_units_in_use_keep_their_memory(tmp_path: Path) -> None:
    units, content = write_units(tmp_path / "weights", [[300_000]] * 5)
    streamer = LayerStreamer(units, memory=2 * 300_000)
    first, second = streamer.acquire(3), streamer.acquire(1)
    with pytest.raises(MemoryError, match="all 2 slots of its size are in use"):
        streamer.acquire(0)
    for slot, unit in ((first, 3), (second, 1)):
        assert bytes(slot.tensor(0).numpy()) == content[units[unit][0][1] :][:300_000]
    streamer.release(3)
    check(streamer, units, content, 0)
    with pytest.raises(ValueError, match="unit 3 was released"):
        streamer.release(3)


def test_a_file_that_shrinks_raises(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    units, content = write_units(path, [[60_000, 70_000]] * 4)
    streamer = LayerStreamer(units, memory=2 * 130_000)
    check(streamer, units, content, 0)
    streamer.release(0)
    os.truncate(path, units[2][1][1] + 100)
    with pytest.raises(errors.ChangedFileError, match="weights"):
        for unit in (1, 2, 3):
            streamer.acquire(unit)
            streamer.release(unit)


def test_memory_for_less_than_a_unit_is_refused(tmp_path: Path) -> None:
    units, _ = write_units(tmp_path / "weights", [[100], [5000]])
    with pytest.raises(ValueError, match="largest unit takes 5000"):
        LayerStreamer(units, memory=4999)


def test_no_units_need_no_memory() -> None:
    assert LayerStreamer([], memory=1).stats()["slots"] == 0
