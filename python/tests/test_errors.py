"""Failures are exceptions with an errno, a path and a remedy."""

import copy
import errno
import functools
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme
from deepnvme import errors

RandomBytes = Callable[[int], bytes]

CLASSES = [getattr(errors, name) for name in errors.__all__]


def test_each_is_an_error_and_pythons_own_class() -> None:
    words = {
        "NotFoundError": FileNotFoundError,
        "PermissionDeniedError": PermissionError,
        "IsFolderError": IsADirectoryError,
        "NotFolderError": NotADirectoryError,
        "EndOfFileError": EOFError,
        "InvalidArgumentError": ValueError,
        "OutOfMemoryError": MemoryError,
        "ClosedError": ValueError,
        "WaitTimeoutError": TimeoutError,
    }
    for kind in CLASSES:
        assert issubclass(kind, deepnvme.Error)
        assert issubclass(kind, OSError)
        assert issubclass(kind, words.get(kind.__name__, OSError))
        assert kind.__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_they_can_be_copied_and_sent(kind: type[deepnvme.Error]) -> None:
    for error in (kind(errno.EIO, "words", "name"), kind("words only")):
        error.offset, error.bytes_done = 4096, 17
        for back in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert type(back) is kind
            assert str(back) == str(error)
            assert (back.errno, back.filename, back.offset, back.bytes_done) == (
                error.errno,
                error.filename,
                4096,
                17,
            )


def check(error: pytest.ExceptionInfo[Any], number: int | None, path: Path) -> None:
    assert isinstance(error.value, deepnvme.Error)
    assert error.value.errno == number
    assert error.value.filename == str(path)
    assert str(path) in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match="No such file or directory; check the path") as caught:
        deepnvme.read(bytearray(1), path)
    check(caught, errno.ENOENT, path)
    assert str(caught.value.strerror).startswith("open: ")
    with pytest.raises(FileNotFoundError) as caught:
        deepnvme.start_write(b"x", path / "file")
    check(caught, errno.ENOENT, path / "file")


def test_folders_where_there_should_be_none_and_the_reverse(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        deepnvme.write(b"x", tmp_path)
    check(caught, errno.EISDIR, tmp_path)
    with pytest.raises(IsADirectoryError):
        deepnvme.read(bytearray(1), tmp_path)
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(NotADirectoryError) as directory:
        deepnvme.write(b"x", tmp_path / "file" / "below")
    check(directory, errno.ENOTDIR, tmp_path / "file" / "below")


def test_pipes_and_sockets_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "a socket"))
    for path in tmp_path.iterdir():
        for call in (deepnvme.read, deepnvme.write, functools.partial(deepnvme.write, offset=0)):
            with pytest.raises(errors.InvalidArgumentError, match=f"it is {path.name};"):
                call(bytearray(10), path)


def test_missing_permissions(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    path.chmod(0)
    if os.geteuid() == 0:  # who may write anything but what the kernel itself keeps
        path = Path("/sys/kernel/uevent_seqnum")
        if not path.exists() or os.statvfs(path).f_flag & os.ST_RDONLY:
            pytest.skip("root may write every file of this system, or /sys is missing or read-only")
    with pytest.raises(PermissionError) as caught:
        deepnvme.write(b"x", path)
    check(caught, errno.EACCES, path)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 100_000])
def test_the_end_of_the_file(engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes, size: int) -> None:
    path, data = tmp_path / "file", random_bytes(size)
    path.write_bytes(data)
    for offset in (0, size // 2, size, size + 5000):
        there = max(size - offset, 0)
        with pytest.raises(EOFError, match="ends too early") as caught:
            engine.read(bytearray(size + 10_000), path, offset)
        check(caught, None, path)
        assert isinstance(caught.value, deepnvme.EndOfFileError)
        assert "ask for a range inside the file, or write the file again" in str(caught.value)
        assert (caught.value.offset, caught.value.bytes_done) == (offset, there)
    assert engine.read(bytearray(0), path, size + 10_000) == 0


def test_the_file_size_limit_is_an_error_not_a_short_file(python: Callable[..., Any]) -> None:
    python("""
        import errno, resource, signal
        import deepnvme
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        for call in (deepnvme.write, lambda *arguments: deepnvme.start_write(*arguments).result()):
            try:
                call(bytes(8 << 20), "file")
            except deepnvme.Error as error:
                assert error.errno == errno.EFBIG, error
                assert error.filename == "file" and "ulimit -f" in str(error)
            else:
                raise SystemExit("no error")
        try:
            with deepnvme.open("other", "wb") as file:
                file.write(bytes(8 << 20))
        except deepnvme.Error as error:
            assert error.errno == errno.EFBIG, error
        else:
            raise SystemExit("no error")
        import os
        assert "other" not in "".join(os.listdir()), os.listdir()
    """)


def test_too_many_open_files_is_named(python: Callable[..., Any]) -> None:
    python("""
        import errno, resource
        import deepnvme
        deepnvme.write(b"12345", "file")
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
        files = []
        try:
            while True:
                files.append(open("file"))
        except OSError:
            pass
        try:
            deepnvme.read(bytearray(5), "file")
        except deepnvme.Error as error:
            assert error.errno == errno.EMFILE and "ulimit -n" in str(error), error
        else:
            raise SystemExit("no error")
        files.clear()
        assert deepnvme.read(bytearray(5), "file") == 5
    """)
