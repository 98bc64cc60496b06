"""Batches: many tensors as one request."""

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]


def test_a_batch_is_one_request(engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    parts = [random_bytes(size) for size in (1, 4096, 0, 12_345, 70_000, 333)]
    items, at = [], dict.fromkeys(paths, 0)
    for index, part in enumerate(parts):
        path = paths[index % 2]
        items.append((path, at[path], part))
        at[path] += len(part)
    total = sum(map(len, parts))
    before = engine.stats().requests
    assert engine.write_batch(items) == total
    assert engine.stats().requests == before + 1
    assert paths[0].read_bytes() == parts[0] + parts[2] + parts[4]
    assert paths[1].read_bytes() == parts[1] + parts[3] + parts[5]
    targets = [bytearray(len(part)) for part in parts]
    reads = [(path, offset, target) for (path, offset, _), target in zip(items, targets, strict=True)]
    assert engine.start_read_batch(iter(reads)).result() == total
    assert targets == parts


def test_ten_thousand_small_tensors(tmp_path: Path, random_bytes: RandomBytes) -> None:
    path, data = tmp_path / "file", np.frombuffer(random_bytes(10_000 * 512), np.uint8).reshape(10_000, 512)
    with deepnvme.Engine() as engine:
        engine.write_batch([(path, index * 512, row) for index, row in enumerate(data)])
        target = np.empty_like(data)
        engine.read_batch([(path, index * 512, row) for index, row in enumerate(target)])
        assert np.array_equal(target, data)
        assert engine.stats().ops < 2000, "neighbours travel together"


def test_a_batch_without_offsets_makes_whole_files(tmp_path: Path, random_bytes: RandomBytes) -> None:
    items = [(tmp_path / name, None, random_bytes(10_000)) for name in "abc"]
    for path, _, _ in items:
        path.write_bytes(random_bytes(50_000))
    assert deepnvme.write_batch(items, durability="data") == 30_000
    for path, _, data in items:
        assert path.read_bytes() == data


def test_an_invalid_batch_is_refused(tmp_path: Path, random_bytes: RandomBytes) -> None:
    path, data = tmp_path / "file", random_bytes(100)
    with pytest.raises(ValueError, match="1 of 2 items have no offset"):
        deepnvme.write_batch([(path, None, data), (path, 0, data)])
    with pytest.raises(ValueError, match="overlap"):
        deepnvme.write_batch([(path, 0, data), (path, 50, data)])
    with pytest.raises(TypeError, match="item 1: tensor must be"):
        deepnvme.read_batch([(path, 0, bytearray(1)), (path, 0, "text")])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"item 0: .* 2 elements"):
        deepnvme.read_batch([(path, 0)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"list of tuples .* not str"):
        deepnvme.read_batch("ab")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="read-only"):
        deepnvme.read_batch([(path, 0, data)])
    memory = memoryview(bytearray(100))
    path.write_bytes(data)
    for first, second in ((memory, memory[50:]), (memory[:60], memory[59:]), (memory[10:20], memory)):
        with pytest.raises(ValueError, match="share memory"):
            deepnvme.read_batch([(path, 0, first), (path, 0, second)])
        with pytest.raises(ValueError, match="share memory"):
            deepnvme.start_read_batch([(path, 0, first), (path, 0, second)])
    assert bytes(memory) == bytes(100)
    assert deepnvme.read_batch([(path, 50, memory[:50]), (path, 0, memory[50:])]) == 100
    assert bytes(memory) == data[50:] + data[:50]
    path.write_bytes(b"")
    assert deepnvme.read_batch([]) == 0
    assert not path.exists() or path.stat().st_size == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_the_cycle_collector_is_left_as_it_was(tmp_path: Path, enabled: bool) -> None:
    collecting = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        deepnvme.write_batch([(tmp_path / "file", 0, b"bytes")])
        assert gc.isenabled() == enabled
        with pytest.raises(TypeError):
            deepnvme.write_batch([(tmp_path / "file", 0, b"bytes"), (tmp_path / "file", 5, None)])  # type: ignore[list-item]
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if collecting else gc.disable)()


@pytest.mark.parametrize("start", [False, True])
def test_strided_targets_that_share_memory_are_refused(tmp_path: Path, start: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(1, 13)))
    memory = np.zeros(12, np.uint8)
    read = (lambda items: deepnvme.start_read_batch(items).result()) if start else deepnvme.read_batch
    halves, thirds = memory[0::2], memory[0::3]
    for other in (thirds, halves, memory[4:6], memory[8::-4]):
        with pytest.raises(ValueError, match="share memory"):
            read([(path, 0, halves), (path, 6, other)])
    assert not memory.any()
    assert read([(path, 0, halves), (path, 6, memory[1::2])]) == 12
    assert memory[0::2].tolist() == [1, 2, 3, 4, 5, 6] and memory[1::2].tolist() == [7, 8, 9, 10, 11, 12]
