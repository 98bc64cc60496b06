"""With few descriptors left, a save succeeds or changes nothing, and the error names the limit."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

import deepnvme
from forked_child import status_of_child

torch = pytest.importorskip("torch")

ENGINES: dict[str, deepnvme.Engine] = {}
OLD, NEW = {"a": torch.zeros(500)}, {"a": torch.ones(500)}
LEFT_MAX = 16
HERE = Path(__file__).parent


def stripes(folder: Path) -> deepnvme.StripeSet:
    return deepnvme.StripeSet([folder / "one", folder / "two"], stripe_bytes=4096)


def engine() -> deepnvme.Engine:
    return ENGINES["now"]


def step(folder: Path, state: Any) -> None:
    with deepnvme.Checkpointer(folder, keep=1, engine=engine()) as checkpointer:
        checkpointer.save(int(state["a"][0]), state)


def shards(folder: Path, state: Any) -> None:
    state = {"a": state["a"], "b": state["a"]}
    deepnvme.save(state, folder / "model.safetensors", max_shard_bytes=2500, engine=engine())


SAVES: dict[str, tuple[Callable[[Path, Any], object], Callable[[Path], Any]]] = {
    "archive": (
        lambda folder, state: deepnvme.save(state, folder / "a.pt", engine=engine()),
        lambda folder: deepnvme.load(folder / "a.pt", verify="full"),
    ),
    "safetensors": (
        lambda folder, state: deepnvme.save(state, folder / "a.safetensors", engine=engine()),
        lambda folder: deepnvme.load(folder / "a.safetensors", verify="full"),
    ),
    "stripes": (
        lambda folder, state: deepnvme.save(state, stripes(folder), engine=engine()),
        lambda folder: deepnvme.load(stripes(folder), verify="full"),
    ),
    "shards": (shards, lambda folder: {"a": deepnvme.load(folder, verify="full")["a"]}),
    "checkpointer": (step, lambda folder: deepnvme.Checkpointer(folder).restore(verify="full")),
}


def count_files(folder: Path) -> int:
    return len([path for path in folder.iterdir() if path.name != ".lock"])


def with_descriptors(left: int, save: Callable[[], object]) -> str | None:
    """Save while `left` descriptors are free. Returns the error's text, or None on success."""
    taken = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    highest = max(taken)
    free = [number for number in range(highest) if number not in taken]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Those in between are taken.
    fill = [os.open("/dev/null", os.O_RDONLY) for _ in free]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max([highest, *fill]) + 1 + left, hard))
    try:
        save()
    except deepnvme.Error as error:
        return f"{type(error).__name__} {error.filename}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in fill:
            os.close(number)
    return None


def wait_for_probe() -> None:
    """Wait for the thread that probes native AIO: it still has a descriptor after the engine has started."""

    def name(thread: Path) -> str:
        try:
            return (thread / "comm").read_text().strip()
        except OSError:  # it has ended
            return ""

    while any(name(thread) == "dnvme-probe" for thread in Path("/proc/self/task").iterdir()):
        time.sleep(0.001)


def attempt(folder: Path, kind: str, left: int) -> bool:
    """Save over the old state; whether that was refused."""
    save, load = SAVES[kind]
    save(folder, OLD)
    before = count_files(folder)
    refused = with_descriptors(left, lambda: save(folder, NEW))
    expected = NEW if refused is None else OLD
    assert torch.equal(load(folder)["a"], expected["a"]), (left, refused)
    if refused is not None:
        assert "ulimit -n" in refused or "RLIMIT_NOFILE" in refused, refused
        assert count_files(folder) == before, list(folder.iterdir())
    save(folder, NEW)
    assert count_files(folder) == before, list(folder.iterdir())
    return refused is not None


def check(parent: Path, kind: str, direct: Literal["preferred", "disabled"]) -> None:
    refused = []
    for left in range(LEFT_MAX):
        folder = parent / str(left)
        folder.mkdir()

        def work(folder: Path = folder, left: int = left) -> int:
            torch.set_num_threads(1)
            # Garbage of earlier tests may hold descriptors, which would come free in the middle.
            gc.disable()
            # Start the engine first, so that its own descriptors do not count.
            ENGINES["now"] = deepnvme.Engine(workers=1, direct=direct)
            wait_for_probe()
            return int(attempt(folder, kind, left))

        status = status_of_child(work)
        assert status in (0, 1), left
        refused.append(status != 0)
    assert refused[0], "without a descriptor nothing is saved"
    assert not refused[-1], f"{LEFT_MAX - 1} descriptors suffice"


@pytest.mark.parametrize("kind", SAVES)
# Direct I/O takes a second descriptor per file, so the two modes fail at different points.
@pytest.mark.parametrize("direct", ["preferred", "disabled"])
def test_old_or_new_with_any_number_of_descriptors(
    tmp_path: Path, python_fork: Callable[..., object], kind: str, direct: str
) -> None:
    # In a process that is smaller than this one: a fork of this one takes a tenth of a second.
    program = f"""
        import pathlib, sys
        sys.path[:0] = {[str(HERE), str(HERE / "shared")]!r}
        import test_few_descriptors as base
        base.check(pathlib.Path(sys.argv[1]), *sys.argv[2:])
    """
    python_fork(program, tmp_path, kind, direct)
