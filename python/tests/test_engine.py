"""``Engine``: settings, transfers, paths, batches, and its end."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]
InThreads = Callable[[Callable[[int], object], int], None]

SIZES = [0, 1, 511, 512, 4095, 4096, 4097, 16384, 100_000, 1_048_576, 5_000_003]


@pytest.mark.parametrize("size", SIZES)
def test_any_size_comes_back(engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes, size: int) -> None:
    path, data = tmp_path / "file", random_bytes(size)
    assert engine.write(data, path) == size
    assert path.read_bytes() == data
    target = bytearray(random_bytes(size))
    assert engine.read(target, path) == size
    assert target == data


@pytest.mark.parametrize("offset", [0, 1, 513, 4096, 16383, 70_001])
@pytest.mark.parametrize("skew", [0, 1, 64])
def test_any_offset_and_alignment(
    engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes, offset: int, skew: int
) -> None:
    path, before = tmp_path / "file", random_bytes(200_000)
    path.write_bytes(before)
    patch = np.frombuffer(random_bytes(skew + 50_001), np.uint8)[skew:]
    assert engine.write(patch, path, offset) == 50_001
    after = before[:offset] + patch.tobytes() + before[offset + 50_001 :]
    assert path.read_bytes() == after, "only the range changes"
    target = np.empty(skew + 50_001, np.uint8)[skew:]
    assert engine.read(target, path, offset) == 50_001
    assert np.array_equal(target, patch)


def test_a_write_without_offset_cuts_and_one_with_offset_does_not(
    engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    path, long, short = tmp_path / "file", random_bytes(100_000), random_bytes(10_000)
    engine.write(long, path)
    engine.write(short, path, offset=0)
    assert path.read_bytes() == short + long[10_000:]
    engine.write(short, path)
    assert path.read_bytes() == short
    engine.write(short, path, offset=20_000)
    assert path.read_bytes() == short + bytes(10_000) + short, "a write beyond the end extends the file"
    engine.write(b"", path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("durability", ["none", "data", "full"])
def test_durability(engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes, durability: Any) -> None:
    path, data = tmp_path / "file", random_bytes(70_001)
    before = engine.stats().syncs
    engine.write(data, path, durability=durability)
    assert path.read_bytes() == data
    assert (engine.stats().syncs > before) == (durability != "none")


@pytest.mark.parametrize("direct", ["preferred", "required", "disabled"])
def test_direct_modes(tmp_path: Path, random_bytes: RandomBytes, direct: Any) -> None:
    path, data = tmp_path / "file", random_bytes(1 << 20)
    with deepnvme.Engine(direct=direct) as engine:
        try:
            engine.write(data, path)
        except deepnvme.errors.UnsupportedError as error:
            pytest.skip(f"no direct I/O in this folder: {error}")
        target = bytearray(1 << 20)
        engine.read(target, path)
        assert target == data
        stats = engine.stats()
        if direct == "disabled":
            assert stats.bytes_buffered == 2 << 20
        elif stats.buffered_reason is None:
            assert stats.bytes_direct + stats.bytes_bounced == 2 << 20


class _PathLike:
    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


def test_every_kind_of_path(tmp_path: Path, random_bytes: RandomBytes) -> None:
    name = tmp_path / "nämé"
    kinds: list[Any] = [name, str(name), os.fsencode(name), _PathLike(str(name)), _PathLike(os.fsencode(name))]
    for path in kinds:
        data, target = random_bytes(5000), bytearray(5000)
        assert deepnvme.write(data, path) == 5000
        assert deepnvme.read(target, path) == 5000
        assert target == data
    odd = os.fsencode(tmp_path) + b"/\xff\xfe"
    deepnvme.write(b"odd", odd)
    assert Path(os.fsdecode(odd)).read_bytes() == b"odd"


@pytest.mark.parametrize("path", [None, 1.5, True, ["x"], _PathLike(3)])
def test_a_non_path_is_a_type_error(path: Any) -> None:
    with pytest.raises(TypeError):
        deepnvme.write(b"x", path)


def test_impossible_paths_are_value_errors() -> None:
    for path in ("a\0b", b"a\0b", -1, 1 << 40):
        with pytest.raises(ValueError, match=r"null byte|not a file descriptor"):
            deepnvme.write(b"x", path)


def test_a_descriptor_stays_open_and_in_place(
    engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes
) -> None:
    path, data = tmp_path / "file", random_bytes(60_001)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.write(fd, random_bytes(100_000))
        os.lseek(fd, 77, os.SEEK_SET)
        engine.write(data, fd)
        assert path.read_bytes() == data, "without an offset the file becomes exactly the tensor"
        engine.write(data[:100], fd, offset=60_001)
        assert path.stat().st_size == 60_101
        target = bytearray(60_001)
        engine.read(target, fd)
        assert target == data
        assert os.lseek(fd, 0, os.SEEK_CUR) == 77
    finally:
        os.close(fd)


def test_a_descriptor_of_the_wrong_kind_says_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(ValueError, match="not open for"):
            deepnvme.write(b"x", fd)
    finally:
        os.close(fd)
    with pytest.raises(OSError, match="descriptor is closed") as caught:
        deepnvme.read(bytearray(1), fd)
    assert isinstance(caught.value, deepnvme.Error)
    reading, writing = os.pipe()
    with pytest.raises(ValueError, match="regular files"):
        deepnvme.write(b"x", writing)
    os.close(reading)
    os.close(writing)


def test_no_descriptor_leaks(tmp_path: Path, random_bytes: RandomBytes) -> None:
    path, data = tmp_path / "file", random_bytes(5000)
    deepnvme.write(data, path)

    def open_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_descriptors()
    for _ in range(1000):
        deepnvme.read(bytearray(5000), path)
        with pytest.raises(FileNotFoundError):
            deepnvme.read(bytearray(1), tmp_path / "missing")
    deadline = time.monotonic() + 10
    while open_descriptors() > before:
        assert time.monotonic() < deadline, "descriptors leak"


def test_offsets_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for offset in (-1, 1 << 64):
        with pytest.raises(ValueError, match="offset is"):
            deepnvme.write(b"x", path, offset)
    with pytest.raises(ValueError, match=r"beyond|2\^63"):
        deepnvme.write(b"x", path, (1 << 63) - 1)
    with pytest.raises(TypeError):
        deepnvme.write(b"x", path, 1.0)  # type: ignore[arg-type]


def test_a_closed_engine_refuses(tmp_path: Path) -> None:
    engine = deepnvme.Engine()
    with engine as same:
        assert same is engine
        pending = engine.start_write(b"x" * 100_000, tmp_path / "file")
    assert engine.is_closed
    assert pending.result() == 100_000, "closing finishes what is in flight"
    assert "closed" in repr(engine)
    engine.close()
    for call in (engine.stats, engine.probe, lambda: engine.write(b"x", tmp_path / "file")):
        with pytest.raises(deepnvme.errors.ClosedError):
            call()
    with pytest.raises(ValueError, match="closed"):
        engine.read(bytearray(1), tmp_path / "file")


def test_an_engine_that_is_dropped_finishes_its_requests(tmp_path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(3_000_000)
    pending = deepnvme.Engine(workers=1, block_bytes=4096).start_write(data, tmp_path / "file")
    assert pending.result() == len(data)
    assert (tmp_path / "file").read_bytes() == data


def test_many_threads_share_an_engine(
    engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes, in_threads: InThreads
) -> None:
    path = tmp_path / "file"
    parts = [random_bytes(30_001) for _ in range(8)]
    engine.write(bytes(8 * 30_001), path)

    def work(index: int) -> None:
        for _ in range(20):
            engine.write(parts[index], path, index * 30_001)
            target = bytearray(30_001)
            engine.read(target, path, index * 30_001)
            assert target == parts[index]

    in_threads(work, 8)
    assert path.read_bytes() == b"".join(parts), "neighbours leave each other's bytes alone"


def test_the_gil_is_released(slow_engine: deepnvme.Engine, tmp_path: Path) -> None:
    counted = threading.Event()
    begun = threading.Event()

    def count() -> None:
        begun.wait()
        while slow_engine.stats().bytes_written == 0:
            pass
        counted.set()

    thread = threading.Thread(target=count)
    thread.start()
    begun.set()
    slow_engine.write(bytes(16 << 20), tmp_path / "file")
    assert counted.is_set(), "another thread ran Python code while the write was in flight"
    thread.join()


def test_the_default_engine_is_one(tmp_path: Path, random_bytes: RandomBytes) -> None:
    engine = deepnvme.default_engine()
    assert deepnvme.default_engine() is engine
    before = engine.stats().requests
    data, path = random_bytes(1000), tmp_path / "file"
    deepnvme.write(data, path)
    deepnvme.start_read(bytearray(1000), path).result()
    deepnvme.start_write(data, path, 1000).result()
    deepnvme.start_write_batch([(path, 0, data)]).result()
    deepnvme.start_read_batch([(path, 0, bytearray(1000))]).result()
    assert engine.stats().requests == before + 5
    assert path.read_bytes() == data + data
    engine.close()
    assert deepnvme.default_engine() is not engine, "closed, it is made anew"
    assert deepnvme.read(bytearray(1000), path) == 1000
