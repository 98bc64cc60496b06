"""Locked tensors are allocated, recognised and freed, and neither leak nor dangle."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from deepnvme.deepspeed import aio_handle, pin_handle
from deepnvme.deepspeed._pinned_tensors import PinnedRegions, regions
from process_memory import memory_bytes

InThreads = Callable[[Callable[[int], object], int], None]

MIB = 1 << 20
PAGE_BYTES = 4096


@pytest.fixture(params=[aio_handle, pin_handle])
def handle(request: pytest.FixtureRequest) -> Any:
    return request.param()


def test_names_of_the_arguments() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert names(aio_handle.new_cpu_locked_tensor) == ["num_elem", "example_tenosr"]
    assert names(aio_handle.free_cpu_locked_tensor) == ["tensor"]
    assert names(aio_handle.is_pinned) == ["buffer"]
    assert names(pin_handle.new_cpu_locked_tensor) == ["num_elem", "example_tensor"]
    assert names(pin_handle.free_cpu_locked_tensor) == ["locked_tensor"]
    assert names(pin_handle.free_cpu_locked_tensor_by_ptr) == ["address"]
    assert names(pin_handle.is_pinned) == ["buffer"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
def test_shape_dtype_and_place(handle: Any, dtype: torch.dtype) -> None:
    tensor = handle.new_cpu_locked_tensor(12_345, torch.empty((3, 4), dtype=dtype))
    assert tensor.shape == (12_345,)
    assert tensor.dtype == dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % PAGE_BYTES == 0
    tensor.fill_(1)
    assert bool((tensor == 1).all())
    # DeepSpeed's own bookkeeping lasts as long as the base of the views.
    assert tensor._base is None
    assert tensor[5:]._base is tensor


def test_locked_memory_is_locked_and_comes_back(handle: Any) -> None:
    before = memory_bytes("VmLck")
    tensor = handle.new_cpu_locked_tensor(4 * MIB, torch.empty(0, dtype=torch.uint8))
    during = memory_bytes("VmLck")
    if during == before:
        pytest.skip("RLIMIT_MEMLOCK allows no 4 MiB")
    assert during >= before + 4 * MIB
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert memory_bytes("VmLck") < during


def test_is_pinned_knows_views_and_only_them(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(10_000, torch.empty(0))
    neighbour = handle.new_cpu_locked_tensor(10_000, torch.empty(0))
    assert handle.is_pinned(tensor)
    for view in (tensor[5:17], tensor.narrow(0, 9999, 1), tensor.view(100, 100).t(), tensor.view(torch.uint8)):
        assert handle.is_pinned(view)
    assert aio_handle().is_pinned(buffer=tensor.detach()[::7])
    assert not handle.is_pinned(torch.zeros(10_000))
    assert not handle.is_pinned(tensor[:0])
    assert not handle.is_pinned(tensor.clone())
    assert not handle.is_pinned(torch.empty(10, device="meta"))
    assert handle.is_pinned(neighbour)


def test_free_empties_a_locked_tensor_and_no_other(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    plain = torch.zeros(1000)
    assert handle.free_cpu_locked_tensor(plain) is False
    assert plain.numel() == 1000
    assert handle.free_cpu_locked_tensor(tensor[1:]) is False
    assert handle.is_pinned(tensor)
    assert handle.free_cpu_locked_tensor(tensor) is True
    assert tensor.numel() == 0
    assert handle.free_cpu_locked_tensor(tensor) is False


def test_a_handle_frees_tensors_of_another_handle() -> None:
    maker, other = aio_handle(), aio_handle()
    tensor = maker.new_cpu_locked_tensor(num_elem=1000, example_tenosr=torch.empty(0))
    del maker
    assert other.is_pinned(tensor)
    assert pin_handle().free_cpu_locked_tensor(tensor) is True
    assert not other.is_pinned(tensor)


def test_views_survive_the_free(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0, dtype=torch.int32))
    tensor.copy_(torch.arange(1000))
    view = tensor[500:]
    assert handle.free_cpu_locked_tensor(tensor) is True
    gc.collect()
    assert view.tolist() == list(range(500, 1000))
    assert not handle.is_pinned(view)


def test_free_by_address(handle: Any) -> None:
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    freer = pin_handle()
    assert freer.free_cpu_locked_tensor_by_ptr(tensor.data_ptr() + 4) is False
    assert freer.free_cpu_locked_tensor_by_ptr(tensor.data_ptr()) is True
    assert freer.free_cpu_locked_tensor_by_ptr(tensor.data_ptr()) is False
    assert not handle.is_pinned(tensor)
    assert float(tensor.fill_(3).sum()) == 3000


def test_dropped_tensors_are_freed(handle: Any) -> None:
    size = 16 * MIB
    tensors = [handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).zero_()]
    view = tensors[0][100:]
    before = memory_bytes("VmRSS")
    for _ in range(40):
        tensors.append(handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8)).zero_())
        tensors.pop(0)
    assert memory_bytes("VmRSS") < before + 4 * size
    address = tensors[0].data_ptr()
    assert regions.contain(address, size)
    tensors.clear()
    gc.collect()
    assert not regions.contain(address, 1)
    assert handle.is_pinned(view)


def test_free_while_an_operation_is_pending(tmp_path: Path) -> None:
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(16 * MIB, torch.empty(0, dtype=torch.uint8))
    tensor.random_(256)
    expected = tensor.numpy().tobytes()
    handle.async_pwrite(tensor, str(tmp_path / "file"))
    assert handle.free_cpu_locked_tensor(tensor) is True
    others = [handle.new_cpu_locked_tensor(16 * MIB, tensor).zero_() for _ in range(3)]
    assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == expected
    assert len(others) == 3


MORE_THAN_MAY_BE_LOCKED = """
    import os, resource, sys
    import torch
    from deepnvme.deepspeed import aio_handle
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
    descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    handle = aio_handle()
    tensor = handle.new_cpu_locked_tensor(16 << 20, torch.empty(0, dtype=torch.uint8))
    tensor.random_(256)
    assert handle.is_pinned(tensor[1:])
    assert handle.async_pwrite(tensor, descriptor) == 0
    assert handle.async_pwrite(tensor.clone()[1:], descriptor, 16 << 20) == 0
    assert handle.wait() == 2
    content = tensor.numpy().tobytes()
    assert os.pread(descriptor, 64 << 20, 0) == content + content[1:]
    print("written")
"""


def test_more_than_may_be_locked(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MORE_THAN_MAY_BE_LOCKED), str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "written\n"), done.stderr


def test_bad_arguments(handle: Any) -> None:
    example = torch.empty(0)
    with pytest.raises(ValueError, match="num_elem is -1"):
        handle.new_cpu_locked_tensor(-1, example)
    with pytest.raises(TypeError, match="num_elem"):
        handle.new_cpu_locked_tensor(10.0, example)
    with pytest.raises(TypeError, match="example"):
        handle.new_cpu_locked_tensor(10, torch.float32)
    with pytest.raises(TypeError, match="buffer"):
        handle.is_pinned(b"bytes")
    with pytest.raises(TypeError, match="tensor"):
        handle.free_cpu_locked_tensor(None)
    assert handle.new_cpu_locked_tensor(0, example).shape == (0,)


def test_the_record_from_many_threads(in_threads: InThreads) -> None:
    record = PinnedRegions()

    def work(_: int) -> None:
        for count in range(1, 200):
            tensor = torch.zeros(count * 100)
            record.add(tensor)
            assert record.contain(tensor.data_ptr(), tensor.nbytes)
            assert not record.contain(tensor.data_ptr(), tensor.nbytes + 1)
            if count % 3 == 0:
                assert record.remove(tensor.data_ptr())

    in_threads(work, 4)
    gc.collect()
    assert record.is_empty()
