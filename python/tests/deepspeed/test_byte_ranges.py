"""Operations of one handle on overlapping bytes take effect in the order of submission."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")

import torch

from deepnvme.deepspeed import aio_handle
from deepnvme.deepspeed._operations import ByteRanges

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20


def test_conflicts_agree_with_a_plain_list() -> None:
    randomness = random.Random(1)
    for _ in range(300):
        ranges = ByteRanges()
        added: list[tuple[str, int, int, bool]] = []
        for _ in range(30):
            file = randomness.choice(["a", "b"])
            start = randomness.randrange(60)
            end = start + randomness.randrange(8)
            writes = randomness.random() < 0.7
            # Reads of a file count as one range from the first to the last.
            reads = [(other[1], other[2]) for other in added if other[0] == file and not other[3]]
            hull = (min((read[0] for read in reads), default=0), max((read[1] for read in reads), default=0))
            expected = start < end and (
                any(other[0] == file and other[3] and other[1] < end and start < other[2] for other in added)
                or (writes and start < hull[1] and hull[0] < end)
            )
            assert ranges.conflicts(file, start, end, writes=writes) == expected
            if not expected and start < end:
                ranges.add(file, start, end, writes=writes)
                added.append((file, start, end, writes))
        ranges.forget("a")
        assert not ranges.conflicts("a", 0, 1000, writes=True)


@pytest.mark.parametrize("size_bytes", [1000, 8 * MIB + 1])
def test_a_read_sees_the_write_before_it(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor], size_bytes: int
) -> None:
    handle = aio_handle(intra_op_parallelism=2)
    name = str(tmp_path / "file")
    for _ in range(5):
        source = random_bytes(size_bytes)
        target = torch.empty_like(source)
        handle.async_pwrite(source, name)
        handle.async_pread(target, name)
        assert handle.wait() == 2
        assert torch.equal(target, source)


def test_the_last_write_wins_and_reads_before_it_see_the_old_bytes(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    handle = aio_handle(intra_op_parallelism=2)
    name = str(tmp_path / "file")
    content = random_bytes(4 * MIB)
    handle.sync_pwrite(content, name)
    randomness = random.Random(2)
    reads = []
    for _ in range(60):
        start = randomness.randrange(4 * MIB - 70_000)
        size = randomness.randrange(1, 70_000)
        if randomness.random() < 0.5:
            target = torch.empty(size, dtype=torch.uint8)
            handle.async_pread(target, name, start)
            reads.append((target, content[start : start + size].clone()))
        else:
            source = random_bytes(size)
            handle.async_pwrite(source, name, start)
            content[start : start + size] = source
    assert handle.wait() == 60
    assert all(torch.equal(target, expected) for target, expected in reads)
    target = torch.empty_like(content)
    handle.sync_pread(target, name)
    assert torch.equal(target, content)


def test_an_error_of_an_earlier_operation_is_still_raised_by_wait(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    handle = aio_handle()
    name = tmp_path / "file"
    name.write_bytes(b"x" * 10)
    handle.async_pread(torch.empty(1000, dtype=torch.uint8), str(name))
    source = random_bytes(1000)
    handle.async_pwrite(source, str(name))
    with pytest.raises(EOFError):
        handle.wait()
    assert name.read_bytes() == source.numpy().tobytes()
    assert handle.wait() == 0
