"""Killed writers, full disks and folders without permissions leave the old file or the new one, never a mixture."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme
from process_memory import PROCESS_MEMORY
from programs import program

if TYPE_CHECKING:
    from collections.abc import Callable

WRITER = """
import sys, torch, deepnvme
path = sys.argv[1]
number = int(sys.argv[2])
while True:
    number += 1
    state = {"number": number, "a": torch.full((3 << 20,), number), "b": torch.full((1000,), number)}
    if path.endswith(".safetensors"):
        del state["number"]
    deepnvme.save(state, path, durability="data")
    print(number, flush=True)
"""


def number_in(path: Path) -> int:
    """Return the number that the whole file contains. Several are an error."""
    state = deepnvme.load(path, verify="full")
    # `unique` would sort three million elements.
    ends = [number.item() for name in "ab" for number in state[name].aminmax()]
    numbers = {*ends, *([state["number"]] if "number" in state else [])}
    assert len(numbers) == 1, numbers
    return int(numbers.pop())


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    rng = random.Random(3)
    last = 0
    kills = 0
    while kills < 50:
        with program(WRITER, path, last) as writer:
            said = int(writer.stdout.readline())
            time.sleep(rng.random() * 0.08)
            writer.kill()
            said = max([said, *(int(line) for line in writer.stdout.read().split())])
        kills += 1
        found = number_in(path)
        assert said <= found <= said + 1
        last = found
        assert len(list(tmp_path.iterdir())) <= 2
    deepnvme.save({"a": torch.zeros(3)}, path)
    assert list(tmp_path.iterdir()) == [path], "the next save removes what killed ones left"


def limited(path: Path, kib: int) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, resource, torch, deepnvme\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]) << 10, resource.RLIM_INFINITY))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try:\n    deepnvme.save({'a': torch.zeros(4 << 20)}, sys.argv[1])\n"
        "except deepnvme.Error as error:\n    print(error.errno, error)\n"
    )
    return subprocess.run([sys.executable, "-c", code, path, str(kib)], capture_output=True, text=True, check=True)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    deepnvme.save({"a": torch.ones(3)}, path)
    result = limited(path, 1000)
    assert result.stdout.startswith(str(errno.EFBIG)), result
    assert deepnvme.load(path)["a"].tolist() == [1, 1, 1]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
def test_a_full_disk_reports_the_needed_space(tmp_path: Path, unmount: Callable[[Path], None]) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", tmp_path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        path = tmp_path / "x.pt"
        deepnvme.save({"a": torch.ones(3)}, path)
        with pytest.raises(deepnvme.Error, match=r"1[67]\d{6} bytes|free") as caught:
            deepnvme.save({"a": torch.zeros(4 << 20)}, path)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(path)
        assert deepnvme.load(path)["a"].tolist() == [1, 1, 1]
        assert list(tmp_path.iterdir()) == [path]
    finally:
        unmount(tmp_path)


def test_a_folder_without_permissions(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        deepnvme.save({}, tmp_path)
    if os.geteuid() == 0:
        return
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        deepnvme.save({}, tmp_path / "x.pt")


def test_permissions_are_those_of_the_old_file_or_of_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    before = os.umask(0o027)
    try:
        deepnvme.save({}, path)
        assert path.stat().st_mode & 0o777 == 0o640
        path.chmod(0o604)
        deepnvme.save({}, path)
        assert path.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


def test_a_reader_keeps_the_file_that_it_has_open(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    deepnvme.save({"a": torch.ones(1000)}, path)
    lazy = deepnvme.load(path, lazy=True)
    deepnvme.save({"a": torch.zeros(1000)}, path)
    assert lazy["a"].sum() == 1000


@pytest.mark.parametrize("into", [False, True], ids=["new memory", "into"])
def test_a_load_that_is_repeated_frees_the_first(tmp_path: Path, into: bool) -> None:
    code = (
        PROCESS_MEMORY
        + """
import sys, torch, zipfile, deepnvme
from deepnvme._checkpoint.load_request import LoadRequest
path, into = sys.argv[1], sys.argv[2] == "True"
# With bytes after each record, which belong to none.
with zipfile.ZipFile(path, "w") as archive:
    source = zipfile.ZipFile(sys.argv[3])
    for each in source.infolist():
        if not each.filename.endswith(".storage_alignment"):
            archive.writestr(each.filename, source.read(each))
            archive.fp.write(bytes(100))
            archive.start_dir = archive.fp.tell()
opened = []
LoadRequest.open, open_ = lambda self, *a, **k: opened.append(k) or open_(self, *a, **k), LoadRequest.open
# Transposed targets are filled by a copy from a temporary buffer.
state = {f"l{i}": torch.ones(4 << 20, dtype=torch.uint8).view(1 << 11, 1 << 11).T for i in range(40)} if into else None
before = restart_peak()
loaded = deepnvme.load(path, into=state)
print(memory_bytes("VmHWM") - before)
assert len(opened) == 2, opened
assert all(loaded[f"l{i}"].eq(i).all() for i in range(40))
"""
    )
    original = tmp_path / "original.pt"
    torch.save({f"l{i}": torch.full((1 << 11, 1 << 11), i, dtype=torch.uint8) for i in range(40)}, original)
    command: list[str | Path] = [sys.executable, "-c", code, tmp_path / "copy.pt", str(into), original]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    bound = 100 << 20 if into else (160 + 60) << 20
    assert int(result.stdout) < bound, "160 MiB are loaded twice, with the memory of once"


def test_memory_stays_within_the_pools_bound(tmp_path: Path) -> None:
    code = (
        PROCESS_MEMORY
        + """
import sys, torch, deepnvme
path = sys.argv[1]
state = {f"l{i}": torch.ones(8 << 20, dtype=torch.uint8) for i in range(50)}
views = [torch.ones(1 << 10, 1 << 10, dtype=torch.complex64) for _ in range(20)]
state.update({f"conj {i}": view.conj() for i, view in enumerate(views[:5])})
state.update({f"neg {i}": torch._neg_view(view) for i, view in enumerate(views[5:10])})
state.update({f"columns {i}": view.mT for i, view in enumerate(views[10:15])})
state.update({f"part {i}": view.mT.conj().imag for i, view in enumerate(views[15:])})
deepnvme.save({"a": torch.ones(3)}, path)
before = restart_peak()
deepnvme.save(state, path)
print(memory_bytes("VmHWM") - before)
del state
"""
    )
    for name in ("x.safetensors", "x.pt"):
        command = [sys.executable, "-c", code, str(tmp_path / name)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(result.stdout) < 80 << 20, f"{name}: 560 MiB are saved with the memory of the slots"
    code = (
        PROCESS_MEMORY
        + """
import sys, torch, deepnvme
deepnvme.load(sys.argv[1], only="l0")
before = restart_peak()
state = deepnvme.load(sys.argv[1], verify="full")
print(memory_bytes("VmHWM") - before)
"""
    )
    result = subprocess.run([sys.executable, "-c", code, tmp_path / "x.pt"], capture_output=True, text=True, check=True)
    assert int(result.stdout) < (560 + 40) << 20, "560 MiB are loaded into 560 MiB"
