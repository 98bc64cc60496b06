"""The buffer pool: buffers in use are never handed out again, and the limit holds."""

from __future__ import annotations

import random
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from deepnvme._checkpoint.load_memory import PAGE_BYTES, BufferPool

if TYPE_CHECKING:
    from deepnvme._checkpoint.load_memory import PoolBuffer


def tensor_in(block: PoolBuffer, nbytes: int) -> Any:
    buffer, start = block.allocate_part(nbytes)
    return torch.frombuffer(buffer, dtype=torch.uint8, count=nbytes, offset=start)


@pytest.mark.parametrize("seed", range(12))
def test_buffers_in_use_are_not_handed_out_again(seed: int) -> None:
    chooser = random.Random(seed)
    sizes = [chooser.randrange(1, 40) * 1000 for _ in range(3)]
    memory = BufferPool(150_000)
    wanted: list[tuple[PoolBuffer, list[Any], int]] = []
    kept: list[tuple[Any, int]] = []
    for step in range(400):
        nbytes = chooser.choice(sizes)
        if wanted and (not memory.can_acquire(nbytes) or chooser.random() < 0.3):
            block, tensors, value = wanted.pop(0)
            kept += [(tensor, value) for tensor in tensors if chooser.random() < 0.3]
            memory.release(block.nbytes)
            del block, tensors
        else:
            value = step % 251
            block = memory.acquire(nbytes)
            # More than fits into the buffer: the rest is fresh memory.
            tensors = [tensor_in(block, chooser.randrange(1, nbytes // 2)) for _ in range(chooser.randrange(1, 4))]
            for tensor in tensors:
                tensor.fill_(value)
            wanted.append((block, tensors, value))
            del block, tensors, tensor
        if kept and chooser.random() < 0.4:
            tensor, value = kept.pop(chooser.randrange(len(kept)))
            assert tensor.eq(value).all()
            del tensor
        spare = sum(each.nbytes for each in memory._idle)
        assert memory.acquired_bytes == sum(block.nbytes for block, _, _ in wanted)
        assert spare + memory.acquired_bytes <= 150_000 or not memory.acquired_bytes
    assert all(tensor.eq(value).all() for tensor, value in kept)
    assert all(tensor.eq(value).all() for _, tensors, value in wanted for tensor in tensors)


def test_memory_is_returned_with_its_last_tensor_in_any_thread() -> None:
    memory = BufferPool(1 << 20)
    block = memory.acquire(100_000)
    first = tensor_in(block, 10)
    place = first.data_ptr()
    memory.release(block.nbytes)
    del block
    assert not memory.has_idle(100_000), "a tensor is in it"
    held = [first[3:]]
    del first
    assert not memory.has_idle(100_000), "so is a part of one"
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert memory.has_idle(100_000)
    assert not memory.has_idle(100_001)
    again = tensor_in(memory.acquire(100_000), 10)
    assert again.data_ptr() == place


def test_parts_begin_at_pages_and_do_not_overlap() -> None:
    block = BufferPool(1 << 20).acquire(10 * PAGE_BYTES)
    parts = [block.allocate_part(nbytes) for nbytes in (1, PAGE_BYTES, PAGE_BYTES + 1, 6 * PAGE_BYTES)]
    assert [start - block.start for _, start in parts] == [0, PAGE_BYTES, 2 * PAGE_BYTES, 4 * PAGE_BYTES]
    other, start = block.allocate_part(1)
    assert other is not block.view
    assert start == 0


def test_nothing_is_left_after_the_pool_is_freed() -> None:
    memory = BufferPool(1 << 20)
    kept = tensor_in(memory.acquire(200_000), 200_000).fill_(7)
    spare = memory.acquire(100_000)
    memory.release(spare.nbytes)
    del spare
    assert memory.has_idle(100_000)
    ends = weakref.ref(memory)
    del memory
    # Immediately, without waiting for the collector.
    assert ends() is None
    assert kept.eq(7).all()
