"""A disk that is really full: a small file system of the test's own, which takes root; skipped visibly otherwise."""

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme.integrations.dcp import DeepnvmeWriter

RandomBytes = Callable[[int], bytes]

DISK_MIB = 32
MORE_THAN_FITS = 48 << 20


@pytest.fixture(params=["ext4", "tmpfs"])
def small_disk(request: pytest.FixtureRequest, file_systems: Any) -> Path:
    folder: Path = file_systems.mount(request.param, DISK_MIB)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lost+found")


def test_a_failed_write_names_needed_and_free_bytes(small_disk: Path, random_bytes: RandomBytes) -> None:
    path = small_disk / "file"
    with pytest.raises(deepnvme.Error) as caught:
        deepnvme.write(random_bytes(MORE_THAN_FITS), path)
    check_text(caught.value, path, MORE_THAN_FITS)
    # The engine goes on, and so does the disk once there is room.
    small = random_bytes(100_000)
    assert deepnvme.write(small, path) == len(small)
    assert path.read_bytes() == small


def check_text(error: BaseException, path: Path, needed: int) -> None:
    """A full disk names the file, the bytes that are needed and free, and a remedy."""
    assert isinstance(error, deepnvme.Error)
    assert (error.errno, error.filename) == (errno.ENOSPC, str(path))
    found = re.search(r"(\d+) bytes are needed(, of which (\d+) are written)?, and (\d+) are free; ", str(error))
    assert found, error
    assert needed <= int(found[1]) <= needed + (1 << 20)
    assert int(found[4]) <= DISK_MIB << 20
    assert str(error).partition(": '")[0].endswith("the disk is full; free some space or choose another folder")


@pytest.mark.parametrize("kind", ["write", "save", "Checkpointer", "Swapper"])
def test_a_disk_that_holds_no_more_files_says_so(small_disk: Path, random_bytes: RandomBytes, kind: str) -> None:
    subprocess.run(["mount", "-o", "remount,nr_inodes=100", small_disk], capture_output=True, check=False)
    made = 0
    while os.statvfs(small_disk).f_ffree:
        (small_disk / f"small-{made}").touch()
        made += 1
    path = small_disk / "file"
    calls: dict[str, Callable[[], object]] = {
        "write": lambda: deepnvme.write(random_bytes(100), path),
        "save": lambda: deepnvme.save({"a": np.ones(3)}, path),
        "Checkpointer": lambda: deepnvme.Checkpointer(path).save(1, {"a": 1}),
        "Swapper": lambda: deepnvme.Swapper(small_disk, memory="1MB"),
    }
    with pytest.raises(deepnvme.Error, match=r"can hold no more files \(`df -i`\)") as caught:
        calls[kind]()
    assert caught.value.errno == errno.ENOSPC
    assert "bytes" not in str(caught.value)
    assert len(names(small_disk)) == made


@pytest.mark.parametrize("kind", ["write", "batch", "stripes"])
def test_a_write_that_does_not_fit_leaves_bytes_of_another(
    small_disk: Path, random_bytes: RandomBytes, kind: str
) -> None:
    # Both open the same new name. The failure of one must not remove the name from under the other.
    paths = [small_disk / "a", small_disk / "b"]
    target: Any = deepnvme.StripeSet(paths) if kind == "stripes" else paths[0]
    large, small = random_bytes(MORE_THAN_FITS), random_bytes(1000)

    def write(data: bytes) -> None:
        deepnvme.write_batch([(target, None, data)]) if kind == "batch" else deepnvme.write(data, target)

    for _ in range(60):
        begin = threading.Barrier(2)

        def fail(begin: threading.Barrier = begin) -> None:
            begin.wait()
            with contextlib.suppress(deepnvme.Error):
                write(large)

        failing = threading.Thread(target=fail)
        failing.start()
        begin.wait()
        with contextlib.suppress(deepnvme.Error):
            write(small)
        failing.join()
        there = names(small_disk)
        assert there == (["a", "a.stripes.json", "b"] if kind == "stripes" else ["a"])
        for name in there:
            (small_disk / name).unlink()


def test_a_cancelled_write_leaves_bytes_of_another(tmp_path: Path, random_bytes: RandomBytes) -> None:
    path, newer = tmp_path / "file", random_bytes(1 << 20)
    with deepnvme.Engine(workers=1, queue_depth=1) as engine:
        for _ in range(5):
            # They keep the queue busy, so that the cancelled one does not begin.
            before = [engine.start_write(random_bytes(8 << 20), tmp_path / f"big{index}") for index in range(2)]
            cancelled = engine.start_write(random_bytes(1 << 20), path)
            written = engine.start_write(newer, path)
            cancelled.cancel()
            with contextlib.suppress(deepnvme.Error):
                cancelled.result()
            assert written.result() == len(newer)
            assert path.read_bytes() == newer
            for transfer in before:
                transfer.result()
            path.unlink()


def test_a_swap_file_takes_all_the_space_of_xfs(file_systems: Any, random_bytes: RandomBytes) -> None:
    """XFS refuses to allocate a range again if it is longer than the free space, even if the file has its blocks."""
    torch = pytest.importorskip("torch")
    folder: Path = file_systems.mount("xfs", 320)
    ballast = folder / "ballast"
    with ballast.open("wb") as file:
        space = os.statvfs(folder)
        os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - (48 << 20))
    stored = {}
    with deepnvme.Swapper(folder, memory="4MB") as swapper:
        with pytest.raises(deepnvme.Error) as caught:
            for number in range(64):
                tensor = torch.frombuffer(bytearray(random_bytes(1 << 20)), dtype=torch.uint8)
                swapper.put(str(number), tensor)
                stored[str(number)] = tensor
        assert caught.value.errno == errno.ENOSPC
        assert len(stored) > 36
        for key, tensor in stored.items():
            with swapper.borrow(key, shared=True) as found:
                assert torch.equal(found, tensor)


def test_other_calls_name_the_sizes(small_disk: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {"a": torch.randn(MORE_THAN_FITS // 4)}
    with pytest.raises(deepnvme.Error) as caught:
        deepnvme.save(state, small_disk / "model.safetensors")
    check_text(caught.value, small_disk / "model.safetensors", MORE_THAN_FITS)
    with deepnvme.Swapper(small_disk, memory="4MB") as swapper, pytest.raises(deepnvme.Error) as caught:
        for number in range(64):
            swapper.put(str(number), torch.randn(1 << 18))
    found = re.search(
        r"(\d+) bytes are needed, and (\d+) are free; the disk is full; free some space", str(caught.value)
    )
    assert found, caught.value
    assert int(found[1]) <= (1 << 20) + 4096
    (tmp_path / "model").mkdir()
    deepnvme.save(state, tmp_path / "model" / "model.safetensors")
    for command, target in (("convert", "model.pt"), ("pack", "packed")):
        call = [sys.executable, "-m", "deepnvme", command, str(tmp_path / "model"), str(small_disk / target)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done
        last = done.stderr.splitlines()[-1]
        assert f" {small_disk / target}" in last
        assert " are free; the disk is full; free some space or choose another folder" in last
    assert names(small_disk) == []


def test_a_write_in_place_leaves_its_neighbours_alone(small_disk: Path, random_bytes: RandomBytes) -> None:
    path, before = small_disk / "file", random_bytes(1_000_001)
    path.write_bytes(before)
    with pytest.raises(deepnvme.Error) as caught:
        deepnvme.write(random_bytes(MORE_THAN_FITS), path, offset=len(before))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))
    assert path.read_bytes()[: len(before)] == before


@pytest.mark.parametrize("had_one", [True, False])
def test_a_file_that_does_not_fit_is_never_seen(small_disk: Path, random_bytes: RandomBytes, had_one: bool) -> None:
    path, before = small_disk / "file", random_bytes(12_345)
    if had_one:
        path.write_bytes(before)
    with pytest.raises(deepnvme.Error) as caught, deepnvme.open(path, "wb") as file:
        for _ in range(MORE_THAN_FITS >> 20):
            file.write(random_bytes(1 << 20))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(path)
    assert names(small_disk) == (["file"] if had_one else [])
    assert not had_one or path.read_bytes() == before


def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(small_disk: Path) -> None:
    torch = pytest.importorskip("torch")
    path = small_disk / "model.pt"
    good, large = torch.randn(1000), torch.randn(MORE_THAN_FITS // 4)
    with deepnvme.open(path, "wb") as file:
        torch.save(good, file)
    with pytest.raises((deepnvme.Error, RuntimeError)), deepnvme.open(path, "wb") as file:
        torch.save(large, file)
    assert names(small_disk) == ["model.pt"]
    with deepnvme.open(path) as file:
        assert torch.equal(torch.load(file), good)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "shards", "stripes", "dcp", "history"])
def test_a_save_that_does_not_fit_names_the_file_that_it_was_for(small_disk: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    state = {str(number): torch.randn(MORE_THAN_FITS // 16) for number in range(4)}
    with pytest.raises(deepnvme.Error) as caught:
        if kind == "dcp":
            try:
                torch.distributed.checkpoint.save(state, storage_writer=DeepnvmeWriter(small_disk / "dcp"))
            except torch.distributed.checkpoint.CheckpointException as error:
                raise error.failures[0][0] from error
        elif kind == "history":
            with deepnvme.Checkpointer(small_disk / "history") as checkpointer:
                checkpointer.save(1, state)
        elif kind == "shards":
            deepnvme.save(state, small_disk / "model.safetensors", max_shard_bytes="20MiB")
        elif kind == "stripes":
            deepnvme.save(state, deepnvme.StripeSet([small_disk / "one", small_disk / "two"]))
        else:
            deepnvme.save(state, small_disk / f"model.{kind}")
    assert caught.value.errno == errno.ENOSPC
    assert "deepnvme-tmp" not in str(caught.value)
    assert str(caught.value.filename).startswith(f"{small_disk}/")
    # The private files of dcp go with the writer, which torch's exception keeps.
    expected = "deepnvme-tmp" if kind == "dcp" else ".deepnvme-lock"
    assert [path for path in small_disk.rglob("*") if path.is_file() and expected not in path.name] == []


def test_a_batch_that_does_not_fit(small_disk: Path, random_bytes: RandomBytes) -> None:
    arrays = [np.frombuffer(random_bytes(1 << 20), np.uint8) for _ in range(MORE_THAN_FITS >> 20)]
    items = [(small_disk / "file", index << 20, array) for index, array in enumerate(arrays)]
    with pytest.raises(deepnvme.Error) as caught:
        deepnvme.write_batch(items)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(small_disk / "file")


def test_a_benchmark_needs_room(small_disk: Path) -> None:
    with pytest.raises(deepnvme.Error, match=r"48 MiB are needed, and .* are free; make --size smaller"):
        deepnvme.bench("write", small_disk, size=MORE_THAN_FITS)
    with pytest.raises(deepnvme.Error, match="are needed"):
        deepnvme.tune(small_disk, size=MORE_THAN_FITS, output=small_disk / "deepnvme.toml")
    # Each of two processes finds room for itself; together they fill the disk in the middle of their work.
    with pytest.raises(deepnvme.Error, match=r"(?i)no space|are needed|are free"):
        deepnvme.bench("write", small_disk, size="20M", processes=2, loops=1)
    assert names(small_disk) == []


def test_activations_stay_in_memory(small_disk: Path) -> None:
    """The backward pass of the tensors that were moved before is right, and so is the next step."""
    layers = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(24)])
    batch = torch.randn(2048, 512)
    layers(batch).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
    with deepnvme.offload_activations(small_disk, memory="8MB") as activations:
        for _ in range(2):
            layers.zero_grad()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                layers(batch).square().mean().backward()
            found = [parameter.grad for parameter in layers.parameters()]
            for one, other in zip(found, expected, strict=True):
                assert one is not None
                assert torch.equal(one, other)
            if told:
                assert "stay in memory, since they cannot be moved to disk" in str(told[0].message)
        assert 0 < activations.stats().tensors < 2 * 24


def test_a_model_that_does_not_fit_is_as_before(small_disk: Path) -> None:
    """The disk has room for neither the parameters nor the state: the model stays in memory, and can be trained."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(deepnvme.Error, match=r"(?i)no space|are needed|are free"):
        deepnvme.offload(model, torch.optim.AdamW, memory="16MB", swap_dir=small_disk)
    assert all(map(torch.equal, model.parameters(), before))
    assert names(small_disk) == []
    model(torch.randn(4, 1024)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_model_that_cannot_be_spilled_is_as_before(small_disk: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(deepnvme.Error, match=r"are needed.* are free.*nothing was spilled") as caught:
        deepnvme.spill(model, swap_dir=small_disk)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(small_disk))
    assert all(map(torch.equal, model.parameters(), before))
    assert names(small_disk) == []
    assert shutil.disk_usage(small_disk).used < 1 << 20
    part = model[:2]
    deepnvme.spill(part, swap_dir=small_disk).restore()
    assert all(map(torch.equal, model.parameters(), before))


def test_a_disk_that_is_full_in_a_step(small_disk: Path) -> None:
    """The parameters fit, gradients and state do not. The weights are those before the step."""
    free = shutil.disk_usage(small_disk).free
    # Two fifths of the disk for parameters, as much for gradients, and twice as much for state.
    layers = max(1, free * 2 // 5 // (512 * 513 * 4))
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(layers)])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    _, optimizer = deepnvme.offload(model, torch.optim.AdamW, memory="4MB", swap_dir=small_disk)
    with pytest.raises(deepnvme.Error, match=r"(?i)no space|are needed|are free"):
        model(torch.randn(4, 512)).square().mean().backward()
        optimizer.step()
    had_begun = optimizer.has_unfinished_step
    optimizer.close()
    assert names(small_disk) == []
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.isfinite(parameter).all()
        assert had_begun or torch.equal(parameter, old)
