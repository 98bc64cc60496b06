"""Pickles that are reached in other ways than by `deepnvme.load` run no code, and tensors are never unpickled."""

from __future__ import annotations

import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import deepnvme
from deepnvme import errors
from deepnvme.integrations._torch_load import load_as_torch
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

from .states import assert_same
from .test_hostile import Harmless, Runs

pytestmark = pytest.mark.filterwarnings("ignore")


def loaded(folder: Path, target: dict[str, Any], **options: Any) -> dict[str, Any]:
    load(target, storage_reader=DeepnvmeReader(folder), no_dist=True, **options)
    return target


def failure(folder: Path, target: dict[str, Any], **options: Any) -> BaseException:
    """Return the error of a load."""
    with pytest.raises(CheckpointException) as caught:
        loaded(folder, target, **options)
    return caught.value.failures[0][0]


def pickled(obj: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(obj, buffer)
    return buffer.getvalue()


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Write an index without checksums, as an attacker would."""
    wire = {key: value for key, value in index.items() if not key.startswith("deepnvme.")}
    (folder / "deepnvme.json").write_text(json.dumps(wire))


def as_bytes(folder: Path, name: str, content: bytes) -> None:
    """List an entry as a non-tensor value in the index and the shard."""
    index = json.loads((folder / "deepnvme.json").read_text())
    index["entries"][name] = {"bytes": ["shard-00009-00000000000000000000000000000000.safetensors", name]}
    write_index(folder, index)
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    save_file({name: tensor}, folder / "shard-00009-00000000000000000000000000000000.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save({"a": torch.ones(3), "cfg": 5}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    return tmp_path


def test_an_object_of_a_distributed_checkpoint_runs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for attack in (Runs(os.system, "touch owned"), [Runs(eval, "open('owned', 'w')")]):
        as_bytes(folder, "cfg", pickled(attack))
        for planner in (DefaultLoadPlanner(), DefaultLoadPlanner(flatten_state_dict=False)):
            error = failure(folder, {"a": torch.zeros(3), "cfg": 0}, planner=planner)
            assert isinstance(error, errors.UnsafeFileError)
            assert re.search(r"shard-00009.*cfg.*asks for", str(error))
    assert not (folder / "owned").exists()


def test_the_allow_list_is_named_and_counts(folder: Path) -> None:
    as_bytes(folder, "cfg", pickled(Harmless()))
    error = failure(folder, {"cfg": 0})
    assert isinstance(error, errors.UnsafeFileError)
    assert "add_safe_globals" in str(error)
    with torch.serialization.safe_globals([Harmless]):
        assert loaded(folder, {"cfg": 0})["cfg"].value == 5


def test_non_tensor_values_are_restored(tmp_path: Path) -> None:
    state = {
        "step": 7, "lr": 1e-4, "note": "text", "none": None, "flags": (True, {1, 2}, frozenset({3})),
        "nested": {"list": [1, OrderedDict(b=2)], "dtype": torch.bfloat16, "size": torch.Size([1, 2])},
        "tuple with a tensor": (torch.arange(4), "x"), "bytes": b"\xff\x00",
    }  # fmt: skip
    save(state, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    target: dict[str, Any] = dict.fromkeys(state, 0)
    target["nested"] = {"list": [0, OrderedDict(b=0)], "dtype": 0, "size": 0}
    assert_same(loaded(tmp_path, target), state)


class OwnPlanner(DefaultLoadPlanner):
    """Unpickles by itself, as planners may."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)
        self.original_state_dict.update(self.state_dict)


def test_planners_never_unpickle_bytes_of_the_file(folder: Path) -> None:
    assert loaded(folder, {"cfg": 0}, planner=OwnPlanner())["cfg"] == 5
    as_bytes(folder, "cfg", pickled(Runs(os.system, "true")))
    assert isinstance(failure(folder, {"cfg": 0}, planner=OwnPlanner()), errors.UnsafeFileError)


def test_tensors_are_never_unpickled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    # Harmless or not, the state has a tensor there.
    for made in (Runs(os.system, "touch owned"), torch.ones(3), 5):
        as_bytes(folder, "a", pickled(made))
        error = failure(folder, {"a": torch.zeros(3)})
        assert isinstance(error, errors.CorruptFileError)
        assert re.search(r"deepnvme\.json.*'a'", str(error))
    assert not (folder / "owned").exists()


def test_a_tensor_is_not_loaded_as_an_object(folder: Path) -> None:
    error = failure(folder, {"a": 5, "cfg": 0})
    assert re.search(r"'?a\b", str(error))


def test_an_index_that_lists_tensors_as_objects_is_refused(tmp_path: Path) -> None:
    inner = tmp_path / "made"
    save({"a": torch.ones(3), "cfg": 5}, storage_writer=DeepnvmeWriter(inner), no_dist=True)
    as_bytes(inner, "a", pickled(Runs(os.system, f"touch {tmp_path}/owned")))
    inner.rename(tmp_path / "step-00000007")
    path = tmp_path / "step-00000007" / "deepnvme.json"
    entry = {
        "file": "step-00000007", "step": 7, "nbytes": 1, "time": "", "index_offset": 0,
        "index_nbytes": path.stat().st_size, "torch": "", "deepnvme": "",
        "index_crc64": f"{deepnvme._deepnvme._crc64(path, 0, path.stat().st_size):016x}",
    }  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps({"version": 1, "checkpoints": [entry]}))
    with deepnvme.Checkpointer(tmp_path) as checkpointer, pytest.raises(errors.CorruptFileError, match="'a'"):
        checkpointer.restore(into={"a": torch.zeros(3)})
    assert not (tmp_path / "owned").exists()


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["entries"]["a"].update(dtype="__builtins__"),
        lambda index: index["entries"]["a"].update(dtype=5),
        lambda index: index["entries"]["a"].update(size=[-3]),
        lambda index: index["entries"]["a"].update(size=[3.0]),
        lambda index: index["entries"]["a"].update(size=[1 << 70]),
        lambda index: index["entries"]["a"].update(size="3"),
        lambda index: index["entries"]["a"].update(requires_grad="x"),
        lambda index: index["entries"]["a"].update(chunks=[]),
        lambda index: index["entries"]["a"]["chunks"].append(index["entries"]["a"]["chunks"][0]),
        lambda index: index["entries"]["a"]["chunks"][0].__setitem__(1, [2]),
        lambda index: index["entries"]["a"]["chunks"][0].__setitem__(1, [1 << 62]),
        lambda index: index["entries"]["a"]["chunks"][0].__setitem__(0, [1]),
        lambda index: index["entries"]["a"]["chunks"][0].__setitem__(2, ["../x", "a"]),
        lambda index: index["entries"]["a"]["chunks"][0].__setitem__(2, [5, "a"]),
        lambda index: index["entries"]["a"]["chunks"][0].__setitem__(2, [["a"], {}]),
        lambda index: index["entries"].update(a=[]),
        lambda index: index["entries"].update(a=None),
        lambda index: index.update(entries=[]),
        lambda index: index["planner_data"].update(a=["a", 10**12]),
        lambda index: index["planner_data"].update(a=[]),
        lambda index: index["planner_data"].update(a=[{}]),
        lambda index: index["planner_data"].update(a=[-1]),
        lambda index: index["planner_data"].update(a=7),
        lambda index: index.update(planner_data=[1]),
    ],
)
def test_a_contradictory_index_is_corrupt(folder: Path, change: Change) -> None:
    path = folder / "deepnvme.json"
    index = json.loads(path.read_text())
    change(index)
    write_index(folder, index)
    with pytest.raises(errors.CorruptFileError, match=r"deepnvme\.json"):
        DeepnvmeReader(folder).read_metadata()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["entries"]["a"].update(dtype="float33"), "the dtype torch.float33"),
        (lambda index: index["entries"]["a"].update(requires_grad="x"), "requires_grad of a"),
        (lambda index: index["entries"]["a"]["chunks"][0][2].__setitem__(0, "other"), "'other' is not a file"),
        (lambda index: index["entries"]["a"]["chunks"][0][2].__setitem__(1, 5), "5 is not the name of a tensor"),
        (lambda index: index.update(version="1"), "no version number"),
        (lambda index: index.update(version=2), "needs a later deepnvme"),
    ],
)
def test_each_fault_of_an_index_is_named(folder: Path, change: Change, message: str) -> None:
    index = json.loads((folder / "deepnvme.json").read_text())
    change(index)
    write_index(folder, index)
    with pytest.raises(errors.CorruptFileError, match=message):
        DeepnvmeReader(folder).read_metadata()


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"\xff\xfe", b'{"version": 1, "entries": {"a": {}}, "planner_data": null}']
)
def test_a_file_that_is_not_an_index_is_corrupt(folder: Path, text: bytes) -> None:
    (folder / "deepnvme.json").write_bytes(text)
    with pytest.raises(errors.CorruptFileError, match=r"deepnvme\.json"):
        DeepnvmeReader(folder).read_metadata()


def test_an_index_that_is_no_file(folder: Path) -> None:
    (folder / "deepnvme.json").unlink()
    os.mkfifo(folder / "deepnvme.json")
    with pytest.raises(errors.Error, match=r"deepnvme\.json.*regular file"):
        DeepnvmeReader(folder).read_metadata()


@pytest.mark.parametrize(
    "other",
    [torch.ones(0, 10**6), torch.ones(2), torch.ones(3, dtype=torch.int32), torch.ones(3, 1), torch.tensor(1.0)],
)
def test_a_shard_that_has_another_tensor(folder: Path, other: torch.Tensor) -> None:
    write_index(folder, json.loads((folder / "deepnvme.json").read_text()))
    (shard,) = folder.glob("shard-*.safetensors")
    save_file({"a": other, "cfg": torch.ones(2, 2)}, shard)
    for state in ({"a": torch.zeros(3)}, {"cfg": 0}):
        error = failure(folder, state)
        assert isinstance(error, errors.CorruptFileError), error
        assert str(shard) in str(error)


def test_files_of_other_programs_are_not_unpickled(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "cfg": 5}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    for content in (b"", b"\x80\x02N.", b"cposix\nsystem\n(S'true'\ntR."):
        as_bytes(tmp_path, "cfg", content)
        assert isinstance(failure(tmp_path, {"cfg": 0}), errors.Error)


def test_a_library_that_asks_for_weights_only_never_calls_torch_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ckpt"
    state = {"a": torch.arange(3), "step": 5}
    deepnvme.save(state, path)
    old, unsafe = tmp_path / "old.ckpt", tmp_path / "unsafe.ckpt"
    torch.save(state, old, _use_new_zipfile_serialization=False)
    torch.save({"a": Runs(os.system, f"touch {tmp_path}/owned")}, unsafe)
    as_torch = torch.load

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch.load was called")

    monkeypatch.setattr(torch, "load", refuse)
    for location in (None, "cpu", torch.device("cpu"), {"cpu": "cpu"}, lambda storage, _: storage, lambda *_: None):
        assert_same(load_as_torch(path, location), state)
        with pytest.raises(errors.UnsafeFileError, match="system"):
            load_as_torch(unsafe, location)
        with pytest.raises(errors.UnsupportedError, match="old format"):
            load_as_torch(old, location)
    monkeypatch.setattr(torch, "load", as_torch)
    assert_same(load_as_torch(old, weights_only=False), state)
    assert not (tmp_path / "owned").exists()


def test_deepspeed_goes_on_without_running_a_pickle(tmp_path: Path) -> None:
    """The safe unpickler reads the file that DeepSpeed itself would not open, with any of DeepSpeed's engines."""
    pytest.importorskip("deepspeed")
    from deepnvme.deepspeed import _workarounds

    path = tmp_path / "tag" / "zero.pt"
    path.parent.mkdir()
    torch.save({"optimizer_state_dict": Runs(os.system, f"touch {tmp_path}/owned")}, path)

    class Trusting:
        def load(self, path: str, map_location: Any = None) -> object:
            return torch.load(path, map_location, weights_only=False)

    class Zero:
        optimizer_swapper = object()

    class Engine:
        optimizer = Zero()
        checkpoint_engine = Trusting()

        def load_universal_checkpoint(self) -> bool:
            return False

        def _get_zero_ckpt_name(self, *_: str) -> str:
            return str(path)

    with pytest.raises(errors.UnsafeFileError, match="system"):
        _workarounds.restore_state(Engine(), str(path))
    assert not (tmp_path / "owned").exists()
