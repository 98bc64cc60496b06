"""A forked child waits for no lock that a thread of its parent held."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import deepnvme
from deepnvme._utils.interrupts import make_lock
from forked_child import status_of_child

if TYPE_CHECKING:
    from collections.abc import Callable

# Where else the package makes locks, and why no child waits for them.
OTHERS = {
    "_utils/interrupts.py": "makes the others; a child that waits for an event looks at the process first",
    "_checkpoint/distributed/process_group.py": "a local variable of the call that waits",
}


def held_in_a_thread(lock: Any) -> Callable[[], None]:
    """Hold a lock in another thread. Return what ends that."""
    is_held, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(20)

    def end() -> None:
        is_over.set()
        thread.join()

    return end


def test_a_lock_of_another_thread_is_free_in_the_child_and_held_in_the_parent() -> None:
    lock = make_lock()

    def work() -> None:
        assert lock.acquire(timeout=10)

    end = held_in_a_thread(lock)
    try:
        assert status_of_child(work) == 0
        assert not lock.acquire(blocking=False)
    finally:
        end()


def test_a_lock_of_the_thread_that_forks_stays_held() -> None:
    lock = make_lock()

    def work() -> None:
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(lock.acquire(blocking=False)))
        other.start()
        other.join()
        lock.release()
        assert taken == [False]

    with lock:
        assert status_of_child(work) == 0


def test_the_package_makes_no_other_locks() -> None:
    root = Path(deepnvme.__file__).parent
    makes = re.compile(
        r"threading\.R?Lock\(|threading\.Condition\((?!make_lock)|threading\.(Semaphore|Barrier)\(|allocate_lock"
    )
    found = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if makes.search(path.read_text())}
    assert found == OTHERS.keys()


def test_a_lazy_tensor_that_a_thread_was_reading_at_the_fork(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    deepnvme.save({"a": torch.arange(1000.0)}, tmp_path / "a.pt")
    tensor = deepnvme.load(tmp_path / "a.pt", lazy=True)["a"]
    begun, goes_on = threading.Event(), threading.Event()
    read = tensor._read

    def slow() -> Any:
        begun.set()
        goes_on.wait()
        return read()

    vars(tensor)["_read"] = slow
    thread = threading.Thread(target=tensor.materialize)
    thread.start()
    assert begun.wait(20)
    vars(tensor)["_read"] = read

    def work() -> None:
        with pytest.raises(deepnvme.errors.ClosedError):
            tensor.materialize()

    try:
        assert status_of_child(work) == 0
    finally:
        goes_on.set()
        thread.join()
    assert tensor.equal(torch.arange(1000.0))
