"""Threads that wait because the weights of others fill the memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from deepnvme._stream.calling_threads import ThreadTurns

if TYPE_CHECKING:
    from collections.abc import Callable


class Memory:
    """Memory for some small items, or for one large one."""

    def __init__(self, capacity: int) -> None:
        self._lock, self._capacity, self.served = threading.Lock(), capacity, Counter[int]()
        self._had = 0

    def acquire(self, size: int) -> int:
        with self._lock:
            if self._had + size > self._capacity:
                raise MemoryError(size)
            self._had += size
            self.served[size] += 1
            return size

    def release(self, size: int) -> None:
        with self._lock:
            self._had -= size


def use(turns: ThreadTurns, memory: Memory, size: int, inside: Callable[[], object] = lambda: None) -> None:
    held: list[Any] = []
    try:
        turns.acquire(held, memory.acquire, size)
        inside()
    finally:
        if held:
            memory.release(size)
        turns.release()


def in_threads(*work: Callable[[], object]) -> list[threading.Thread]:
    threads = [threading.Thread(target=each, daemon=True) for each in work]
    for thread in threads:
        thread.start()
    return threads


def test_a_thread_that_needs_all_memory_is_not_starved() -> None:
    turns, memory, ended = ThreadTurns(), Memory(3), threading.Event()

    def small() -> None:
        while not ended.is_set():
            use(turns, memory, 1, lambda: time.sleep(0.003))

    # Three of them: at nearly any moment one of them holds something.
    threads = in_threads(*[small] * 3)
    try:
        for _ in range(3):
            (large,) = in_threads(lambda: use(turns, memory, 3))
            large.join(20)
            assert not large.is_alive(), "the others were quicker again and again"
            before = memory.served[1]
            time.sleep(0.05)
            assert memory.served[1] > before, "and go on afterwards"
    finally:
        ended.set()
        for thread in threads:
            thread.join(10)
    assert memory.served[3] == 3


def test_a_holding_thread_gets_more_while_others_wait() -> None:
    turns, memory = ThreadTurns(), Memory(3)

    def outer() -> None:
        time.sleep(1.0)  # longer than anybody's patience
        use(turns, memory, 1)

    def large() -> None:
        time.sleep(0.1)
        use(turns, memory, 3)

    began = time.monotonic()
    threads = in_threads(lambda: use(turns, memory, 1, outer), large)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "threads wait for each other"
    assert 1.0 <= time.monotonic() - began < 15
    assert memory.served == {1: 2, 3: 1}


def test_waiting_is_refused_if_no_thread_holds_anything() -> None:
    turns, memory = ThreadTurns(), Memory(3)
    with pytest.raises(MemoryError):
        use(turns, memory, 4)
    # Nor within nested calls.
    with pytest.raises(MemoryError):
        use(turns, memory, 2, lambda: use(turns, memory, 2))
    use(turns, memory, 3)
