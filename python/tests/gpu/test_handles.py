"""`aio_handle` and `gds_handle` with tensors on GPUs, and the record of pinned tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from deepnvme.deepspeed import _operations, _pinned_tensors, aio_handle, gds_handle

from .test_transfer import bits, values


@pytest.fixture(params=[aio_handle, gds_handle])
def handle(request: pytest.FixtureRequest, gpu: Any) -> Iterator[Any]:
    # Small, so that tests cross its blocks and its pool. The engine is closed before the GPU.
    handle = request.param(16384, 8, False, True, 2)
    yield handle
    del handle
    gc.collect()
    _operations.pool.clear()


@pytest.fixture
def gds(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[gds_handle]:
    """A handle that can also allocate tensors. Nothing remains in the record."""

    def allocate(count: int, example: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = gpu.tensor(torch.zeros(count, dtype=example.dtype), example.device.index)
        return tensor

    if not gpu.is_real:
        monkeypatch.setattr(_pinned_tensors, "allocate_on_gpu", allocate)
    yield gds_handle()
    gc.collect()
    _operations.pool.clear()
    assert len(_pinned_tensors.pinned_on_gpu) == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_at_once(gpu: Any, handle: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "file"
    for number, shape in enumerate([(), (1,), (511,), (4096,), (37, 1001)]):
        host = values(shape, dtype, number)
        offset = number * 1_000_003
        assert handle.sync_pwrite(gpu.tensor(host, number % 2), path, offset) == 1
        assert path.read_bytes()[offset : offset + host.nbytes] == bits(host)
        target = gpu.tensor(values(shape, dtype, 99), 1 - number % 2)
        assert handle.sync_pread(target, path, offset) == 1
        assert bits(gpu.to_host(target)) == bits(host)
        assert handle.write(target, path, False) == 0
        assert handle.read(target, path, False) == 0


def test_in_the_background(gpu: Any, handle: Any, tmp_path: Path) -> None:
    hosts = [values((100_000 * number + 1,), torch.uint8, number) for number in range(6)]
    sources = [gpu.tensor(host, number % 2) if number % 3 else host for number, host in enumerate(hosts)]
    for number, source in enumerate(sources):
        assert handle.async_pwrite(source, tmp_path / str(number)) == 0
    with (tmp_path / "by descriptor").open("wb") as file:
        assert handle.async_pwrite(sources[1], file.fileno()) == 0
        assert handle.wait() == 7
    assert (tmp_path / "by descriptor").read_bytes() == bits(hosts[1])
    targets = [gpu.tensor(torch.zeros_like(host)) for host in hosts]
    for number, target in enumerate(targets):
        assert handle.pread(target, tmp_path / str(number), False, True) == 0
    assert handle.wait() == 6
    for host, target in zip(hosts, targets, strict=True):
        assert bits(gpu.to_host(target)) == bits(host)


def test_strided_ones(gpu: Any, handle: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    host = values((120, 130), torch.float32)
    on_gpu = gpu.tensor(host)
    cuts: list[Callable[[Any], Any]] = [lambda t: t.T, lambda t: t[3:90, 5:7], lambda t: t[::3, ::2]]
    for number, cut in enumerate(cuts):
        assert handle.sync_pwrite(cut(on_gpu), path) == 1
        assert path.read_bytes()[: cut(host).nbytes] == bits(cut(host))
        fresh = values(tuple(cut(host).shape), torch.float32, 50 + number)
        handle.async_pwrite(fresh, path)
        # The same bytes of the same file, so after the write.
        handle.async_pread(cut(on_gpu), path)
        assert handle.wait() == 2
        cut(host).copy_(fresh)
        assert bits(gpu.to_host(on_gpu)) == bits(host), "also between the elements"


def test_a_write_waits_for_a_kernel_that_writes_the_tensor(gpu: Any, handle: Any, tmp_path: Path) -> None:
    new = values((300_000,), torch.uint8, 2)
    tensor, source = gpu.tensor(values((300_000,), torch.uint8, 1)), gpu.tensor(new)
    gpu.late(tensor, source, 60)
    handle.async_pwrite(tensor, tmp_path / "file")
    assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == bits(new)


def test_a_leaf_that_requires_grad(gpu: Any, handle: Any, tmp_path: Path) -> None:
    host = values((1000,), torch.float32)
    tensor = gpu.tensor(torch.zeros(1000)).requires_grad_()
    handle.sync_pwrite(host, tmp_path / "file")
    handle.async_pread(tensor, tmp_path / "file")
    handle.wait()
    assert bits(gpu.to_host(tensor.detach())) == bits(host)


def test_errors(gpu: Any, handle: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    tensor = gpu.tensor(values((20_000,), torch.uint8))
    with pytest.raises(FileNotFoundError):
        handle.async_pread(tensor, tmp_path / "nothing")
    handle.async_pread(tensor, path)
    handle.async_pread(tensor[:10_000], path)
    with pytest.raises(EOFError, match="10000"):
        handle.wait()
    assert handle.wait() == 0
    assert handle.sync_pwrite(tensor, path) == 1
    with pytest.raises(ValueError, match="file_offset"):
        handle.sync_pread(tensor, path, -1)


def test_a_handle_dropped_with_operations_pending(gpu: Any, tmp_path: Path) -> None:
    host = values((5 << 20,), torch.uint8)
    for make in (aio_handle, gds_handle):
        path = tmp_path / make.__name__
        handle, tensor = make(), gpu.tensor(host)
        target = gpu.tensor(torch.zeros_like(host))
        handle.async_pwrite(tensor, path)
        handle.async_pread(target, path)
        del tensor, handle
        gc.collect()
        assert path.read_bytes() == bits(host)
        assert bits(gpu.to_host(target)) == bits(host)
        del target
    _operations.pool.clear()


def test_made_filled_and_freed(gpu: Any, gds: gds_handle, tmp_path: Path) -> None:
    example = gpu.tensor(torch.zeros((3, 4), dtype=torch.bfloat16), 1)
    tensor = gds.new_pinned_device_tensor(12_345, example)
    assert tensor.shape == (12_345,)
    assert tensor.dtype == torch.bfloat16
    assert tensor.device == example.device
    assert not gds.is_pinned(tensor), "that is about pinned memory, as with DeepSpeed"
    host = values((12_345,), torch.bfloat16)
    gds.sync_pwrite(host, tmp_path / "file")
    gds.sync_pread(tensor, tmp_path / "file")
    assert bits(gpu.to_host(tensor)) == bits(host)
    assert gds.free_pinned_device_tensor(tensor) is True
    assert tensor.numel() == 0
    with pytest.raises(ValueError, match="tensor that was freed is empty"):
        gds.free_pinned_device_tensor(tensor)


def test_the_record_is_one_for_all_handles(gpu: Any, gds: gds_handle) -> None:
    other = gds_handle(queue_depth=3)
    tensor = gds.new_pinned_device_tensor(100, gpu.tensor(torch.zeros(1)))
    view = tensor[:50]
    with pytest.raises(ValueError, match="is pinned already"):
        other.pin_device_tensor(tensor)
    with pytest.raises(ValueError, match=r"not made by new_pinned_device_tensor.*freed already"):
        other.free_pinned_device_tensor(tensor[1:])
    assert other.free_pinned_device_tensor(tensor) is True
    for call in (gds.free_pinned_device_tensor, gds.unpin_device_tensor):
        with pytest.raises(ValueError, match="already"):
            call(view)
    assert view.numel() == 50


def test_pinned_ones_stay_the_callers(gpu: Any, gds: gds_handle, tmp_path: Path) -> None:
    tensor = gpu.tensor(values((1000,), torch.float32))
    with pytest.raises(ValueError, match=r"1000 elements at 0x\w+ on cuda:0 is not pinned"):
        gds.unpin_device_tensor(tensor)
    assert gds.pin_device_tensor(tensor) is True
    with pytest.raises(ValueError, match="pinned by pin_device_tensor; unpin_device_tensor"):
        gds.free_pinned_device_tensor(tensor)
    assert gds.sync_pwrite(tensor[10:], tmp_path / "file") == 1
    assert gds.unpin_device_tensor(tensor) is True
    assert tensor.numel() == 1000
    with pytest.raises(ValueError, match="not pinned, or has been unpinned"):
        gds.unpin_device_tensor(tensor)
    assert gds.pin_device_tensor(tensor) is True
    assert gds.unpin_device_tensor(tensor) is True


def test_dropped_tensors_leave_the_record(gpu: Any, gds: gds_handle) -> None:
    example = gpu.tensor(torch.zeros(1))
    for _ in range(20):
        kept = gds.new_pinned_device_tensor(1000, example)
        pinned = gpu.tensor(torch.zeros(1000))
        gds.pin_device_tensor(pinned)
        assert len(_pinned_tensors.pinned_on_gpu) == 2
        del kept, pinned
        gc.collect()
        assert len(_pinned_tensors.pinned_on_gpu) == 0


def test_freed_while_an_operation_is_pending(gpu: Any, gds: gds_handle, tmp_path: Path) -> None:
    host = values((3 << 20,), torch.uint8)
    gds.sync_pwrite(host, tmp_path / "source")
    tensor = gds.new_pinned_device_tensor(host.numel(), gpu.tensor(host[:1]))
    gds.sync_pread(tensor, tmp_path / "source")
    storage = weakref.ref(tensor.untyped_storage())
    gds.async_pwrite(tensor, tmp_path / "file")
    assert gds.free_pinned_device_tensor(tensor) is True
    others = [gds.new_pinned_device_tensor(host.numel(), gpu.tensor(host[:1])) for _ in range(3)]
    assert gds.wait() == 1
    assert (tmp_path / "file").read_bytes() == bits(host)
    gc.collect()
    # The fake driver's tensor is a view, and its base stays.
    assert storage() is None or not gpu.is_real
    assert len(others) == 3
    del others


def test_pinned_ones_are_known_to_cufile_while_they_live(gpu: Any, gds: gds_handle, tmp_path: Path) -> None:
    if gpu.is_real:
        pytest.skip("only the fake driver says what cuFile knows")
    example = gpu.tensor(torch.zeros(1))
    host = values((1 << 18,), torch.float32)
    made, pinned = gds.new_pinned_device_tensor(1 << 18, example), gpu.tensor(host)
    gds.pin_device_tensor(pinned)
    assert gpu.driver.live("cufile_buffers") == 2
    path = tmp_path / "file"
    assert gds.sync_pwrite(pinned, path) == 1
    # A part of it, through another handle.
    assert gds_handle(queue_depth=2).sync_pread(made[: 1 << 17], path) == 1
    assert bits(gpu.to_host(made))[: 1 << 19] == bits(host)[: 1 << 19]
    assert gpu.driver.count("unregistered_io") == 0
    gds.unpin_device_tensor(pinned)
    gds.free_pinned_device_tensor(made)
    assert gpu.driver.live("cufile_buffers") == 0
    for number in range(1000):
        dropped = gpu.tensor(torch.zeros(1000))
        gds.pin_device_tensor(dropped)
        if number % 100 == 0:
            gds.async_pwrite(dropped, path)
        assert gpu.driver.live("cufile_buffers") <= 2
        del dropped
        if number % 100 == 0:
            assert gds.wait() == 1
    gc.collect()
    assert gpu.driver.live("cufile_buffers") == 0
    strided = gpu.tensor(host.reshape(512, 512)).T
    gds.pin_device_tensor(strided)
    assert gpu.driver.live("cufile_buffers") == 0, "what lies in pieces is recorded only"
    gpu.driver.fail("cuFileBufRegister", 0, 5012)
    gds.pin_device_tensor(pinned)
    assert gds.sync_pread(pinned, path) == 1
    gds.unpin_device_tensor(pinned)
    gds.unpin_device_tensor(strided)
