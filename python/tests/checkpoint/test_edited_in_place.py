"""A checkpoint's file that somebody has written to in place stays when the checkpoint is retired."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

import deepnvme
from ranks import run

# File systems may record times in steps of a timer tick.
TICK_S = 0.05


def edit(path: Path) -> bytes:
    """Change one byte of the data. The size, the first bytes and the index stay."""
    time.sleep(TICK_S)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 255]))
    return path.read_bytes()


@pytest.mark.parametrize("format_", ["pt", "safetensors"])
def test_a_file(tmp_path: Path, format_: Literal["pt", "safetensors"]) -> None:
    with deepnvme.Checkpointer(tmp_path, keep=1, format=format_) as checkpointer:
        checkpointer.save(1, {"w": torch.rand(300_000)})
        first = checkpointer.checkpoints[0].path
        content = edit(first)
        with pytest.warns(UserWarning, match=rf"{first.name}: this is not the file that was saved.*is kept"):
            checkpointer.save(2, {"w": torch.rand(300_000)})
        assert first.read_bytes() == content
        second = checkpointer.checkpoints[0].path
        checkpointer.save(3, {"w": torch.rand(300_000)})
        assert not second.exists(), "nobody has written to it"


def test_a_file_with_an_older_time(tmp_path: Path) -> None:
    # A power cut may bring back an older time.
    with deepnvme.Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"w": torch.rand(9)})
        first = checkpointer.checkpoints[0].path
        os.utime(first, (1, 1))
        checkpointer.save(2, {"w": torch.rand(9)})
        assert not first.exists()


SAVES = """
import warnings
from pathlib import Path
from typing import Literal
warnings.simplefilter("ignore")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, Shard
def state_of(seed):
    if layout != "sharded":
        return state(seed)
    torch.manual_seed(seed)
    return {"w": distribute_tensor(torch.rand(400_000), init_device_mesh("cpu", (world,)), [Shard(0)])}
options = {} if layout == "sharded" else {"layout": layout}
with Checkpointer(folder, keep=1, **options) as checkpointer:
    checkpointer.save(1, state_of(1))
    path = checkpointer.checkpoints[0].path
    found = (path if path.is_dir() else folder).iterdir()
    files = sorted(file for file in found if file.stat().st_size > 9999)
    dist.barrier()
    if rank == 0:
        time.sleep(0.05)
        with files[0].open("r+b") as file:
            file.seek(files[0].stat().st_size // 2)
            file.write(b"edited")
    dist.barrier()
    checkpointer.save(2, state_of(2))
    second = checkpointer.checkpoints[0].path
    checkpointer.save(3, state_of(3))
    dist.barrier()
    answer = [len(files), [file.exists() for file in files], second.exists()]
"""


@pytest.mark.parametrize(("layout", "files"), [("file", 1), ("parts", 2), ("sharded", 2)])
def test_files_of_several_processes(tmp_path: Path, layout: str, files: int) -> None:
    answers = run(SAVES, 2, tmp_path / "c", layout=layout)
    # Only the edited file stays.
    assert answers == [[files, [True] + [False] * (files - 1), False]] * 2


@pytest.mark.parametrize("next_bytes", [None, 100_000])
@pytest.mark.parametrize("way", ["edited", "replaced"])
def test_a_shard(tmp_path: Path, way: str, next_bytes: int | None) -> None:
    # The next save is of one file, or of several again.
    state = {name: torch.rand(20_000) for name in "abcd"}
    deepnvme.save(state, tmp_path / "m.safetensors", max_shard_bytes=100_000)
    first, *others = sorted(tmp_path.glob("m-*.safetensors"))
    if way == "edited":
        content = edit(first)
    else:
        content = b"mine"
        (tmp_path / "mine").write_bytes(content)
        (tmp_path / "mine").rename(first)
    with pytest.warns(UserWarning, match=rf"were changed; they are kept: .*{first.name}"):
        deepnvme.save(state, tmp_path / "m.safetensors", max_shard_bytes=next_bytes)
    assert first.read_bytes() == content
    assert not any(other.exists() for other in others)
