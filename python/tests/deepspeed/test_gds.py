"""`gds_handle` without a GPU: common methods, refusals, and things it must not change."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from deepnvme.deepspeed import GDSBuilder, aio_handle, gds_handle

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def handle() -> gds_handle:
    return gds_handle(1 << 20, 8, False, True, 2)


def test_the_constructor_and_the_methods_are_those_of_aio_handle(configured: Callable[[Any], Any]) -> None:
    assert inspect.signature(gds_handle) == inspect.signature(aio_handle)
    module: Any = GDSBuilder().load()
    handle = configured(module.gds_handle)
    assert handle.get_alignment() == 512
    with pytest.raises(ValueError, match="queue_depth is 0"):
        gds_handle(queue_depth=0)
    for make in (copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="gds_handle: a handle is neither copied nor pickled"):
            make(handle)


def test_names_of_the_arguments() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert names(gds_handle.new_pinned_device_tensor) == ["num_elem", "example_tenosr"]
    for function in (
        gds_handle.free_pinned_device_tensor,
        gds_handle.pin_device_tensor,
        gds_handle.unpin_device_tensor,
    ):
        assert names(function) == ["tensor"]


def test_cpu_tensors(handle: gds_handle, random_bytes: Callable[[int], torch.Tensor], tmp_path: Path) -> None:
    path = tmp_path / "file"
    source = random_bytes(1_000_003)
    assert handle.sync_pwrite(source, path) == 1
    locked = handle.new_cpu_locked_tensor(source.numel(), source)
    assert handle.is_pinned(locked)
    assert handle.async_pread(locked, path) == 0
    strided = torch.zeros(2, 500_001, dtype=torch.uint8).T
    assert handle.async_pread(strided, path, 1) == 0
    assert handle.wait() == 2
    assert torch.equal(locked, source)
    assert torch.equal(strided.reshape(-1), source[1:])
    assert handle.write(locked[7:], path, True, 100) == 0
    assert handle.free_cpu_locked_tensor(locked) is True
    with pytest.raises(FileNotFoundError):
        handle.read(source, tmp_path / "nothing", False)


def test_cpu_tensors_are_not_for_the_record(handle: gds_handle) -> None:
    tensor = torch.zeros(10)
    with pytest.raises(ValueError, match=r"on cpu, not on a GPU.*new_cpu_locked_tensor"):
        handle.new_pinned_device_tensor(10, tensor)
    for call in (handle.pin_device_tensor, handle.unpin_device_tensor, handle.free_pinned_device_tensor):
        with pytest.raises(ValueError, match=r"on cpu, not on a GPU.*new_cpu_locked_tensor"):
            call(tensor)
        with pytest.raises(ValueError, match="tensor is empty"):
            call(tensor[:0])
        with pytest.raises(TypeError, match="tensor is a bytes"):
            call(b"bytes")  # type: ignore[arg-type]
    assert tensor.numel() == 10


def test_wrong_arguments_of_new(handle: gds_handle) -> None:
    example = torch.empty(0)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"num_elem is {count}"):
            handle.new_pinned_device_tensor(count, example)
    with pytest.raises(TypeError, match="num_elem"):
        handle.new_pinned_device_tensor(10.0, example)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="example tensor"):
        handle.new_pinned_device_tensor(10, torch.float32)  # type: ignore[arg-type]


def test_a_dropped_handle_completes_its_operations(random_bytes: Callable[[int], torch.Tensor], tmp_path: Path) -> None:
    source = random_bytes(8 << 20)
    handle = gds_handle()
    handle.async_pwrite(source, tmp_path / "file")
    del handle
    gc.collect()
    assert (tmp_path / "file").read_bytes() == source.numpy().tobytes()


LEAVES_NO_TRACE = """
    import os, torch
    before = dict(os.environ)
    from deepnvme.deepspeed import gds_handle
    handle = gds_handle()
    handle.sync_pwrite(torch.zeros(1000), "file")
    assert os.environ == before
    assert os.listdir() == ["file"], os.listdir()
"""


def test_no_file_is_written_and_no_variable_changed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVES_NO_TRACE)],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("is_there", "hip", "answer"), [(True, None, True), (False, None, False), (True, "6.0", False)]
)
def test_compatible_where_torch_reaches_an_nvidia_gpu(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, hip: str | None, answer: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert GDSBuilder().is_compatible() is answer
    assert GDSBuilder().is_compatible(verbose=True) is answer


def test_without_torch_it_is_not_compatible() -> None:
    program = """
        import sys
        sys.modules["torch"] = None
        from importlib import util
        find = util.find_spec
        util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
        from deepnvme.deepspeed import AsyncIOBuilder, GDSBuilder
        assert GDSBuilder().is_compatible() is False
        assert AsyncIOBuilder().is_compatible() is True
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=120, check=True)
