"""Every method of `aio_handle` on good input: names, arguments, defaults, results."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from deepnvme.deepspeed import aio_handle, aio_read, aio_write, deepspeed_memcpy

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
# Around the sizes of pages, blocks and workers' parts: nothing has to be a multiple.
SIZES = [0, 1, 511, 512, 1000, 4096, 4097, MIB, MIB + 1000, 5 * MIB + 3]


@pytest.fixture
def handle() -> aio_handle:
    return aio_handle(MIB, 8, False, True, 2)


def test_constructor_defaults_are_deepspeeds() -> None:
    parameters = inspect.signature(aio_handle).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "block_size": 1048576,
        "queue_depth": 128,
        "single_submit": False,
        "overlap_events": False,
        "intra_op_parallelism": 1,
    }


def test_getters_return_the_arguments(configured: Callable[[Any], Any]) -> None:
    handle = configured(aio_handle)
    assert handle.get_alignment() == 100 * 512
    assert aio_handle().get_alignment() == 512


@pytest.mark.parametrize(
    ("block_size", "queue_depth", "workers"), [(1, 1, 1), (1000, 100_000, 3), (1 << 30, 2, 100), (12_345, 7, 5)]
)
def test_any_setting_transfers(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor], block_size: int, queue_depth: int, workers: int
) -> None:
    source = random_bytes(300_001)
    handle = aio_handle(block_size, queue_depth, False, False, workers)
    assert handle.sync_pwrite(source, tmp_path / "file") == 1
    target = torch.empty_like(source)
    assert handle.sync_pread(target, tmp_path / "file") == 1
    assert torch.equal(target, source)


def test_flags_are_truth_values() -> None:
    handle = aio_handle(single_submit=1, overlap_events=np.bool_(True))  # type: ignore[arg-type]
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (True, True)


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("locked", [False, True], ids=["ordinary", "locked"])
@pytest.mark.parametrize("workers", [1, 3])
def test_write_and_read_every_size(
    tmp_path: Path, random_bytes: Callable[[int], torch.Tensor], size_bytes: int, locked: bool, workers: int
) -> None:
    handle = aio_handle(intra_op_parallelism=workers)
    name = str(tmp_path / "file")
    source = random_bytes(size_bytes)
    target = torch.zeros(size_bytes, dtype=torch.uint8)
    if locked:
        source = handle.new_cpu_locked_tensor(size_bytes, source).copy_(source)
        target = handle.new_cpu_locked_tensor(size_bytes, source)
    assert handle.sync_pwrite(source, name) == 1
    assert Path(name).read_bytes() == source.numpy().tobytes()
    assert handle.sync_pread(target, name) == 1
    assert torch.equal(target, source)


def test_thousand_bytes_are_all_there(tmp_path: Path, random_bytes: Callable[[int], torch.Tensor]) -> None:
    name = tmp_path / "file"
    source = random_bytes(28_824_000)
    handle = aio_handle()
    assert handle.sync_pwrite(source[:1000], str(name)) == 1
    assert name.stat().st_size == 1000
    assert handle.sync_pwrite(source, str(name)) == 1
    assert name.stat().st_size == 28_824_000
    assert name.read_bytes() == source.numpy().tobytes()


def test_asynchronous_calls_return_zero_and_wait_counts_each_once(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    sources = [random_bytes(100_000 + index) for index in range(20)]
    assert handle.wait() == 0
    for index, source in enumerate(sources):
        assert handle.async_pwrite(source, str(tmp_path / f"file{index}")) == 0
    assert handle.wait() == 20
    assert handle.wait() == 0
    targets = [torch.empty_like(source) for source in sources]
    for index, target in enumerate(targets):
        assert handle.async_pread(target, str(tmp_path / f"file{index}")) == 0
    assert handle.wait() == 20
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_synchronous_calls_count_their_waits(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    source = random_bytes(5000)
    name = str(tmp_path / "file")
    assert handle.sync_pwrite(source, name) == 1
    assert handle.async_pread(torch.empty_like(source), name) == 0
    assert handle.sync_pread(torch.empty_like(source), name) == 2
    assert handle.wait() == 0


def test_read_and_write_leave_pending_operations_alone(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    source, target = random_bytes(5000), torch.empty(5000, dtype=torch.uint8)
    assert handle.async_pwrite(source, str(tmp_path / "other")) == 0
    assert handle.write(source, str(tmp_path / "file"), False) == 0
    assert handle.read(buffer=target, filename=str(tmp_path / "file"), validate=True, file_offset=0) == 0
    assert torch.equal(target, source)
    assert handle.wait() == 1


@pytest.mark.parametrize("method", ["pread", "pwrite"])
def test_async_argument_by_position_and_by_keyword(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor], method: str
) -> None:
    name = str(tmp_path / "file")
    buffer = random_bytes(4096)
    handle.sync_pwrite(buffer, name)
    call: Any = getattr(handle, method)
    assert call(buffer, name, False, False) == 1
    assert call(buffer, name, False, True, 0) == 0
    assert call(buffer=buffer, filename=name, validate=False, **{"async": True}) == 0
    assert call(buffer, name, 0, file_offset=0, **{"async": 1}) == 0
    assert handle.wait() == 3
    assert call(buffer, name, True, **{"async": False}) == 1
    with pytest.raises(TypeError, match="async"):
        call(buffer, name, False)
    with pytest.raises(TypeError, match="asynchronous"):
        call(buffer, name, False, True, 0, asynchronous=True)
    with pytest.raises(TypeError, match="async"):
        call(buffer, name, False, True, 0, **{"async": True})
    assert handle.wait() == 0


def test_offsets_change_a_range_in_place(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    name = tmp_path / "file"
    before = random_bytes(100_000)
    handle.sync_pwrite(before, str(name))
    middle = random_bytes(10_001)
    assert handle.sync_pwrite(middle, str(name), 4099) == 1
    expected = before.clone()
    expected[4099 : 4099 + 10_001] = middle
    assert name.read_bytes() == expected.numpy().tobytes()
    part = torch.empty(777, dtype=torch.uint8)
    assert handle.sync_pread(buffer=part, filename=str(name), file_offset=4000) == 1
    assert torch.equal(part, expected[4000:4777])
    assert handle.pwrite(middle, str(name), False, True, 99_999) == 0
    assert handle.wait() == 1
    assert name.stat().st_size == 99_999 + 10_001


def test_a_shorter_write_does_not_cut_the_file(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    name = tmp_path / "file"
    long, short = random_bytes(8192), random_bytes(4096)
    handle.sync_pwrite(long, str(name))
    handle.sync_pwrite(short, str(name))
    assert name.read_bytes() == short.numpy().tobytes() + long[4096:].numpy().tobytes()


@pytest.mark.parametrize("spell", [str, os.fsencode, Path], ids=["str", "bytes", "path"])
def test_file_names_of_every_kind(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor], spell: Callable[[Path], Any]
) -> None:
    source, target = random_bytes(1234), torch.empty(1234, dtype=torch.uint8)
    name = spell(tmp_path / "größe")
    assert handle.pwrite(source, name, True, False) == 1
    assert handle.async_pread(target, name) == 0
    assert handle.wait() == 1
    assert torch.equal(target, source)


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_DIRECT], ids=["write", "both", "direct"])
@pytest.mark.parametrize("size_bytes", [1000, MIB])
def test_descriptors_stay_open(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor], flags: int, size_bytes: int
) -> None:
    name = tmp_path / "file"
    source = random_bytes(size_bytes)
    descriptor = os.open(name, flags | os.O_CREAT, 0o600)
    try:
        assert handle.async_pwrite(source, descriptor) == 0
        assert handle.async_pwrite(buffer=source, fd=descriptor, file_offset=size_bytes) == 0
        assert handle.wait() == 2
        assert os.fstat(descriptor).st_size == 2 * size_bytes
    finally:
        os.close(descriptor)
    assert name.read_bytes() == 2 * source.numpy().tobytes()


def test_a_descriptor_may_be_closed_while_its_write_is_pending(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    name = tmp_path / "file"
    source = random_bytes(8 * MIB)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
    handle.async_pwrite(source, descriptor, 0)
    os.close(descriptor)
    assert handle.wait() == 1
    assert name.read_bytes() == source.numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64]
)
def test_every_dtype(tmp_path: Path, handle: aio_handle, dtype: torch.dtype) -> None:
    source = torch.randn(1001).to(dtype)
    target = torch.zeros(1001, dtype=dtype)
    handle.sync_pwrite(source, str(tmp_path / "file"))
    handle.sync_pread(target, str(tmp_path / "file"))
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


def test_ranks_strides_and_views(tmp_path: Path, handle: aio_handle) -> None:
    name = str(tmp_path / "file")
    matrix = torch.randn(301, 203)
    target = torch.zeros(301, 203)
    handle.sync_pwrite(matrix, name)
    handle.sync_pread(target, name)
    assert torch.equal(target, matrix)

    columns = torch.zeros(203, 301).t()
    assert not columns.is_contiguous()
    handle.sync_pread(columns, name)
    assert torch.equal(columns, matrix)
    handle.async_pwrite(columns[:, 3:], name)
    assert handle.wait() == 1
    part = torch.zeros(301, 200)
    handle.sync_pread(part, name)
    assert torch.equal(part, matrix[:, 3:])

    scalar = torch.tensor(2.5)
    handle.sync_pwrite(scalar, str(tmp_path / "scalar"))
    assert (tmp_path / "scalar").read_bytes() == scalar.numpy().tobytes()


def test_parameters_that_require_gradients(tmp_path: Path, handle: aio_handle) -> None:
    parameter = torch.nn.Parameter(torch.randn(3000))
    expected = parameter.detach().clone()
    handle.sync_pwrite(parameter, str(tmp_path / "file"))
    parameter.data.zero_()
    handle.sync_pread(parameter, str(tmp_path / "file"))
    assert torch.equal(parameter.detach(), expected)
    assert parameter.requires_grad


def test_memory_outlives_a_tensor_that_is_pointed_elsewhere(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    source = random_bytes(16 * MIB)
    expected = source.numpy().tobytes()
    handle.async_pwrite(source, str(tmp_path / "file"))
    source.data = torch.empty(0, dtype=torch.uint8)
    garbage = [torch.zeros(16 * MIB, dtype=torch.uint8) for _ in range(4)]
    assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == expected
    assert len(garbage) == 4


def test_module_functions(tmp_path: Path, random_bytes: Callable[[int], torch.Tensor]) -> None:
    name = str(tmp_path / "file")
    source, target = random_bytes(100_003), torch.empty(100_003, dtype=torch.uint8)
    assert aio_write(source, name, MIB, 32, False, True, True) == 0
    assert aio_read(target, name, MIB, 32, True, False, False) == 0
    assert torch.equal(target, source)
    with pytest.raises(TypeError):
        aio_read(target, name, MIB, 32, False, True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        aio_write(target, name, MIB, 32, False, True, validate=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("count", [1, 64, 96, 192, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_memcpy_copies_exactly_that_much(count: int, dtype: torch.dtype) -> None:
    source = (torch.randn(count) * 50).to(dtype)
    memory = torch.full((count + 512,), 7, dtype=dtype)
    assert deepspeed_memcpy(memory[:count], source) == 0
    assert torch.equal(memory[:count], source)
    assert torch.equal(memory[count:], torch.full((512,), 7, dtype=dtype))


def test_memcpy_of_rows_and_of_unlike_tensors() -> None:
    source = torch.randn(10, 100)
    target = torch.zeros(1000)
    assert deepspeed_memcpy(target, source) == 0
    assert torch.equal(target, source.flatten())
    with pytest.raises(ValueError, match="both must agree"):
        deepspeed_memcpy(target, source[:9])
    with pytest.raises(ValueError, match="both must agree"):
        deepspeed_memcpy(target, source.double())
    with pytest.raises(TypeError):
        deepspeed_memcpy(target.numpy(), source)  # type: ignore[arg-type]
