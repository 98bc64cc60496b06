"""``deepnvme inspect`` and ``deepnvme verify``, for people and for scripts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import deepnvme
from deepnvme.integrations.dcp import DeepnvmeWriter


def schema(name: str) -> dict[str, Any]:
    folder = Path(__file__).parents[3] / "docs" / "reference" / "schema"
    loaded: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return loaded


def run(*arguments: str | Path) -> tuple[int, str, str]:
    command: list[str | Path] = [sys.executable, "-m", "deepnvme", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    base = torch.randn(600, 600)
    layers = {f"model.layers.{index}.{kind}": torch.randn(30, 20) for index in range(3) for kind in ("weight", "bias")}
    return {**layers, "model.head": base, "tied.head": base, "half": torch.randn(5).bfloat16()}


def test_inspect_draws_a_tree_with_totals(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    path = tmp_path / "x.pt"
    deepnvme.save(state, path)
    status, out, err = run("inspect", path)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{path}: torch archive, ")
    assert lines[0].endswith("9 tensors, with checksums")
    assert lines[1].split()[:3] == ["model", "7", "tensors,"]
    assert lines[2].split()[:3] == ["layers", "6", "tensors,"]
    assert "model.layers.0" not in out
    assert "shares its storage" in next(line for line in lines if line.split()[0] == "tied.head")
    assert "[5]" in next(line for line in lines if line.split()[0] == "half")
    everything = run("inspect", path, "--all")[1]
    assert everything.count("[30, 20]") == 6


def test_inspect_of_a_name_with_many_parts(tmp_path: Path) -> None:
    name = ".".join("a" * 200_000)
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "deep.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    found = deepnvme.inspect(tmp_path / "deep.safetensors")
    assert [tensor["name"] for file in found["files"] for tensor in file["tensors"]] == [name]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_inspect_for_machines(tmp_path: Path, state: dict[str, torch.Tensor], suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    deepnvme.save(state, path)
    status, out, _ = run("inspect", path, "--json")
    jsonschema.validate(json.loads(out), schema("inspect"))
    (file,) = json.loads(out)["files"]
    assert status == 0
    assert file["file_bytes"] == path.stat().st_size
    found = {tensor["name"]: tensor for tensor in file["tensors"]}
    assert set(found) == set(state)
    content = path.read_bytes()
    for name, tensor in state.items():
        assert found[name]["shape"] == list(tensor.shape)
        assert found[name]["dtype"] == str(tensor.dtype).removeprefix("torch.")
        offset, nbytes = found[name]["offset"], found[name]["bytes"]
        assert torch.equal(
            torch.frombuffer(bytearray(content[offset : offset + nbytes]), dtype=tensor.dtype).view(tensor.shape),
            tensor,
        )


def test_inspect_a_folder_of_shards(tmp_path: Path) -> None:
    deepnvme.save({f"l.{i}": torch.randn(1000) for i in range(4)}, tmp_path / "model.safetensors", max_shard_bytes=5000)
    status, out, _ = run("inspect", tmp_path)
    assert status == 0
    assert "total: 4 files, 4 tensors, 15.62 KiB" in out or "total: 4 files, 4 tensors, 16000 bytes" in out


def test_inspect_a_folder_of_checkpoints(tmp_path: Path) -> None:
    for name in ("b.pt", "a.safetensors"):
        deepnvme.save({name[0]: torch.randn(10)}, tmp_path / name)
    (tmp_path / "notes.txt").write_text("none")
    status, out, err = run("inspect", tmp_path, "--json")
    assert (status, err) == (0, "")
    files = json.loads(out)["files"]
    assert [Path(file["path"]).name for file in files] == ["a.safetensors", "b.pt"]
    assert [Path(file["path"]).name for file in json.loads(run("verify", tmp_path, "--json")[1])["files"]] == [
        "a.safetensors",
        "b.pt",
    ]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_folder_without_a_checkpoint(tmp_path: Path, command: str) -> None:
    for name, remedy in (("notes", "check the path"), ("checkpoint-500", "name its checkpoints: checkpoint-*")):
        (tmp_path / name).mkdir()
        status, out, err = run(command, tmp_path)
        assert status == 1
        assert "no file that ends in one of .safetensors, .pt, .pth, .bin, .ckpt; " + remedy in out + err


def test_verify_tells_sound_files_from_damaged_ones(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    good, bad, torchs = tmp_path / "good.pt", tmp_path / "bad.safetensors", tmp_path / "torch.pt"
    deepnvme.save(state, good)
    deepnvme.save(state, bad)
    torch.save(state, torchs)
    status, out, err = run("verify", good, bad, torchs)
    assert (status, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["sound", "sound", "sound"]
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    status, out, err = run("verify", good, bad, "--json")
    first, second = json.loads(out)["files"]
    assert status == 1
    assert "damaged: 1 of 2" in err
    jsonschema.validate(json.loads(out), schema("verify"))
    assert first["verdict"] == "sound"
    assert first["bytes"] > 600 * 600 * 4
    assert second["verdict"] == "damaged"
    assert "at offset" in second["finding"]
    # Nothing of a damaged file counts as compared, of a list of files as little as of a file.
    assert (second["coverage"], second["bytes"]) == ("nothing", 0)
    deepnvme.save(state, tmp_path / "several.safetensors", max_shard_bytes="1MB")
    index = tmp_path / "several.safetensors.index.json"
    index.write_text(index.read_text().replace("shard", "SHARD").replace('"weight_map"', '"weight_map" ', 1))
    (listed,) = json.loads(run("verify", index, "--json")[1])["files"]
    assert (listed["verdict"], listed["coverage"], listed["bytes"]) == ("damaged", "nothing", 0)


def test_verify_of_a_folder_sees_all_its_files(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    deepnvme.save({"a": torch.randn(30, 20)}, tmp_path / "model.safetensors")
    deepnvme.save({"state": state}, tmp_path / "optimizer.pt")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / ".model.pt").write_text("no checkpoint")
    status, out, _ = run("verify", tmp_path)
    assert status == 0
    assert "optimizer.pt" in out
    data = bytearray((tmp_path / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "optimizer.pt").write_bytes(data)
    status, out, _ = run("verify", tmp_path)
    assert status == 1
    assert "\ndamaged " in out
    (tmp_path / "model.safetensors").unlink()
    assert run("verify", tmp_path)[0] == 1


def test_files_that_cannot_be_verified_or_read(tmp_path: Path) -> None:
    save_file({"a": torch.randn(3)}, tmp_path / "theirs.safetensors")
    (tmp_path / "text").write_text("once upon a time, there was no tensor")
    for path, why in (
        (tmp_path / "theirs.safetensors", "no checksums"),
        (tmp_path / "text", "neither a torch archive"),
    ):
        status, out, err = run("verify", path)
        assert status == 1
        assert out.startswith("unverifiable ")
        assert why in out
        assert "unverifiable: 1 of 1" in err
        (file,) = json.loads(run("verify", path, "--json")[1])["files"]
        assert file["verdict"] == "unverifiable"
    status, out, err = run("inspect", tmp_path / "none.pt")
    assert (status, out) == (1, "")
    assert "none.pt" in err
    assert run("verify")[0] == 2


def test_verify_counts_every_verdict_in_the_words_of_its_lines(tmp_path: Path) -> None:
    names = ["bad.pt", "theirs.safetensors", "none.pt", "good.pt"]
    bad, theirs, _, good = paths = [tmp_path / name for name in names]
    deepnvme.save({"a": torch.randn(300)}, good)
    deepnvme.save({"a": torch.randn(300)}, bad)
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    save_file({"a": torch.randn(3)}, theirs)
    status, out, err = run("verify", *paths)
    assert status == 1
    assert [line.split()[0] for line in out.splitlines()] == ["damaged", "unverifiable", "unreadable", "sound"]
    assert "verify=" not in out, out
    assert "damaged: 1, unreadable: 1, unverifiable: 1, of 4" in err
    found = [file["verdict"] for file in deepnvme.verify(*paths, check=False)["files"]]
    assert found == ["damaged", "unverifiable", "unreadable", "sound"]


def test_inspect_tells_values_and_padding_from_tensors(tmp_path: Path) -> None:
    dcp_save({"a": torch.ones(9), "deep": {"step": 7}}, storage_writer=DeepnvmeWriter(tmp_path / "dcp"), no_dist=True)
    listed = deepnvme.inspect(tmp_path / "dcp")
    jsonschema.validate(dict(listed), schema("inspect"))
    (file,) = listed["files"]
    assert [tensor["name"] for tensor in file["tensors"]] == ["a"]
    assert [value["name"] for value in file["values"]] == ["deep.step"]
    assert file["tensor_bytes"] == 36
    first, _, *lines = str(listed).splitlines()
    assert ", 1 tensor and 1 value, " in first
    assert [line.split()[:2] for line in lines] == [["a", "float32"], ["deep.step", "value"]]
    weights = torch.nn.Parameter(torch.ones(1001))
    optimizer = deepnvme.optim.AdamW([weights], swap_dir=tmp_path, memory="1MB")
    weights.grad = torch.ones(1001)
    optimizer.step()
    optimizer.save_state(tmp_path / "state.safetensors")
    optimizer.close()
    (file,) = deepnvme.inspect(tmp_path / "state.safetensors")["files"]
    names = [tensor["name"] for tensor in file["tensors"]]
    assert names
    assert not any(name.startswith("pad.") for name in names), names
    assert file["tensor_bytes"] == sum(tensor["bytes"] for tensor in file["tensors"])


def test_inspect_lists_the_checkpoints_of_a_checkpointer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with deepnvme.Checkpointer(folder) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"weight": torch.ones(3)})
    files = deepnvme.inspect(folder)["files"]
    assert [Path(file["path"]).name for file in files] == ["step-00000001.pt", "step-00000002.pt"]
    with pytest.raises(deepnvme.errors.NotFoundError, match=r"such as .*run/step-00000002\.pt"):
        deepnvme.convert(folder, tmp_path / "new.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(deepnvme.errors.NotFoundError, match="empty"):
        deepnvme.inspect(tmp_path / "empty")


def test_verify_shows_no_speed_of_a_small_file(tmp_path: Path) -> None:
    deepnvme.save({"step": 1}, tmp_path / "scheduler.pt")
    deepnvme.save({"a": torch.ones(3)}, tmp_path / "small.pt")
    status, out, _ = run("verify", tmp_path / "scheduler.pt", tmp_path / "small.pt")
    assert status == 0
    assert "scheduler.pt: metadata compared; it has no bytes of tensors\n" in out
    assert "small.pt: 12 bytes compared\n" in out


@pytest.mark.parametrize("order", ["same", "reversed"])
def test_an_archive_that_another_program_wrote_anew(tmp_path: Path, state: dict[str, torch.Tensor], order: str) -> None:
    """Its tensors can still be compared, but nothing verifies the offsets of its records."""
    path, anew = tmp_path / "x.pt", tmp_path / "anew.pt"
    deepnvme.save(state, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(anew, "w") as new:
        for record in old.infolist()[:: 1 if order == "same" else -1]:
            new.writestr(record.filename, old.read(record))
    (file,) = json.loads(run("verify", anew, "--json")[1])["files"]
    assert (file["verdict"], file["coverage"]) == ("sound", "data")
    loaded = deepnvme.load(anew, verify="full")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    data = bytearray(anew.read_bytes())
    at = data.index(state["model.head"].numpy().tobytes())
    data[at + 12_345] ^= 4
    anew.write_bytes(data)
    (file,) = json.loads(run("verify", anew, "--json")[1])["files"]
    assert file["verdict"] == "damaged"
    with pytest.raises(deepnvme.errors.ChecksumError, match="CRC"):
        deepnvme.load(anew, verify="full")


def test_the_commands_as_functions(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    path, other = tmp_path / "x.pt", os.fsencode(tmp_path / "y.safetensors")
    deepnvme.save(state, path)
    listed = deepnvme.inspect(path)
    jsonschema.validate(dict(listed), schema("inspect"))
    assert {tensor["name"] for tensor in listed["files"][0]["tensors"]} == set(state)
    assert str(listed) == run("inspect", path)[1]
    assert str(deepnvme.inspect(path, depth=None)) == run("inspect", path, "--all")[1]
    verified = deepnvme.verify(path)
    jsonschema.validate(dict(verified), schema("verify"))
    assert verified["is_sound"]
    assert str(verified).startswith("sound ")
    converted = deepnvme.convert(path, other)
    jsonschema.validate(dict(converted), schema("convert"))
    loaded = deepnvme.load(other)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_verify_raises_unless_all_is_sound(tmp_path: Path, state: dict[str, torch.Tensor]) -> None:
    good, bad, theirs = tmp_path / "good.pt", tmp_path / "bad.pt", tmp_path / "theirs.safetensors"
    deepnvme.save(state, good)
    deepnvme.save(state, bad)
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    save_file(state_of_copies(state), theirs)
    with pytest.raises(deepnvme.errors.ChecksumError, match=r"unverifiable: .*theirs.*\ndamaged: .*bad\.pt"):
        deepnvme.verify(theirs, good, bad)
    for path in (theirs, tmp_path / "none.pt"):
        with pytest.raises(deepnvme.Error, match=path.name) as plain:
            deepnvme.verify(path)
        assert type(plain.value) is (deepnvme.Error if path == theirs else deepnvme.errors.NotFoundError)
    result = deepnvme.verify(good, bad, theirs, check=False)
    assert not result["is_sound"]
    assert [file["verdict"] for file in result["files"]] == ["sound", "damaged", "unverifiable"]


def state_of_copies(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def test_failures_of_the_functions_are_typed(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("once upon a time, there was no tensor")
    for call in (deepnvme.inspect, lambda path: deepnvme.convert(path, tmp_path / "new.pt")):
        with pytest.raises(deepnvme.errors.NotFoundError) as missing:
            call(tmp_path / "none.pt")
        assert missing.value.filename == str(tmp_path / "none.pt")
        with pytest.raises(deepnvme.Error, match="neither a torch archive") as wrong:
            call(tmp_path / "text.pt")
        assert wrong.value.filename == str(tmp_path / "text.pt")
    with pytest.raises(TypeError, match="at least one path"):
        deepnvme.verify()
    with pytest.raises(TypeError, match="check is 1"):
        deepnvme.verify(tmp_path, check=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="depth is 0"):
        deepnvme.inspect(tmp_path, depth=0)
    assert [path.name for path in tmp_path.iterdir()] == ["text.pt"]
