"""numpy arrays, buffers and DLPack as memory."""

import array
import ctypes
import gc
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "array"


DTYPES = ["u1", "i2", ">i4", "<f8", "f2", "c16", "?", "S5", "U3", "V7", "M8[ns]", "m8[s]", "longdouble"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(path: Path, random_bytes: RandomBytes, dtype: str) -> None:
    kind = np.dtype(dtype)
    written = np.frombuffer(random_bytes(300 * kind.itemsize), np.uint8).view(kind)
    assert deepnvme.write(written, path) == 300 * kind.itemsize
    assert path.read_bytes() == written.tobytes()
    target = np.zeros(300, kind)
    assert deepnvme.read(target, path) == 300 * kind.itemsize
    assert target.tobytes() == written.tobytes()


def test_types_that_the_buffer_protocol_lacks(path: Path, random_bytes: RandomBytes) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
        written = np.frombuffer(random_bytes(64), np.uint8).view(kind)
        deepnvme.write(written, path)
        target = np.zeros_like(written)
        deepnvme.read(target, path)
        assert target.tobytes() == written.tobytes()


def test_structured_and_record_arrays(path: Path, random_bytes: RandomBytes) -> None:
    kind = np.dtype([("id", "<u4"), ("vector", "f4", (3,)), ("flag", "?")], align=True)
    written = np.frombuffer(random_bytes(50 * kind.itemsize), np.uint8).view(kind)
    deepnvme.write(written, path)
    target = np.zeros(50, kind).view(np.recarray)
    deepnvme.read(target, path)
    assert target.tobytes() == written.tobytes()
    fields = np.zeros(50, kind)
    deepnvme.write(written["id"], path)
    deepnvme.read(fields["id"], path)
    assert np.array_equal(fields["id"], written["id"]), "a field is a strided view"
    assert not fields["vector"].any()


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda whole: whole.T,
    "reversed": lambda whole: whole[::-1],
    "reversed both ways": lambda whole: whole[::-1, ::-2],
    "sliced": lambda whole: whole[3:40:7, 5:30],
    "fortran": np.asfortranarray,
    "no dimension": lambda whole: whole[3, 4, ...],
    "empty": lambda whole: whole[:0],
    "swapped axes": lambda whole: whole.reshape(5, 10, 60).swapaxes(0, 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_views(engine: deepnvme.Engine, path: Path, random_bytes: RandomBytes, view: str) -> None:
    whole = np.frombuffer(random_bytes(50 * 60 * 4), np.int32).reshape(50, 60)
    part = VIEWS[view](whole)
    assert engine.write(part, path) == part.nbytes
    assert path.read_bytes() == part.tobytes(order="C")
    target = np.zeros_like(whole)
    goal = VIEWS[view](target)
    assert engine.read(goal, path) == part.nbytes
    assert np.array_equal(goal, part)


def test_read_only_memory_is_refused_for_reads(path: Path, random_bytes: RandomBytes) -> None:
    path.write_bytes(random_bytes(100))
    frozen = np.zeros(10)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="ndarray is read-only"):
        deepnvme.read(frozen, path)
    with pytest.raises(ValueError, match="ndarray is read-only"):
        deepnvme.read(np.broadcast_to(np.zeros(1), (5,)), path)
    with pytest.raises(ValueError, match=r"bytes is read-only.*bytearray"):
        deepnvme.read(b"12345", path)
    with pytest.raises(ValueError, match="memoryview is read-only"):
        deepnvme.read(memoryview(b"12345"), path)
    assert not frozen.any()
    for source in (frozen, b"12345", memoryview(bytearray(8)).toreadonly()):
        assert deepnvme.write(source, path) > 0


def test_references_are_refused(path: Path) -> None:
    strings = getattr(np.dtypes, "StringDType", None)
    arrays = [np.array([object(), None]), np.zeros(3, [("name", "O"), ("id", "i4")])]
    if strings is not None:
        arrays.append(np.array(["a", "b" * 100], strings()))
    for refused in arrays:
        with pytest.raises(TypeError, match="references to Python objects"):
            deepnvme.write(refused, path)
        with pytest.raises(TypeError, match="references"):
            deepnvme.read(refused, path)
    with pytest.raises(TypeError, match="references or pointers"):
        deepnvme.write((ctypes.py_object * 2)(), path)


def test_overlapping_arrays_are_refused_for_reads(path: Path) -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(10, dtype="u1"), 3, writeable=True)
    deepnvme.write(windows, path)
    assert path.read_bytes() == windows.tobytes()
    with pytest.raises(ValueError, match="share their memory"):
        deepnvme.read(windows, path)


def test_the_buffer_protocol(engine: deepnvme.Engine, path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(9000)
    with mmap.mmap(-1, 9000) as anonymous:
        targets: list[Any] = [
            bytearray(9000),
            memoryview(bytearray(9000)),
            array.array("H", bytes(9000)),
            (ctypes.c_uint8 * 9000)(),
            anonymous,
            memoryview(bytearray(9000)).cast("I"),
        ]
        sources: list[Any] = [data, bytearray(data), memoryview(data), data, data, data]
        for source, target in zip(sources, targets, strict=True):
            engine.write(source, path)
            engine.read(target, path)
            assert bytes(memoryview(target)) == data
        del targets, target
    strided = memoryview(bytearray(random_bytes(18_000)))
    before = bytes(strided)
    engine.read(strided[::2], path)
    assert bytes(strided[::2]) == data
    assert bytes(strided[1::2]) == before[1::2]
    engine.write(strided[::-3], path)
    assert path.read_bytes() == bytes(strided[::-3])


def test_a_buffer_is_released_when_the_call_returns(path: Path, random_bytes: RandomBytes) -> None:
    data = random_bytes(200_000)
    for size in (1, 200_000):
        for _ in range(200):
            target = bytearray(size)
            deepnvme.write(target, path)
            target.append(1)
            target = bytearray(size)
            deepnvme.start_write(data, path).result()
            deepnvme.read(target, path)
            target.append(1)
            pending = deepnvme.start_read(target[:1], path)
            pending.result()
            target.clear()


def test_a_buffer_in_flight_cannot_be_resized(slow_engine: deepnvme.Engine, path: Path) -> None:
    source = bytearray(4 << 20)
    pending = slow_engine.start_write(source, path)
    with pytest.raises(BufferError):
        source.clear()
    pending.cancel()
    with pytest.raises(deepnvme.errors.CancelledError):
        pending.result()
    source.clear()


def test_an_array_is_kept_alive_while_in_flight_and_no_longer(slow_engine: deepnvme.Engine, path: Path) -> None:
    class Tracked(np.ndarray[Any, Any]):
        pass

    source = np.full(4 << 20, 7, np.uint8).view(Tracked)
    alive = weakref.ref(source)
    pending = slow_engine.start_write(source, path)
    del source
    gc.collect()
    assert alive() is not None
    assert pending.result() == 4 << 20
    assert alive() is None
    assert path.read_bytes() == b"\7" * (4 << 20)


class _OnlyDLPack:
    """What a library is that has nothing but DLPack."""

    def __init__(self, tensor: Any, *, old: bool = False, device: tuple[int, int] | None = None) -> None:
        self.tensor, self.old, self.device = tensor, old, device

    def __dlpack__(self, **arguments: Any) -> Any:
        if self.old and arguments:
            msg = "unexpected keyword argument"
            raise TypeError(msg)
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.device or self.tensor.__dlpack_device__()


@pytest.mark.parametrize("old", [False, True])
def test_dlpack(path: Path, random_bytes: RandomBytes, old: bool) -> None:
    written = np.frombuffer(random_bytes(40_000), np.int32).reshape(100, 100)
    written = written.copy()
    source = _OnlyDLPack(written.T, old=old)
    alive = weakref.ref(written)
    assert deepnvme.write(source, path) == 40_000
    assert path.read_bytes() == written.T.tobytes()
    target = np.zeros((100, 100), np.int32)
    assert deepnvme.read(_OnlyDLPack(target[:, ::-1].T, old=old), path) == 40_000
    assert np.array_equal(target[:, ::-1], written)
    del written, source
    gc.collect()
    assert alive() is None, "the tensor was given back"


def test_dlpack_refusals(path: Path) -> None:
    frozen = np.zeros(10)
    frozen.flags.writeable = False
    path.write_bytes(bytes(80))
    with pytest.raises((ValueError, BufferError), match=r"read-?only"):
        deepnvme.read(_OnlyDLPack(frozen), path)
    with pytest.raises(TypeError, match=r"DLPack device type 10, number 0.*copy it to the CPU"):
        deepnvme.write(_OnlyDLPack(np.zeros(3), device=(10, 0)), path)


@pytest.mark.parametrize("thing", [None, 3, "text", [1, 2], {"a": 1}, object()])
def test_a_non_tensor_is_a_type_error(path: Path, thing: Any) -> None:
    with pytest.raises(TypeError, match=f"tensor must be .* not {type(thing).__name__}"):
        deepnvme.write(thing, path)
    with pytest.raises(TypeError, match=f"not {type(thing).__name__}"):
        deepnvme.read(thing, path)
    assert not path.exists()
