"""What calls cost in operations, copies and system calls: counts that do not depend on the speed of the machine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import deepnvme

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20
# Beginnings of calls in the output of strace; an interrupted call also has a line for its end.
CALL = re.compile(r"^\d+ +(\w+)\(", re.MULTILINE)


@pytest.fixture
def engine() -> Iterator[deepnvme.Engine]:
    with deepnvme.Engine() as made:
        if made.stats().backend != "io_uring":
            pytest.skip(f"the counts are those of io_uring, and this machine has {made.stats().backend}")
        yield made


def counted(engine: deepnvme.Engine, call: Callable[[], object]) -> dict[str, int]:
    before = engine.stats()
    call()
    after = engine.stats()
    names = ("requests", "ops", "bytes_read", "bytes_written", "bytes_bounced", "bytes_buffered")
    return {name: getattr(after, name) - getattr(before, name) for name in names}


def large() -> dict[str, Any]:
    return {f"layers.{index}.weight": torch.randn(4 * MIB) for index in range(8)}  # 128 MiB


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_operations_of_large_states(tmp_path: Path, engine: deepnvme.Engine, suffix: str) -> None:
    from deepnvme.integrations.weights import iterate_weights

    state, path = large(), tmp_path / f"model{suffix}"
    nbytes = sum(tensor.nbytes for tensor in state.values())
    saved = counted(engine, lambda: deepnvme.save(state, path, engine=engine))
    assert saved["bytes_written"] <= nbytes + MIB
    assert saved["ops"] <= nbytes // (MIB // 2) + 40
    new = counted(engine, lambda: deepnvme.load(path, engine=engine))
    # Straight into the new memory.
    assert new["ops"] <= nbytes // ((2 if suffix == ".safetensors" else 1) * MIB) + 40
    assert new["bytes_read"] <= nbytes + 2 * MIB
    assert new["bytes_bounced"] <= MIB
    into = counted(engine, lambda: deepnvme.load(path, into=state, engine=engine))
    assert into["ops"] <= nbytes // (MIB // 2) + 60
    assert into["bytes_read"] <= nbytes + 2 * MIB
    if suffix == ".safetensors":
        each = counted(engine, lambda: [tensor.sum() for _, tensor in iterate_weights(path, engine=engine)])
        assert each["ops"] <= nbytes // MIB + 60
        assert each["bytes_read"] <= nbytes + 2 * MIB


def test_operations_of_pinned_memory(tmp_path: Path, engine: deepnvme.Engine) -> None:
    pinned = deepnvme.pinned_empty(64 * MIB)
    pinned.random_(0, 256)
    for call in (engine.write, engine.read):
        count = counted(engine, lambda call=call: call(pinned, tmp_path / "file"))  # type: ignore[misc]
        assert (count["requests"], count["ops"], count["bytes_bounced"]) == (1, 32, 0)


PROGRAMS = {
    # Operations of each repeat, and the program, in which `work` is repeated.
    "read_batch": (
        2000,
        """
        deepnvme.write(torch.randint(0, 256, (16 << 20,), dtype=torch.uint8), "file")
        target = torch.empty(2000, 4096, dtype=torch.uint8)
        items = [("file", 8192 * index, row) for index, row in enumerate(target)]
        work = lambda: deepnvme.read_batch(items)
        """,
    ),
    "save": (
        256,
        """
        state = {str(index): torch.randn(4 << 20) for index in range(8)}
        work = lambda: deepnvme.save(state, "model.safetensors")
        """,
    ),
    "load into": (
        256,
        """
        state = {str(index): torch.randn(4 << 20) for index in range(8)}
        deepnvme.save(state, "model.safetensors")
        work = lambda: deepnvme.load("model.safetensors", into=state)
        """,
    ),
}
# A submission and a wait for each operation at most, and the rest that a save's hand-over between threads takes.
CALLS_MAX = {"read_batch": 2.0, "save": 6.5, "load into": 3.0}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """Count the system calls of four repeats of each program. One process runs all, as it imports torch for seconds."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed, so system calls cannot be counted")
    folder = tmp_path_factory.mktemp("strace")
    lines = ["import os, torch, deepnvme"]
    for what, (_, prepare) in PROGRAMS.items():
        lines += [line.strip() for line in prepare.strip().splitlines()]
        # The name of an absent file is a mark in the list of calls.
        lines += [
            "work()",
            f"os.path.exists('begin {what}')",
            "for _ in range(4): work()",
            f"os.path.exists('end {what}')",
        ]
    table = folder / "table"
    command = ["strace", "-f", "-o", str(table), sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "ptrace" in done.stderr and not table.exists():
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    text = table.read_text(errors="replace")
    counts = {}
    for what in PROGRAMS:
        between = text.partition(f'"begin {what}"')[2].partition(f'"end {what}"')[0]
        counts[what] = Counter(found[1] for found in CALL.finditer(between))
    return counts


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("what", PROGRAMS)
def test_system_calls_of_an_operation(calls: dict[str, Counter[str]], what: str) -> None:
    each = calls[what].total() / 4 / PROGRAMS[what][0]
    assert 0.01 < each <= CALLS_MAX[what], f"{each:.2f} system calls an operation: {calls[what]}"


def test_an_import_starts_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 4096)
    program = """
import os, deepnvme
assert len(os.listdir("/proc/self/task")) == 1, "the first request starts the engine"
target = bytearray(1 << 20)
deepnvme.read(target, "file")
assert target == bytes(range(256)) * 4096
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
