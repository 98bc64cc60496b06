"""Malicious or damaged files give an error that names the place. No code runs, and nothing crashes."""

from __future__ import annotations

import enum
import io
import os
import pickle
import random
import struct
import warnings
import zipfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import errors


class Runs:
    """Runs a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.made = (function, arguments)

    def __reduce__(self) -> Any:
        return self.made


class Harmless:
    def __init__(self) -> None:
        self.value = 5


class WithSetState:
    def __setstate__(self, state: Any) -> None:
        self.state = state


def archive(path: Path, data: bytes, records: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", data)
        file.writestr("x/version", b"3\n")
        for name, content in (records or {}).items():
            file.writestr(f"x/{name}", content)
    return path


@pytest.mark.parametrize(
    "attack",
    [
        Runs(os.system, "touch owned"),
        Runs(eval, "open('owned', 'w')"),
        Runs(exec, "open('owned', 'w')"),
        Runs(__import__, "antigravity"),
        Runs(getattr, torch.Tensor, "numpy"),
        Runs(torch.load, "x"),
        Runs(pickle.loads, b"N."),
        Runs(open, "owned", "w"),
        Runs(io.FileIO, "owned", "w"),
        Runs(torch.hub.load, "x", "y"),
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_no_code_of_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Runs, protocol: int) -> None:
    monkeypatch.chdir(tmp_path)
    path = archive(tmp_path / "x.pt", pickle.dumps({"a": [attack]}, protocol))
    with pytest.raises(errors.UnsafeFileError, match=r"x\.pt.*asks for"):
        deepnvme.load(path)
    with pytest.raises(pickle.UnpicklingError):
        deepnvme.load(path)
    assert not (tmp_path / "owned").exists()


def test_globals_that_are_never_allowed(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", pickle.dumps(Runs(os.system, "true"), 2))
    with torch.serialization.safe_globals([(os.system, "posix.system")]), pytest.raises(errors.UnsafeFileError):
        deepnvme.load(path)


def test_a_dotted_name_is_not_looked_up(tmp_path: Path) -> None:
    data = b"\x80\x04\x8c\x05torch\x8c\x0eTensor.__new__\x93."
    with pytest.raises(errors.UnsafeFileError, match=r"Tensor\.__new__"):
        deepnvme.load(archive(tmp_path / "x.pt", data))


def test_the_advice_names_a_class_of_the_main_program_as_that_program_does(tmp_path: Path) -> None:
    with pytest.raises(errors.UnsafeFileError, match=r"add_safe_globals\(\[Foo\]\)"):
        deepnvme.load(archive(tmp_path / "x.pt", b"\x80\x02c__main__\nFoo\n."))


def test_allowed_globals_are_built(tmp_path: Path) -> None:
    torch.save({"x": Harmless()}, tmp_path / "x.pt")
    with pytest.raises(errors.UnsafeFileError, match=r"add_safe_globals\(\["):
        deepnvme.load(tmp_path / "x.pt")
    with torch.serialization.safe_globals([Harmless]):
        assert deepnvme.load(tmp_path / "x.pt")["x"].value == 5


class Series:
    """Pickled as a call, then its elements and its items."""

    def __init__(self) -> None:
        self.elements: list[Any] = []
        self.named: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Series, (), None, iter(self.elements), iter(self.named.items())

    def append(self, element: Any) -> None:
        self.elements.append(element)

    def __setitem__(self, name: str, value: Any) -> None:
        self.named[name] = value


@pytest.mark.parametrize("lazy", [False, True])
def test_allowed_classes_take_elements_and_items(tmp_path: Path, lazy: bool) -> None:
    series = Series()
    series.append(torch.arange(3))
    series["w"] = torch.ones(2)
    state = {"series": series, "history": deque([1.0, 2.0], maxlen=5)}
    with pytest.warns(UserWarning, match="not known to be safe"):
        deepnvme.save(state, tmp_path / "x.pt")
    with pytest.raises(errors.UnsafeFileError, match="add_safe_globals"):
        deepnvme.load(tmp_path / "x.pt", lazy=lazy)
    with torch.serialization.safe_globals([Series, deque]), warnings.catch_warnings():
        warnings.simplefilter("error")
        deepnvme.save(state, tmp_path / "x.pt")
        loaded = deepnvme.load(tmp_path / "x.pt", lazy=lazy)
    assert loaded["history"] == state["history"]
    assert loaded["history"].maxlen == 5
    assert torch.equal(loaded["series"].elements[0] + 0, torch.arange(3))
    assert torch.equal(loaded["series"].named["w"] + 0, torch.ones(2))


def test_other_classes_take_none(tmp_path: Path) -> None:
    # torch.Size, to which a pickle appends, and whose items it sets.
    for code in (b"K\x01a.", b"X\x01\x00\x00\x00aK\x01s."):
        path = archive(tmp_path / "x.pt", b"\x80\x02ctorch\nSize\n)\x85R" + code)
        with pytest.raises(errors.CorruptFileError, match="which has none"):
            deepnvme.load(path)


def test_states_go_to_allowed_classes_only(tmp_path: Path) -> None:
    for name in (b"torch\nSize", b"collections\nCounter", b"builtins\nset"):
        data = b"\x80\x02c" + name + b"\n)R}X\x01\x00\x00\x00aK\x01sb."
        with pytest.raises(errors.UnsafeFileError, match="state"):
            deepnvme.load(archive(tmp_path / "x.pt", data))


def test_a_size_without_contents_is_refused(tmp_path: Path) -> None:
    for name in (b"bytearray", b"bytes"):
        data = b"\x80\x02cbuiltins\n" + name + b"\n\x8a\x06\x00\x00\x00\x00\x00\x7f\x85R."
        with pytest.raises(errors.UnsafeFileError, match="size"):
            deepnvme.load(archive(tmp_path / "x.pt", data))


@pytest.mark.parametrize("depth", [501, 100_000])
def test_depth_has_a_limit(tmp_path: Path, depth: int) -> None:
    data = b"\x80\x02" + b"]" * depth + b"N" + b"a" * depth + b"."
    with pytest.raises(errors.UnsupportedError, match="500 deep"):
        deepnvme.load(archive(tmp_path / "x.pt", data))


@pytest.mark.parametrize(
    ("data", "word"),
    [
        # Tuples that contain the previous one twice: as a key, in a set, among the arguments of a call.
        (b"\x80\x02})" + b"2\x86" * 60 + b"Ns.", "steps"),
        (b"\x80\x04\x8f()" + b"2\x86" * 60 + b"\x90.", "steps"),
        (b"\x80\x02cbuiltins\nset\n])" + b"2\x86" * 60 + b"a\x85R.", "steps"),
        (b"\x80\x02ctorch\nSize\nq\x00)" + b"2\x86q\x01h\x00h\x01\x85R" * 60 + b".", "steps"),
        # A name of one megabyte above a tensor.
        (b"\x80\x02}X\x00\x00\x10\x00" + b"k" * (1 << 20) + b"TENSORs.", "4096 bytes"),
    ],
)  # fmt: skip
def test_exponential_growth_is_refused(tmp_path: Path, data: bytes, word: str) -> None:
    data = data.replace(b"TENSOR", tensor_pickle()[2:-1])
    path = archive(tmp_path / "x.pt", data, {"data/0": bytes(16)})
    for only in (None, "a"):
        with pytest.raises(errors.UnsupportedError, match=word) as caught:
            deepnvme.load(path, only=only)
        assert caught.value.filename == str(path)


def test_shared_objects_are_built_once(tmp_path: Path) -> None:
    # Lists that contain the previous one twice, and a million lists below a name of one megabyte.
    shared = b"]" + b"q\x00]h\x00ah\x00a" * 200
    many = b"}X\x00\x00\x10\x00" + b"k" * (1 << 20) + b"](" + b"]" * (1 << 20) + b"es"
    data = b"\x80\x02](" + shared + many + tensor_pickle()[2:-1] + b"e."
    path = archive(tmp_path / "x.pt", data, {"data/0": bytes(16)})
    for only in (None, "2*"):
        lists = deepnvme.load(path, only=only)
        assert lists[-1].tolist() == [0, 0, 0, 0]
        assert lists[1][0] is lists[1][1] is lists[0]


def test_objects_made_of_themselves(tmp_path: Path) -> None:
    honest: Any = ([],)
    honest[0].append(honest)
    loaded = deepnvme.load(archive(tmp_path / "x.pt", pickle.dumps({"t": honest}, 2)))["t"]
    assert loaded[0][0] is loaded
    # A tuple of a hundred lists that each contain it: it would be built a hundred times.
    lists = b"".join(b"]q" + bytes([index]) for index in range(100))
    back = b"".join(b"h" + bytes([index]) + b"h\xffa0" for index in range(100))
    data = b"\x80\x02(" + lists + b"tq\xff" + back + b"."
    with pytest.raises(errors.UnsupportedError, match="of themselves"):
        deepnvme.load(archive(tmp_path / "x.pt", data))


def tensor_pickle(
    elements: int = 4, offset: int = 0, shape: str = "(K\x04t", stride: str = "(K\x01t", key: str = "0"
) -> bytes:
    head = b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX"
    return (head + struct.pack("<I", len(key)) + key.encode()
            + b"X\x03\x00\x00\x00cpu\x8a\x08" + struct.pack("<q", elements)
            + b"tQ\x8a\x08" + struct.pack("<q", offset) + shape.encode("latin1") + stride.encode("latin1")
            + b"\x89ccollections\nOrderedDict\n)RtR.")  # fmt: skip


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (tensor_pickle(elements=5), "bytes"),
        (tensor_pickle(elements=2**62), "not a storage|bytes"),
        (tensor_pickle(elements=-4), "not a storage"),
        (tensor_pickle(offset=1), "exceeds its storage"),
        (tensor_pickle(offset=-1), "shape"),
        (tensor_pickle(shape="(K\x05t"), "exceeds its storage"),
        (
            tensor_pickle(
                shape="(\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7ft", stride="(\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7ft"
            ),
            "exceeds its storage",
        ),
        (tensor_pickle(stride="(J\xff\xff\xff\xfft"), "shape"),
        (tensor_pickle(shape="(K\x01K\x04t"), "strides"),
        (tensor_pickle(key="7"), "no record"),
        (tensor_pickle(key="../../etc/passwd"), "no record"),
        (b"\x80\x02X\x05\x00\x00\x00helloQ.", "not a storage"),
    ],
)
def test_inconsistent_tensors_are_refused(tmp_path: Path, data: bytes, word: str) -> None:
    path = archive(tmp_path / "x.pt", data, {"data/0": bytes(range(16))})
    with pytest.raises(errors.CorruptFileError, match=word) as caught:
        deepnvme.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.filename == str(path)


def test_an_honest_tensor_of_another_writer(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", tensor_pickle(), {"data/0": struct.pack("<4f", 1, 2, 3, 4)})
    assert deepnvme.load(path, verify="full").tolist() == [1, 2, 3, 4]


def test_sparse_tensors_with_indices_beyond_their_size(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    coo = torch.sparse_coo_tensor(torch.tensor([[7]]), torch.ones(1), (10,))
    torch.save({"x": coo}, path)
    torch.save({"x": torch.sparse_coo_tensor(torch.tensor([[70]]), torch.ones(1), (10,), check_invariants=False)}, path)
    with pytest.raises(errors.CorruptFileError, match=r"x\.pt.*index"):
        deepnvme.load(path)
    for options in ({"lazy": True}, {"only": "x"}):
        with pytest.raises(errors.CorruptFileError, match="index"):
            deepnvme.load(path, **options)
    with pytest.raises(errors.UnsupportedError, match="meta device"):
        deepnvme.load(path, device="meta")


def test_compressed_and_encrypted_archives(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", b"\x80\x02N.")
        file.writestr("x/data/0", bytes(50 << 20))
    with pytest.raises(errors.UnsupportedError, match="compressed"):
        deepnvme.load(path)


def test_records_that_overlap(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", tensor_pickle(), {"data/0": bytes(16)})
    data = bytearray(path.read_bytes())
    place = data.rfind(b"x/data/0") - 46
    data[place + 42 : place + 46] = struct.pack("<I", 0)  # its header is the pickle's
    path.write_bytes(data)
    with pytest.raises((errors.CorruptFileError, errors.UnsafeFileError)):
        deepnvme.load(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_every_cut_is_found(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    deepnvme.save({"a": torch.randn(3000), "b": torch.randn(10)}, path)
    whole = path.read_bytes()
    chosen = random.Random(1).sample(range(len(whole)), 100)
    for cut in [0, 1, 8, 100, len(whole) - 1, *chosen]:
        path.write_bytes(whole[:cut])
        with pytest.raises((errors.CorruptFileError, errors.UnsupportedError)) as caught:
            deepnvme.load(path)
        assert caught.value.filename == str(path)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_every_changed_byte_is_found_or_harmless(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    state = {"a": torch.randn(3000), "b": torch.randn(10)}
    deepnvme.save(state, path)
    whole = path.read_bytes()
    rng = random.Random(2)
    for place in rng.sample(range(len(whole)), 400):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = deepnvme.load(path, verify="full")
        except (errors.Error, ValueError, KeyError, TypeError):
            continue
        # Padding, names of records, dates: the loaded values are right anyway.
        values = [tensor for tensor in loaded.values() if isinstance(tensor, torch.Tensor)]
        assert len(values) == 2
        assert torch.equal(values[0], state["a"])
        assert torch.equal(values[1], state["b"])


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_damage_is_reported_with_its_offset(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    deepnvme.save({"a": torch.randn(1 << 20), "b": torch.randn(10)}, path)
    data = bytearray(path.read_bytes())
    place = len(data) // 2
    data[place] ^= 4
    path.write_bytes(data)
    deepnvme.load(path, verify="off")
    with pytest.raises(errors.ChecksumError, match="verify='off'") as caught:
        deepnvme.load(path, verify="full")
    assert caught.value.offset is not None
    assert caught.value.offset <= place < caught.value.offset + (1 << 20)


def test_full_verification_needs_checksums(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    deepnvme.save({"a": torch.randn(10)}, path, checksums=False)
    deepnvme.load(path)
    with pytest.raises(ValueError, match="no checksums"):
        deepnvme.load(path, verify="full")


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"\x93NUMPY" + bytes(20), r"numpy\.load"), (b"\x80\x02N.", "bare pickle"), (b"GGUF" + bytes(20), "GGUF"),
     (b"once upon a time", "neither"),
     (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "old format")],
)  # fmt: skip
def test_other_files_are_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(errors.UnsupportedError, match=word):
        deepnvme.load(path)


def test_other_archives_are_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("a.npy", b"")
    with pytest.raises(errors.UnsupportedError, match=r"numpy\.load"):
        deepnvme.load(tmp_path / "x.npz")
    archive(tmp_path / "x.pt", b"\x80\x02N.", {"constants.pkl": b"\x80\x02N."})
    with pytest.raises(errors.UnsupportedError, match=r"torch\.jit\.load"):
        deepnvme.load(tmp_path / "x.pt")
    archive(tmp_path / "x.pt", b"\x80\x02N.", {"byteorder": b"big"})
    with pytest.raises(errors.UnsupportedError, match="big-endian"):
        deepnvme.load(tmp_path / "x.pt")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        deepnvme.load(tmp_path / "none.pt")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        deepnvme.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        deepnvme.save({}, tmp_path / "none" / "x.pt")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}')
    with pytest.raises(errors.CorruptFileError, match="folder"):
        deepnvme.load(tmp_path)


class Colour(enum.Enum):
    RED = 1

    def __reduce_ex__(self, _: Any) -> Any:
        return getattr, (Colour, self.name)


class Reach:
    def __init__(self, kind: type, name: str) -> None:
        self.reached = (kind, name)

    def __reduce__(self) -> Any:
        return getattr, self.reached


def test_getattr_gives_members_of_enumerations_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(2), "colour": Colour.RED}, path)
    with pytest.raises(errors.UnsafeFileError, match="Colour"):
        deepnvme.load(path)
    with torch.serialization.safe_globals([Colour]):
        assert deepnvme.load(path)["colour"] is Colour.RED
        for kind, name in (
            (Colour, "__class__"),
            (Colour, "mro"),
            (torch.Tensor, "numpy"),
            (torch.nn.Parameter, "data"),
        ):
            torch.save(Reach(kind, name), path)
            with pytest.raises(errors.UnsafeFileError, match="getattr"):
                deepnvme.load(path)
