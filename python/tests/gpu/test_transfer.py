"""``read`` and ``write`` of tensors on GPUs: any type, size, offset and stride, in stream order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

DTYPES = [torch.uint8, torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    numbers = torch.empty(count, dtype=torch.uint8).random_(0, 2 if dtype == torch.bool else 256, generator=generator)
    return numbers.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(gpu: Any, engine: deepnvme.Engine, tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "tensor.bin"
    for number, shape in enumerate([(), (0,), (1,), (511,), (4096,), (37, 1001)]):
        host = values(shape, dtype, number)
        offset = number * 1_000_003
        assert engine.write(gpu.tensor(host, number % 2), path, offset=offset) == host.nbytes
        assert path.read_bytes()[offset : offset + host.nbytes] == bits(host)
        target = gpu.tensor(values(shape, dtype, 99), 1 - number % 2)
        assert engine.read(target, path, offset=offset) == host.nbytes
        assert bits(gpu.to_host(target)) == bits(host)


def test_strides(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    host = values((120, 130), torch.float32)
    on_gpu = gpu.tensor(host)
    cuts: list[Callable[[Any], Any]] = [
        lambda t: t.T,
        lambda t: t[3:90, 5:7],
        lambda t: t[::3, ::2],
        lambda t: t[:, 1:2],
        lambda t: t.view(12, 10, 130).permute(2, 0, 1),
    ]
    for number, cut in enumerate(cuts):
        assert engine.write(cut(on_gpu), path) == cut(host).nbytes
        assert path.read_bytes()[: cut(host).nbytes] == bits(cut(host))
        fresh = values(tuple(cut(host).shape), torch.float32, 50 + number)
        engine.write(fresh, path)
        engine.read(cut(on_gpu), path)
        cut(host).copy_(fresh)
        assert bits(gpu.to_host(on_gpu)) == bits(host), "also between the elements"


def test_a_writer_kernel_is_still_running(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    new = values((300_000,), torch.uint8, 2)
    tensor, source = gpu.tensor(values((300_000,), torch.uint8, 1)), gpu.tensor(new)
    gpu.late(tensor, source, 60)
    engine.write(tensor, path)
    assert path.read_bytes() == bits(new)
    assert engine.stats().gpu_waits >= 1


def test_a_read_waits_for_a_kernel_that_reads_its_target(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    old, new = values((300_000,), torch.uint8, 1), values((300_000,), torch.uint8, 2)
    path.write_bytes(bits(new))
    tensor, copy = gpu.tensor(old), gpu.tensor(values((300_000,), torch.uint8, 3))
    gpu.late(copy, tensor, 60)
    engine.read(tensor, path)
    assert bits(gpu.to_host(tensor)) == bits(new)
    gpu.close()
    assert bits(gpu.to_host(copy)) == bits(old)


def test_results_of_a_read_are_visible_at_once(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    new = values((300_000,), torch.uint8, 2)
    path.write_bytes(bits(new))
    tensor, copy = gpu.tensor(values((300_000,), torch.uint8, 1)), gpu.tensor(values((300_000,), torch.uint8, 3))
    engine.read(tensor, path)
    gpu.late(copy, tensor, 0)
    gpu.close()
    assert bits(gpu.to_host(copy)) == bits(new)


def test_batches_and_pendings(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    hosts = [values((1000 * number + 1,), torch.uint8, number) for number in range(20)]
    offsets = [number * 30_000 for number in range(20)]
    tensors = [gpu.tensor(host, number % 2) if number % 3 else host for number, host in enumerate(hosts)]
    engine.start_write_batch([(path, at, tensor) for tensor, at in zip(tensors, offsets, strict=True)]).result()
    targets = [gpu.tensor(values(tuple(host.shape), torch.uint8, 77)) for host in hosts]
    pending = engine.start_read_batch([(path, at, target) for target, at in zip(targets, offsets, strict=True)])
    pending.result()
    for host, target in zip(hosts, targets, strict=True):
        assert bits(gpu.to_host(target)) == bits(host)
    stats = engine.stats()
    assert stats.bytes_to_gpu == sum(host.nbytes for host in hosts)
    assert stats.pool_bytes > 0


def test_a_large_tensor_and_the_pools_bound(gpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    host = values((24 << 20,), torch.uint8)
    with deepnvme.Engine(workers=2) as engine:
        engine.write(gpu.tensor(host), path)
        target = gpu.tensor(torch.zeros_like(host))
        engine.read(target, path)
        assert bits(gpu.to_host(target)) == bits(host)
        stats = engine.stats()
        assert stats.pool_bytes <= 2 * (8 << 20)
        assert stats.staged_reason is None


def test_gpudirect_storage(gpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    host = values((3_000_017,), torch.uint8)
    with deepnvme.Engine(workers=2, gds="preferred") as engine:
        engine.write(gpu.tensor(host), path, offset=4096)
        target = gpu.tensor(torch.zeros_like(host))
        engine.read(target, path, offset=4096)
        assert bits(gpu.to_host(target)) == bits(host)
        stats = engine.stats()
    # If a folder or machine does not support it, the reason is given.
    assert (stats.bytes_gds > 4_000_000) == (stats.gds_reason is None)
    assert gpu.is_real or stats.gds_reason is None or "direct I/O" in stats.gds_reason


def test_short_files_and_other_errors(gpu: Any, engine: deepnvme.Engine, tmp_path: Path) -> None:
    path = tmp_path / "tensor.bin"
    path.write_bytes(bytes(10_000))
    tensor = gpu.tensor(values((20_000,), torch.uint8))
    with pytest.raises(deepnvme.errors.EndOfFileError, match=r"10000"):
        engine.read(tensor, path)
    with pytest.raises(FileNotFoundError):
        engine.read(tensor, tmp_path / "nothing")


@pytest.mark.parametrize("count", [1000, 70_001, 40_000_003])
def test_files_take_and_fill_tensors(gpu: Any, engine: deepnvme.Engine, tmp_path: Path, count: int) -> None:
    path = tmp_path / "tensor.bin"
    expected = values((count,), torch.uint8)
    with deepnvme.open(path, "wb", engine=engine) as file:
        assert file.write(b"head") == 4
        assert file.write(gpu.tensor(expected)) == count
        assert file.write(expected) == count  # of the host
        assert file.tell() == 4 + 2 * count
    assert path.read_bytes() == b"head" + 2 * bits(expected)
    target = gpu.tensor(values((count,), torch.uint8, 7))
    with deepnvme.open(path, engine=engine) as file:
        assert file.read(4) == b"head"
        assert file.readinto(target) == count
        assert torch.equal(gpu.to_host(target), expected)
        assert file.readinto(target) == count
        assert torch.equal(gpu.to_host(target), expected)
        assert file.readinto(target) == 0
        # Up to the end of the file.
        file.seek(4 + count + 100)
        assert file.readinto(target) == count - 100
        assert torch.equal(gpu.to_host(target)[: count - 100], expected[100:])
