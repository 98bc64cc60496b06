"""Bad input raises an exception that names the file or argument, and the handle stays usable."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

import deepnvme
from deepnvme.deepspeed import aio_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[aio_handle]:
    handle = aio_handle(intra_op_parallelism=2)
    yield handle
    # Nothing of the failure remains in the handle.
    assert handle.wait() == 0
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    assert handle.sync_pwrite(source, tmp_path / "afterwards") == 1
    assert handle.sync_pread(target, tmp_path / "afterwards") == 1
    assert torch.equal(target, source)


@pytest.mark.parametrize(
    ("keywords", "error"),
    [
        ({"block_size": 0}, ValueError),
        ({"block_size": -4096}, ValueError),
        ({"queue_depth": 0}, ValueError),
        ({"intra_op_parallelism": 0}, ValueError),
        ({"block_size": 1048576.0}, TypeError),
        ({"queue_depth": "32"}, TypeError),
        ({"single_submit": "false"}, TypeError),
        ({"overlap_events": "true"}, TypeError),
        ({"threads": 1}, TypeError),
    ],
)
def test_settings(keywords: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(keywords))):
        aio_handle(**keywords)


READS = ["sync_pread", "async_pread", "read", "pread"]
WRITES = ["sync_pwrite", "async_pwrite", "write", "pwrite"]


def call(handle: aio_handle, method: str, buffer: Any, filename: Any, file_offset: Any = 0) -> None:
    """Call a method with any of the signatures, and wait."""
    extra = {"read": [False], "write": [False], "pread": [False, True], "pwrite": [False, True]}.get(method, [])
    getattr(handle, method)(buffer, filename, *extra, file_offset)
    handle.wait()


@pytest.mark.parametrize("method", READS)
def test_missing_file(tmp_path: Path, handle: aio_handle, method: str) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        call(handle, method, torch.zeros(10), str(tmp_path / "missing"))
    assert isinstance(raised.value, deepnvme.Error)
    assert raised.value.filename == str(tmp_path / "missing")


@pytest.mark.parametrize("method", WRITES)
def test_missing_folder(tmp_path: Path, handle: aio_handle, method: str) -> None:
    with pytest.raises(FileNotFoundError):
        call(handle, method, torch.zeros(10), str(tmp_path / "missing" / "file"))


@pytest.mark.parametrize("method", READS)
@pytest.mark.parametrize("size_and_offset", [(1001, 0), (1000, 1), (1, 1000), (MIB, 0), (10, 1 << 40)])
def test_short_file(
    tmp_path: Path,
    handle: aio_handle,
    random_bytes: Callable[[int], torch.Tensor],
    method: str,
    size_and_offset: tuple[int, int],
) -> None:
    size_bytes, offset = size_and_offset
    (tmp_path / "file").write_bytes(random_bytes(1000).numpy().tobytes())
    with pytest.raises(EOFError) as raised:
        call(handle, method, torch.zeros(size_bytes, dtype=torch.uint8), str(tmp_path / "file"), offset)
    assert isinstance(raised.value, deepnvme.Error)
    assert str(tmp_path / "file") in str(raised.value)


@pytest.mark.parametrize("method", READS + WRITES)
def test_arguments(tmp_path: Path, handle: aio_handle, method: str) -> None:
    name = str(tmp_path / "file")
    handle.sync_pwrite(torch.zeros(1000), name)
    with pytest.raises(ValueError, match="file_offset is -1"):
        call(handle, method, torch.zeros(10), name, -1)
    with pytest.raises(ValueError, match=rf"file_offset is {1 << 63}; .* between 0 and {(1 << 63) - 1}"):
        call(handle, method, torch.zeros(10), name, 1 << 63)
    with pytest.raises(TypeError, match="file_offset"):
        call(handle, method, torch.zeros(10), name, 0.0)
    with pytest.raises(TypeError, match="buffer is a ndarray"):
        call(handle, method, np.zeros(10), name)
    with pytest.raises(TypeError, match="buffer"):
        call(handle, method, b"bytes", name)
    with pytest.raises(TypeError, match="filename"):
        call(handle, method, torch.zeros(10), None)
    with pytest.raises(TypeError, match="filename"):
        call(handle, method, torch.zeros(10), ["a"])


@pytest.mark.parametrize("method", [method for method in READS + WRITES if method != "async_pwrite"])
def test_only_async_pwrite_takes_a_descriptor(handle: aio_handle, method: str) -> None:
    with pytest.raises(TypeError, match="filename"):
        call(handle, method, torch.zeros(10), 0)


@pytest.mark.parametrize("method", ["read", "write", "pread", "pwrite"])
def test_validate_is_a_flag(tmp_path: Path, handle: aio_handle, method: str) -> None:
    arguments: list[Any] = [torch.zeros(10), str(tmp_path / "file"), "no"]
    with pytest.raises(TypeError, match="validate"):
        getattr(handle, method)(*arguments, *([True] if method.startswith("p") else []))


def test_descriptors(tmp_path: Path, handle: aio_handle) -> None:
    (tmp_path / "file").write_bytes(b"before")
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match=r"(?i)descriptor|permission|permit"):
            call(handle, "async_pwrite", torch.zeros(1000), descriptor)
    finally:
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"before"
    with pytest.raises(OSError, match=r"(?i)descriptor"):
        call(handle, "async_pwrite", torch.zeros(1000), descriptor)
    with pytest.raises(ValueError, match="fd is -1"):
        call(handle, "async_pwrite", torch.zeros(1000), -1)
    with pytest.raises(TypeError, match="fd is True"):
        call(handle, "async_pwrite", torch.zeros(1000), True)
    with pytest.raises(TypeError, match="filename or an fd"):
        handle.async_pwrite(torch.zeros(10))
    with pytest.raises(TypeError, match="filename or an fd"):
        handle.async_pwrite(torch.zeros(10), "name", fd=1)


def test_a_folder_is_no_file(tmp_path: Path, handle: aio_handle) -> None:
    for method in ("sync_pread", "sync_pwrite"):
        with pytest.raises(OSError, match=r"(?i)folder|directory"):
            call(handle, method, torch.zeros(10), str(tmp_path))


def test_tensors_without_memory_of_the_cpu(tmp_path: Path, handle: aio_handle) -> None:
    for method in ("sync_pread", "sync_pwrite"):
        with pytest.raises((TypeError, ValueError, NotImplementedError, deepnvme.Error)):
            call(handle, method, torch.zeros(10, device="meta"), str(tmp_path / "file"))
        with pytest.raises(TypeError, match=r"torch\.sparse_coo.*to_dense"):
            call(handle, method, torch.eye(3).to_sparse(), str(tmp_path / "file"))


def test_reading_into_overlapping_elements(tmp_path: Path, handle: aio_handle) -> None:
    handle.sync_pwrite(torch.zeros(100), str(tmp_path / "file"))
    with pytest.raises((TypeError, ValueError, deepnvme.Error)):
        call(handle, "sync_pread", torch.zeros(1).expand(100), str(tmp_path / "file"))


@pytest.mark.parametrize("method", WRITES)
def test_a_write_that_the_disk_refuses(
    tmp_path: Path,
    handle: aio_handle,
    random_bytes: Callable[[int], torch.Tensor],
    file_size_limit: int,
    method: str,
) -> None:
    with pytest.raises(deepnvme.Error) as raised:
        call(handle, method, random_bytes(4 * file_size_limit), str(tmp_path / "file"))
    assert raised.value.errno is not None
    assert str(tmp_path / "file") in str(raised.value)


def test_wait_raises_the_first_error_after_all_are_done(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    (tmp_path / "short").write_bytes(b"x" * 100)
    (tmp_path / "shorter").write_bytes(b"x" * 10)
    sources = [random_bytes(4 * MIB) for _ in range(3)]
    handle.async_pwrite(sources[0], str(tmp_path / "file0"))
    handle.async_pread(torch.empty(1000, dtype=torch.uint8), str(tmp_path / "short"))
    handle.async_pwrite(sources[1], str(tmp_path / "file1"))
    handle.async_pread(torch.empty(1000, dtype=torch.uint8), str(tmp_path / "shorter"))
    handle.async_pwrite(sources[2], str(tmp_path / "file2"))
    with pytest.raises(EOFError) as raised:
        handle.wait()
    assert raised.value.filename == str(tmp_path / "short")  # type: ignore[attr-defined]
    for index, source in enumerate(sources):
        assert (tmp_path / f"file{index}").read_bytes() == source.numpy().tobytes()


@pytest.mark.parametrize("damage", ["changed", "cut"])
def test_validate_compares_with_the_file(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor], damage: str
) -> None:
    name = tmp_path / "file"
    source = random_bytes(9 * MIB + 5)
    expected = source.numpy().tobytes()
    place = 9 * MIB + 1
    assert handle.pwrite(source, str(name), True, True) == 0
    # The comparison runs in `wait`, so the file can be changed after it was written.
    deadline = time.monotonic() + 60
    while name.read_bytes() != expected:
        assert time.monotonic() < deadline
    with name.open("r+b") as file:
        if damage == "cut":
            file.truncate(place)
        else:
            file.seek(place)
            file.write(bytes([expected[place] ^ 1]))
    with pytest.raises(deepnvme.Error, match=f"byte {place};"):
        handle.wait()


@pytest.mark.parametrize("first", ["read", "write"])
@pytest.mark.parametrize("later", ["async", "sync", "blocking"])
def test_validate_compares_before_a_later_write(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor], first: str, later: str
) -> None:
    """A write that is queued behind a transfer does not make it look damaged."""
    name = str(tmp_path / "file")
    source, other = random_bytes(2 * MIB), random_bytes(2 * MIB)
    handle.sync_pwrite(source, name)
    if first == "read":
        handle.pread(torch.empty_like(source), name, True, True)
    else:
        handle.pwrite(source, name, True, True)
    if later == "async":
        handle.pwrite(other[: MIB + 1], name, True, True)
        assert handle.wait() == 2
    elif later == "sync":
        assert handle.pwrite(other, name, True, False) == 2
    else:
        handle.write(other, name, True)
        assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes()[: MIB + 1] == other[: MIB + 1].numpy().tobytes()


def test_damage_that_is_found_before_a_later_write_is_raised(
    tmp_path: Path, handle: aio_handle, random_bytes: Callable[[int], torch.Tensor]
) -> None:
    name = str(tmp_path / "file")
    source, target = random_bytes(MIB), torch.empty(MIB, dtype=torch.uint8)
    handle.sync_pwrite(source, name)
    handle.pread(target, name, True, True)
    deadline = time.monotonic() + 60
    while not torch.equal(source, target):
        assert time.monotonic() < deadline
    with (tmp_path / "file").open("r+b") as file:
        file.write(bytes([int(source[0]) ^ 1]))
    handle.pwrite(source, name, False, True)
    with pytest.raises(deepnvme.Error, match="byte 0;"):
        handle.wait()
    assert handle.wait() == 0
