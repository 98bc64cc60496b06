"""``deepnvme.open``: a binary file like any other."""

import copy
import gc
import io
import os
import pickle
import random
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def only(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_small_and_large_writes_make_one_file(path: Path, random_bytes: RandomBytes) -> None:
    chooser = random.Random(5)
    chunks = [random_bytes(chooser.choice([0, 1, 100, 4096, 65_537, 3_000_000])) for _ in range(40)]
    with deepnvme.open(path, "wb") as file:
        assert [file.write(chunk) for chunk in chunks] == [len(chunk) for chunk in chunks]
        assert file.tell() == sum(map(len, chunks))
        file.flush()
        assert not path.exists(), "until it is closed nobody sees it"
    assert path.read_bytes() == b"".join(chunks)
    assert only(path.parent) == ["file"]


def test_one_write_larger_than_all_buffers(path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(70_000_001)
    with deepnvme.open(path, "wb", durability="none") as file:
        assert file.write(data) == len(data)
    assert path.read_bytes() == data
    with deepnvme.open(path) as back:
        assert back.read() == data


@pytest.mark.parametrize("durability", ["none", "data", "full"])
def test_empty_files(path: Path, durability: Any) -> None:
    deepnvme.open(path, "wb", durability=durability).close()
    assert path.read_bytes() == b""
    with deepnvme.open(path) as file:
        assert (file.read(), file.read(5), file.readinto(bytearray(5)), file.readline()) == (b"", b"", 0, b"")


def test_writable_objects(path: Path) -> None:
    with deepnvme.open(path, "wb") as file:
        file.write(b"ab")
        file.write(bytearray(b"cd"))
        file.write(memoryview(b"ef"))
        array: Any = np.frombuffer(b"gh", np.uint8).copy()  # Any: numpy for Python 3.10 is not declared as a buffer
        file.write(array)
        file.writelines([b"ij", b"kl"])
        with pytest.raises(TypeError):
            file.write("text")  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            file.write(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="contiguous"):
            file.write(memoryview(b"abcdef")[::2])
    assert path.read_bytes() == b"abcdefghijkl"


def test_random_reads_are_those_of_a_file(path: Path, random_bytes: RandomBytes) -> None:
    path.write_bytes(random_bytes(9_000_007))
    chooser = random.Random(7)
    with deepnvme.open(path) as file, path.open("rb") as expected:
        for _ in range(400):
            size = chooser.choice([0, 1, 10, 4096, 70_000, 1_000_000, 5_000_000])
            match chooser.randrange(7):
                case 0:
                    where = (chooser.randrange(9_500_000), os.SEEK_SET)
                    assert file.seek(*where) == expected.seek(*where)
                case 1:
                    where = (-chooser.randrange(9_000_000), os.SEEK_END)
                    assert file.seek(*where) == expected.seek(*where)
                case 2:
                    where = (-min(size, expected.tell()), os.SEEK_CUR)
                    assert file.seek(*where) == expected.seek(*where)
                case 3:
                    ours, theirs = bytearray(size), bytearray(size)
                    assert file.readinto(ours) == expected.readinto(theirs)
                    assert ours == theirs
                case 4:
                    assert file.readline() == expected.readline()
                case 5:
                    peeked = file.peek(size)
                    assert expected.peek(1).startswith(peeked[:1])
                    assert len(peeked) > 0 or expected.tell() >= 9_000_007
                case _:
                    assert file.read(size) == expected.read(size)
            assert file.tell() == expected.tell()
        assert file.seek(0) == expected.seek(0) == 0
        assert file.read() == expected.read()


def test_reading_into_tensors_and_strided_memory(path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(20_000)
    path.write_bytes(data)
    with deepnvme.open(path) as file:
        target: Any = np.zeros((100, 100), np.uint8)
        assert file.readinto(target.T) == 10_000
        assert target.T.tobytes() == data[:10_000]
        with pytest.raises(ValueError, match="read-only"):
            file.readinto(b"12345")
        assert file.tell() == 10_000
        rest = bytearray(15_000)
        assert file.readinto(rest) == 10_000
        assert rest == data[10_000:] + bytes(5000)


def test_seek_refuses_the_same_as_python(path: Path) -> None:
    path.write_bytes(b"12345")
    with deepnvme.open(path) as file:
        assert file.seek(100) == 100
        assert file.read(5) == b""
        with pytest.raises(ValueError, match="before the start"):
            file.seek(-1)
        with pytest.raises(ValueError, match="whence is 7"):
            file.seek(0, 7)


def test_the_properties_of_both_ends(path: Path) -> None:
    with deepnvme.open(path, "wb") as writer:
        assert isinstance(writer, io.BufferedIOBase)
        assert (writer.readable(), writer.writable(), writer.seekable()) == (False, True, False)
        assert (writer.name, writer.mode, writer.closed, writer.isatty()) == (str(path), "wb", False, False)
        for call in (writer.read, writer.fileno, writer.detach, lambda: writer.seek(0), writer.truncate):
            with pytest.raises(io.UnsupportedOperation):
                call()
        assert repr(writer) == f"<deepnvme.Writer name={str(path)!r} mode='wb'>"
    assert writer.closed
    writer.close()
    writer.discard()
    with deepnvme.open(os.fsencode(path)) as reader:
        assert (reader.readable(), reader.writable(), reader.seekable()) == (True, False, True)
        assert (reader.name, reader.mode, reader.closed) == (os.fsencode(path), "rb", False)
        for refused in (lambda: reader.write(b"x"), reader.fileno, reader.detach, reader.truncate):
            with pytest.raises(io.UnsupportedOperation):
                refused()
    for closed in (writer, reader):
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: "):
            closed.tell()
        assert "closed" in repr(closed)
    both: list[Callable[[], object]] = [
        use
        for closed in (writer, reader)
        for use in (closed.tell, closed.fileno, closed.isatty, closed.flush, closed.__enter__)
    ]
    of_one: list[Callable[[], object]] = [
        *(reader.read, reader.read1, reader.peek, reader.readline, reader.readlines, reader.seekable, reader.readable),
        *(lambda: reader.readinto(bytearray(1)), lambda: reader.seek(0), lambda: list(reader)),
        *(writer.writable, lambda: writer.write(b"x"), lambda: writer.writelines([b"x"])),
    ]
    for use in both + of_one:
        with pytest.raises(deepnvme.errors.ClosedError, match="closed file"):
            use()


def test_an_exception_leaves_nothing_behind(path: Path, random_bytes: RandomBytes) -> None:
    path.write_bytes(b"old")
    with pytest.raises(KeyError), deepnvme.open(path, "wb") as file:
        file.write(random_bytes(20_000_000))
        raise KeyError
    assert path.read_bytes() == b"old"
    assert only(path.parent) == ["file"]


def test_a_file_that_is_never_closed_is_discarded(path: Path, random_bytes: RandomBytes) -> None:
    path.write_bytes(b"old")
    file = deepnvme.open(path, "wb")
    file.write(random_bytes(9_000_000))
    assert len(only(path.parent)) == 2
    with pytest.warns(RuntimeWarning, match=r"<deepnvme.Writer .*discarded"):
        del file
        gc.collect()
    assert path.read_bytes() == b"old"
    assert only(path.parent) == ["file"]
    reader = deepnvme.open(path)
    with pytest.warns(ResourceWarning, match=r"unclosed file <deepnvme.Reader"):
        del reader
        gc.collect()


def test_replacing_keeps_readers_of_the_old_file_whole(path: Path, random_bytes: RandomBytes) -> None:
    old, new = random_bytes(10_000_000), random_bytes(5_000_000)
    with deepnvme.open(path, "wb") as file:
        file.write(old)
    path.chmod(0o640)
    with deepnvme.open(path) as reader:
        start = reader.read(1000)
        with deepnvme.open(path, "wb") as file:
            file.write(new)
        assert start + reader.read() == old
    assert path.read_bytes() == new
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_errors_of_opening(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        deepnvme.open(tmp_path / "missing")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        deepnvme.open(tmp_path / "missing" / "file", "wb")
    with pytest.raises(IsADirectoryError):
        deepnvme.open(tmp_path)
    with pytest.raises(IsADirectoryError):
        deepnvme.open(tmp_path, "wb")
    for mode in ("r", "w", "ab", "rb+", ""):
        with pytest.raises(ValueError, match="must be 'rb' or 'wb'"):
            deepnvme.open(tmp_path / "file", mode)
    with pytest.raises(ValueError, match="'none', 'data' or 'full'"):
        deepnvme.open(tmp_path / "file", "wb", durability="maybe")  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        deepnvme.open([], "rb")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="needs a path"):
        deepnvme.open(3, "wb")
    assert only(tmp_path) == []


def test_a_descriptor_can_be_read(path: Path) -> None:
    path.write_bytes(b"1234567890")
    fd = os.open(path, os.O_RDONLY)
    os.lseek(fd, 5, os.SEEK_SET)
    with deepnvme.open(fd) as file:
        assert file.read() == b"1234567890"
    assert os.read(fd, 5) == b"67890", "it stays open and where it was"
    os.close(fd)


def test_a_stripe_set_is_a_file_as_well(tmp_path: Path, random_bytes: RandomBytes) -> None:
    parts = deepnvme.StripeSet([tmp_path / "a", tmp_path / "b"], stripe_bytes=8192)
    data = random_bytes(10_000_001)
    with deepnvme.open(parts, "wb") as file:
        file.write(data)
    assert len(only(tmp_path)) == 3, "two parts and a manifest"
    target = bytearray(10_000_001)
    assert deepnvme.read(target, parts) == 10_000_001
    assert target == data
    with deepnvme.open(parts) as back:
        assert back.read() == data
    with deepnvme.open(parts.manifest_path) as back:
        back.seek(-5, os.SEEK_END)
        assert back.read() == data[-5:]


def test_a_file_that_shrinks_is_an_error(path: Path, random_bytes: RandomBytes) -> None:
    path.write_bytes(random_bytes(20_000_000))
    with deepnvme.open(path) as file:
        os.truncate(path, 1000)
        with pytest.raises(EOFError):
            file.read()
        assert file.tell() == 0


def test_an_engine_can_be_given(path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(6_000_000)
    with deepnvme.Engine(backend="threads") as engine:
        with deepnvme.open(path, "wb", engine=engine) as writer:
            writer.write(data)
        with deepnvme.open(path, engine=engine) as reader:
            assert reader.read() == data
        stats = engine.stats()
        assert (stats.bytes_written, stats.bytes_read >= 6_000_000) == (6_000_000, True)
    with pytest.raises(deepnvme.errors.ClosedError):
        deepnvme.open(path, engine=engine)


def test_threads_that_share_a_reader_get_each_byte_once(tmp_path: Path) -> None:
    blocks = 1024
    path = tmp_path / "blocks"
    path.write_bytes(b"".join(block.to_bytes(8, "little") * 512 for block in range(blocks)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for way in ("read", "readinto") * 5:
            found: list[int] = []
            with deepnvme.open(path) as file:

                def work(file: Any = file, found: list[int] = found, way: str = way) -> None:
                    buffer = bytearray(4096)
                    while True:
                        data = file.read(4096) if way == "read" else buffer[: file.readinto(buffer)]
                        if not data:
                            return
                        found.append(int.from_bytes(data[:8], "little"))

                threads = [threading.Thread(target=work) for _ in range(6)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert sorted(found) == list(range(blocks))
    finally:
        sys.setswitchinterval(interval)


def test_files_are_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    writer = deepnvme.open(path, "wb")
    writer.write(b"abc")
    for refuse in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            refuse(writer)
    writer.close()
    with deepnvme.open(path) as reader:
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            copy.copy(reader)
        assert reader.read() == b"abc"


def test_a_file_without_a_stated_size_is_refused() -> None:
    with pytest.raises(deepnvme.errors.UnsupportedError, match="no size"):
        deepnvme.open("/proc/cpuinfo")
