"""Libraries that write and read files, on ``deepnvme.open``."""

import io
import pickle
import tarfile
import zipfile
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


@pytest.mark.parametrize("size", [0, 10, 100_000, 6_000_000])
def test_pickle_and_numpy(path: Path, random_bytes: RandomBytes, size: int) -> None:
    state: dict[str, Any] = {
        "array": np.frombuffer(random_bytes(size), np.uint8),
        "text": "tëxt",
        "numbers": list(range(5000)),
    }
    for protocol in (0, 4, 5):
        with deepnvme.open(path, "wb") as file:
            pickle.dump(state, file, protocol)
        with deepnvme.open(path) as back:
            loaded = pickle.load(back)
        assert np.array_equal(loaded.pop("array"), state["array"])
        assert loaded == {"text": state["text"], "numbers": state["numbers"]}
    with deepnvme.open(path, "wb") as file:
        np.save(file, state["array"])
        np.savez(file, first=state["array"], second=np.arange(10))
    with deepnvme.open(path) as back:
        assert np.array_equal(np.load(back), state["array"])


def test_numpy_archives(path: Path, random_bytes: RandomBytes) -> None:
    arrays: dict[str, Any] = {
        "one": np.frombuffer(random_bytes(1_000_000), np.int32),
        "two": np.arange(10).reshape(2, 5),
    }
    for save in (np.savez, np.savez_compressed):
        with deepnvme.open(path, "wb") as file:
            save(file, **arrays)
        with deepnvme.open(path) as back, np.load(back) as archive:
            assert all(np.array_equal(archive[name], array) for name, array in arrays.items())


def test_zip_and_tar(path: Path, random_bytes: RandomBytes) -> None:
    members = {f"m{index}": random_bytes(index * 70_001) for index in range(8)}
    with deepnvme.open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with deepnvme.open(path) as back, zipfile.ZipFile(back) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in reversed(archive.namelist())} == members
    for mode in ("w", "w:gz"):
        with deepnvme.open(path, "wb") as file, tarfile.open(fileobj=file, mode=mode) as tar:
            for name, data in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        with deepnvme.open(path) as back, tarfile.open(fileobj=back) as tar:
            found = {member.name: tar.extractfile(member).read() for member in tar.getmembers()}  # type: ignore[union-attr]
        assert found == members


def test_text_lines(path: Path) -> None:
    lines = [f"line {number}\n" for number in range(20_000)]
    with deepnvme.open(path, "wb") as file, io.TextIOWrapper(file, "utf-8") as text:
        text.writelines(lines)
    with deepnvme.open(path) as back, io.TextIOWrapper(back, "utf-8") as text:
        assert list(text) == lines
    with deepnvme.open(path) as back:
        assert [line.decode() for line in back] == lines


def test_torch_save_and_load(path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 300).to(torch.bfloat16))
    shared = torch.randn(1000)
    state = {**model.state_dict(), "view": shared[10:20], "base": shared, "step": 3, "empty": torch.empty(0)}
    for zipped in (True, False):
        with deepnvme.open(path, "wb") as file:
            torch.save(state, file, _use_new_zipfile_serialization=zipped)
        loaded = []
        for arguments in ({}, {"weights_only": False}, {"mmap": False, "weights_only": True}):
            with deepnvme.open(path) as back:
                loaded.append(torch.load(back, **arguments))
        loaded.append(torch.load(path))
        for found in loaded:
            assert found.keys() == state.keys()
            assert found["step"] == 3
            for name, tensor in state.items():
                assert not isinstance(tensor, torch.Tensor) or torch.equal(found[name], tensor)
            assert found["view"].untyped_storage().data_ptr() == found["base"].untyped_storage().data_ptr()


def test_safetensors(path: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors.torch")
    tensors = {"a": torch.randn(500, 300), "b": torch.arange(7)}
    with deepnvme.open(path, "wb") as file:
        file.write(safetensors.save(tensors))
    found = safetensors.load_file(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with deepnvme.open(path) as back:
        found = safetensors.load(back.read())
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
