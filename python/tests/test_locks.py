"""A forked child waits for no lock that a thread of its parent held."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme._utils.interrupts import make_lock
from forked_child import status_of_child
from pause import Pause

# Where else the package makes locks, and why no child waits for them.
OTHERS = {
    "_utils/interrupts.py": "makes the others; a child that waits for an event looks at the process first",
    "_checkpoint/distributed/process_group.py": "a local variable of the call that waits",
}


def test_a_lock_of_another_thread_is_free_in_the_child_and_held_in_the_parent() -> None:
    lock, pause = make_lock(), Pause()

    def hold() -> None:
        with lock:
            pause.wait()

    def work() -> None:
        assert lock.acquire(timeout=10)

    with pause.of(hold):
        assert status_of_child(work) == 0
        assert not lock.acquire(blocking=False)


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
    pause, read = Pause(), tensor._read

    def slow() -> Any:
        pause.wait()
        return read()

    def work() -> None:
        with pytest.raises(deepnvme.errors.ClosedError):
            tensor.materialize()

    vars(tensor)["_read"] = slow
    with pause.of(tensor.materialize):
        vars(tensor)["_read"] = read
        assert status_of_child(work) == 0
    assert tensor.equal(torch.arange(1000.0))
