"""``deepnvme verify`` of a ``Checkpointer``'s folder. A damaged manifest changes nothing else."""

from __future__ import annotations

import errno
import json
import random
import re
import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import deepnvme
from deepnvme import errors
from deepnvme._deepnvme import _NewFile, _run_command
from deepnvme.integrations.dcp import DeepnvmeWriter
from ranks import run as run_ranks

from .states import manifest_of_missing
from .test_command import run

if TYPE_CHECKING:
    from pathlib import Path

KINDS = """
with Checkpointer(folder, keep=None, layout="parts") as checkpointer:
    checkpointer.save(1, {"a": torch.arange(300_000.0) + 7})
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
mesh = init_device_mesh("cpu", (world,))
with Checkpointer(folder, keep=None) as checkpointer:
    checkpointer.save(2, {"b": distribute_tensor(torch.arange(5_000.0) - 3, mesh, [Shard(0)])})
answer = None
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(KINDS, 2, folder)
    torch.manual_seed(5)
    for step, format_ in ((3, "pt"), (4, "safetensors")):
        with deepnvme.Checkpointer(folder, keep=None, format=format_) as checkpointer:  # type: ignore[arg-type]
            checkpointer.save(step, {"c": torch.randn(400, 300)})
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "run")


def verified(folder: Path) -> tuple[int, dict[str, Any]]:
    status, out, err = run("verify", folder, "--json")
    assert out, err
    return status, {str(file["path"]).removeprefix(f"{folder}/"): file for file in json.loads(out)["files"]}


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".deepnvme-lock"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_every_kind_of_checkpoint_is_verified(folder: Path) -> None:
    before = contents(folder)
    status, files = verified(folder)
    assert status == 0
    shards = [name for name in before if name.startswith("step-00000002/shard-")]
    assert len(shards) == 2
    assert sorted(files) == sorted(
        [
            "manifest.json",
            "step-00000001.pt.stripes.json",
            "step-00000002/deepnvme.json",
            *shards,
            "step-00000003.pt",
            "step-00000004.safetensors",
        ]
    )
    assert {file["verdict"] for file in files.values()} == {"sound"}
    assert {file["coverage"] for file in files.values()} == {"file"}
    assert sum(file["bytes"] for file in files.values()) > 300_000 * 4 + 5_000 * 4 + 2 * 400 * 300 * 4
    assert contents(folder) == before


def test_a_changed_byte_in_any_file_is_reported(folder: Path) -> None:
    """A byte of a list of parts that no reader uses may change."""
    generator = random.Random(8)
    for name in sorted(contents(folder)):
        path = folder / name
        before = path.read_bytes()
        for _ in range(4):
            flip(path, generator.randrange(len(before)))
            status, files = verified(folder)
            found = {file["verdict"] for file in files.values()}
            assert (status, "damaged" in found) == (1, True) or name.endswith(".stripes.json"), (name, files)
            path.write_bytes(before)


def test_a_checkpoint_that_is_missing_or_another_one(folder: Path) -> None:
    (folder / "step-00000003.pt").unlink()
    deepnvme.save({"c": torch.randn(400, 300)}, folder / "step-00000004.safetensors")
    shutil.rmtree(folder / "step-00000002")
    next(folder.glob("step-00000001.pt.part-*")).unlink()
    status, files = verified(folder)
    assert status == 1
    findings = {name: file["finding"] for name, file in files.items() if file["verdict"] == "damaged"}
    assert sorted(findings) == [
        "step-00000001.pt.stripes.json",
        "step-00000002",
        "step-00000003.pt",
        "step-00000004.safetensors",
    ]
    assert "manifest.json lists it, but it is missing" in findings["step-00000003.pt"]
    assert "manifest.json lists another checkpoint of that name" in findings["step-00000004.safetensors"]
    assert "some of its files are missing" in findings["step-00000001.pt.stripes.json"]


def test_other_checkpoints_of_the_folder_are_verified(folder: Path) -> None:
    deepnvme.save({"moment": torch.randn(1000)}, folder / "optimizer-2.safetensors")
    assert deepnvme.verify(folder)["is_sound"]
    flip(folder / "optimizer-2.safetensors", 1000)
    found = deepnvme.verify(folder, check=False)
    unsound = [file["path"] for file in found["files"] if file["verdict"] != "sound"]
    assert unsound == [str(folder / "optimizer-2.safetensors")]
    names = [file["path"] for file in found["files"]]
    assert len(names) == len(set(names))


def test_a_missing_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no-such\.pt") as raised:
        deepnvme.verify(tmp_path / "no-such.pt")
    assert isinstance(raised.value, deepnvme.Error)


def test_the_cost_of_missing_checkpoints_grows_with_their_number(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(manifest_of_missing(10_000))
    began = time.process_time()
    found = deepnvme.verify(tmp_path, check=False)
    assert len(found["files"]) == 10_000
    # Reading the manifest again for each took minutes.
    assert time.process_time() - began < 20


def test_a_path_through_a_loop_of_links_is_not_damage(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "run"):
        with pytest.raises(deepnvme.Error, match="unreadable: ") as raised:
            deepnvme.verify(path)
        assert raised.value.errno == errno.ELOOP
        assert not isinstance(raised.value, ValueError)


def test_a_damaged_manifest_costs_no_checkpoint(folder: Path) -> None:
    """Readers report it with a remedy. Nothing is written, removed or restored because of it."""
    manifest = folder / "manifest.json"
    sound = manifest.read_bytes()
    saves = deepnvme.Checkpointer(folder, keep=1)
    generator = random.Random(3)
    for _ in range(30):
        at = generator.randrange(len(sound))
        change = generator.choice(["flip", "less", "more"])
        if change == "flip":
            flip(manifest, at)
        else:
            cut = at + 1 if change == "less" else at
            manifest.write_bytes(sound[:at] + (b"" if change == "less" else b"0") + sound[cut:])
        before = contents(folder)
        with pytest.raises(errors.CorruptFileError, match=r"manifest\.json: .*"):
            deepnvme.Checkpointer(folder)
        # This one read the manifest before.
        with pytest.raises(errors.CorruptFileError, match=r"manifest\.json"):
            saves.save(9, {"c": torch.ones(1)})
        status, files = verified(folder)
        assert (status, [*files]) == (1, ["manifest.json"])
        assert files["manifest.json"]["verdict"] == "damaged"
        assert contents(folder) == before
        manifest.write_bytes(sound)
    assert verified(folder)[0] == 0


def test_a_manifest_that_somebody_edited_on_purpose(folder: Path) -> None:
    """The message says how to accept the edit, and the next save seals the manifest again."""
    manifest = folder / "manifest.json"
    wire = json.loads(manifest.read_bytes())
    wire["checkpoints"] = [entry for entry in wire["checkpoints"] if entry["step"] != 4]
    manifest.write_text(json.dumps(wire, indent=2))
    with pytest.raises(errors.CorruptFileError) as caught:
        deepnvme.Checkpointer(folder)
    key = re.search(r'remove "([^"]+)" from it', str(caught.value))
    assert key is not None
    del wire[key[1]]
    manifest.write_text(json.dumps(wire, indent=2))
    assert verified(folder)[0] == 0
    with deepnvme.Checkpointer(folder, keep=None) as checkpointer:
        assert [one.step for one in checkpointer.checkpoints] == [1, 2, 3]
        checkpointer.save(5, {"c": torch.ones(3)})
    status, files = verified(folder)
    assert (status, files["manifest.json"]["coverage"]) == (0, "file")
    # It is not listed, so it is a foreign file.
    assert (folder / "step-00000004.safetensors").exists()


def test_a_model_next_to_another_programs_manifest(tmp_path: Path) -> None:
    deepnvme.save({"a": torch.randn(5)}, tmp_path / "model.safetensors")
    (tmp_path / "manifest.json").write_text('{"files": ["model.safetensors"]}')
    status, files = verified(tmp_path)
    assert (status, [*files]) == (0, ["model.safetensors"])


@pytest.mark.parametrize("gone", ["folder", "missing"])
def test_a_path_that_cannot_be_read_hides_no_other(tmp_path: Path, gone: str) -> None:
    good, bad = tmp_path / "good.pt", tmp_path / "bad.pt"
    (tmp_path / "folder").mkdir()
    for path in (good, bad):
        deepnvme.save({"a": torch.randn(3000)}, path)
    data = bytearray(bad.read_bytes())
    data[5000] ^= 1
    bad.write_bytes(data)
    status, out, _ = run("verify", bad, tmp_path / gone, good, "--json")
    found = {file["path"]: file["verdict"] for file in json.loads(out)["files"]}
    assert (status, found) == (1, {str(bad): "damaged", str(tmp_path / gone): "unreadable", str(good): "sound"})
    status, out, err = run("verify", good, tmp_path / gone)
    assert (status, out.count("\n")) == (1, 2)
    assert "unreadable: 1 of 2" in err
    status, out, err = run("verify", tmp_path / gone)
    assert (status, "unreadable: 1 of 1" in err) == (1, True)
    assert gone in out
    status, out, _ = run("verify", tmp_path / gone, "--json")
    assert (status, [file["verdict"] for file in json.loads(out)["files"]]) == (1, ["unreadable"])


def sharded(folder: Path, name: str = "model.safetensors") -> list[Path]:
    tensors = {f"x{index}": torch.randn(30_000) for index in range(4)}
    deepnvme.save(tensors, folder / name, max_shard_bytes=130_000)
    return sorted(folder.glob(name.replace(".", "-0*.")))


@pytest.mark.parametrize("name", ["model.safetensors", "ema.safetensors"])
@pytest.mark.parametrize("gone", ["one", "all", "link"])
def test_a_missing_file_of_a_list_in_a_folder_is_damage(tmp_path: Path, name: str, gone: str) -> None:
    shards = sharded(tmp_path, name)
    assert len(shards) == 4
    deepnvme.save({"a": torch.ones(9)}, tmp_path / "optimizer.pt")
    assert verified(tmp_path)[0] == 0
    missing = shards if gone == "all" else shards[1:2]
    for shard in missing:
        shard.unlink()
        if gone == "link":
            shard.symlink_to("pruned")
    status, files = verified(tmp_path)
    damaged = {path for path, file in files.items() if file["verdict"] == "damaged"}
    assert (status, damaged) == (1, {shard.name for shard in missing})
    assert files["optimizer.pt"]["verdict"] == "sound"
    for shard in missing:
        finding = "some of its files" if gone == "link" else f"{name}.index.json lists it, but it is missing"
        assert finding in files[shard.name]["finding"]


def test_a_list_of_another_save_is_damage(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    sharded(tmp_path / "a")
    sharded(tmp_path / "b")
    (tmp_path / "a" / "model.safetensors.index.json").replace(tmp_path / "b" / "model.safetensors.index.json")
    status, files = verified(tmp_path / "b")
    assert (status, "damaged" in {file["verdict"] for file in files.values()}) == (1, True)


@pytest.mark.filterwarnings("ignore")
def test_a_missing_shard_of_a_distributed_checkpoint_is_damage(tmp_path: Path) -> None:
    dcp_save({"a": torch.ones(9)}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    deepnvme.save({"a": torch.ones(9)}, tmp_path / "loose.pt")
    (shard,) = tmp_path.glob("shard-*")
    shard.unlink()
    status, files = verified(tmp_path)
    assert (status, files[shard.name]["verdict"]) == (1, "damaged")
    assert "deepnvme.json lists it, but it is missing" in files[shard.name]["finding"]


@pytest.mark.parametrize("what", ["packed", "link", "stripes"])
def test_an_unreadable_file_of_a_folder_is_a_result(tmp_path: Path, what: str) -> None:
    deepnvme.save({"a": torch.ones(9)}, tmp_path / "loose.pt")
    if what == "stripes":
        (tmp_path / "a").mkdir()
        stripes = deepnvme.StripeSet([tmp_path / "ema.pt", tmp_path / "a" / "ema.pt"])
        deepnvme.save({"a": torch.randn(3_000_000)}, stripes)
        assert verified(tmp_path)[0] == 0
        next((tmp_path / "a").glob("ema.pt*")).unlink()
        bad = "ema.pt.stripes.json"
    else:
        bad = "packed.safetensors" if what == "packed" else "ema.pt"
        (tmp_path / bad).symlink_to("pruned")
    status, files = verified(tmp_path)
    assert (status, files[bad]["verdict"], files["loose.pt"]["verdict"]) == (1, "unreadable", "sound")


@pytest.mark.filterwarnings("ignore")
def test_a_list_that_was_cut_is_named(tmp_path: Path) -> None:
    dcp_save({"a": torch.ones(9)}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    path = tmp_path / "deepnvme.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert _run_command(["verify", str(tmp_path)]) == 1
    path.write_bytes(b"")
    status, out, _ = run("verify", tmp_path)
    assert status == 1
    assert f"damaged      {path}" in out


@pytest.mark.parametrize("pending", ["all", "list", "parts"])
def test_a_checkpoint_in_parts_that_has_private_names_still(folder: Path, pending: str) -> None:
    """As between the commit of the manifest and the renames, or after a killed writer."""
    manifest = folder / "manifest.json"
    wire = json.loads(manifest.read_bytes())
    (entry,) = (entry for entry in wire["checkpoints"] if entry["step"] == 1)
    names = [part["file"] for part in entry["parts"]] if pending != "list" else []
    names += [entry["file"]] if pending != "parts" else []
    for name in names:
        made = _NewFile(folder / name, 0, None)
        private = made.temporary.name
        del made
        entry.setdefault("pending", {})[name] = private
        (folder / name).rename(folder / private)
    wire = {key: value for key, value in wire.items() if "checksum" not in key}
    manifest.write_text(json.dumps(wire))
    status, files = verified(folder)
    listed = entry["pending"].get(entry["file"], entry["file"])
    assert (status, files[listed]["verdict"], files[listed]["coverage"]) == (0, "sound", "file")
    assert files[listed]["bytes"] == 300_000 * 4
    part = folder / entry["pending"].get(entry["parts"][-1]["file"], entry["parts"][-1]["file"])
    flip(part, 5_000)
    status, files = verified(folder)
    assert (status, files[listed]["verdict"]) == (1, "damaged")
    part.unlink()
    status, files = verified(folder)
    assert (status, files[listed]["verdict"]) == (1, "damaged")
    assert "some of its files are missing" in files[listed]["finding"]
