"""A tensor that an index lists and its file lacks is an error for every reader, never silently omitted."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deepnvme
from deepnvme._deepnvme import _run_command
from deepnvme.errors import CorruptFileError
from deepnvme.integrations.weights import iterate_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PACKED_WIDTH = 512  # smaller tensors are not packed
INDEX = "model.safetensors.index.json"


def layers(width: int = 64) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def without(folder: Path, missing: str) -> Path:
    """Write a model like other programs do, without checksums, and leave one tensor out of its file."""
    state = layers().state_dict()
    weight_map = {name: f"model-0000{1 + (index >= 4)}-of-00002.safetensors" for index, name in enumerate(state)}
    for file in set(weight_map.values()):
        there = {name: state[name] for name in state if weight_map[name] == file and name != missing}
        save_file(there, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / weight_map[missing]


READERS: dict[str, Callable[[Path], object]] = {
    "load": deepnvme.load,
    "load without checks": lambda folder: deepnvme.load(folder, verify="off"),
    "load of another tensor": lambda folder: deepnvme.load(folder, only="2.bias"),
    "load lazily": lambda folder: deepnvme.load(folder, lazy=True),
    "load into": lambda folder: deepnvme.load(folder, into={"2.bias": torch.empty(64)}),
    "iterate_weights": lambda folder: next(iterate_weights(folder)),
    "stream": lambda folder: deepnvme.stream(layers(), weights=folder, memory="1MB"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_missing_tensor_is_an_error(tmp_path: Path, reader: str) -> None:
    damaged = without(tmp_path, "2.weight")
    with pytest.raises(CorruptFileError, match=r"no tensor \"2\.weight\"") as caught:
        READERS[reader](tmp_path)
    assert str(caught.value.filename) == str(damaged)


@pytest.mark.parametrize("command", ["inspect", "verify", "pack", "convert"])
def test_commands_name_it(tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    without(folder, "3.bias")
    target = {"pack": [str(tmp_path / "packed")], "convert": [str(tmp_path / "new.safetensors")]}
    assert _run_command([command, str(folder), *target.get(command, [])]) == 1
    said = capfd.readouterr()
    assert "3.bias" in said.out + said.err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_file_itself_still_loads(tmp_path: Path) -> None:
    damaged = without(tmp_path, "2.weight")
    assert "2.weight" not in deepnvme.load(damaged)


def test_two_files_with_one_tensor_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    deepnvme.save({"x": torch.randn(3), "y": torch.randn(3)}, paths[0])
    deepnvme.save({"y": torch.randn(3)}, paths[1])
    with pytest.raises(ValueError, match=r"b\.safetensors: the tensor 'y' is in .*a\.safetensors"):
        iterate_weights(paths)
    assert {name for name, _ in iterate_weights(paths[:1])} == {"x", "y"}


def verified(path: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    capfd.readouterr()
    status = _run_command(["verify", str(path), "--json"])
    return status, json.loads(capfd.readouterr().out)["files"]


def test_an_index_without_a_checksum_is_unverified(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    deepnvme.save(layers().state_dict(), tmp_path / "model.safetensors", max_shard_bytes=40_000)
    status, files = verified(tmp_path, capfd)
    assert (status, {file["verdict"] for file in files}) == (0, {"sound"})
    index = tmp_path / INDEX
    wire = json.loads(index.read_text())
    del wire["metadata"], wire["weight_map"]["0.bias"]
    index.write_text(json.dumps(wire))
    status, files = verified(tmp_path, capfd)
    assert status == 1
    assert [file["verdict"] for file in files] == ["unverifiable", *["sound"] * (len(files) - 1)]
    assert "so it may lack tensors" in files[0]["finding"]


def packed(tmp_path: Path, *options: str) -> Path:
    source, target = tmp_path / "model", tmp_path / "packed"
    source.mkdir()
    state = {name: value.bfloat16() for name, value in layers(PACKED_WIDTH).state_dict().items()}
    deepnvme.save(state, source / "model.safetensors")
    assert _run_command(["pack", str(source), str(target), "--dtype", "lossless", *options]) == 0
    return target


@pytest.mark.parametrize("is_striped", [False, True])
def test_inspect_knows_packed_folders(tmp_path: Path, is_striped: bool, capfd: pytest.CaptureFixture[str]) -> None:
    disks = [str(tmp_path / "one"), str(tmp_path / "two")]
    for disk in disks:
        (tmp_path / disk).mkdir()
    target = packed(tmp_path, *(["--disks", *disks] if is_striped else []))
    capfd.readouterr()
    assert _run_command(["inspect", str(target), "--json"]) == 0
    (file,) = json.loads(capfd.readouterr().out)["files"]
    assert {tensor["name"] for tensor in file["tensors"]} >= {"0.weight", "3.bias"}


def test_a_packed_model_without_its_metadata_is_named(tmp_path: Path) -> None:
    target = packed(tmp_path)
    path = target / "packed.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = {}
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(content[:8] + text + content[8 + length :])
    with pytest.raises(CorruptFileError, match="does not say how the weights are packed"):
        deepnvme.stream(layers(PACKED_WIDTH).bfloat16(), weights=target, memory="9MB")


@pytest.mark.parametrize("form", ["safetensors", "pt", "packed"])
def test_stream_compares_weights_with_checksums(tmp_path: Path, form: str) -> None:
    model = layers(PACKED_WIDTH).bfloat16()
    path = tmp_path / f"weights.{form}"
    if form == "packed":
        path = packed(tmp_path) / "packed.safetensors"
    else:
        deepnvme.save(model.state_dict(), path)
    deepnvme.stream(model, weights=path, memory="9MB", verify="full").streaming.close()
    content = bytearray(path.read_bytes())
    place = len(content) - 700 if form != "pt" else 8192
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(deepnvme.errors.ChecksumError):
        deepnvme.stream(model, weights=path, memory="9MB", verify="full")
    deepnvme.stream(model, weights=path, memory="9MB", verify="off").streaming.close()


def test_stream_says_when_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    without(tmp_path, "2.weight")
    save_file(layers().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no checksums"):
        deepnvme.stream(layers(), weights=tmp_path / "model.safetensors", memory="1MB", verify="full")
    deepnvme.stream(layers(), weights=tmp_path / "model.safetensors", memory="1MB").streaming.close()
    with pytest.raises(ValueError, match="verify is 'all'"):
        deepnvme.stream(layers(), weights=tmp_path, memory="1MB", verify="all")  # type: ignore[arg-type]
    shutil.rmtree(tmp_path)
