"""A full verification covers every byte: of a file, of an index, and of the choice of files in the index."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import deepnvme
from deepnvme import errors
from deepnvme._deepnvme import StripeSet, _crc64, _run_command
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def changed(path: Path, check: Callable[[], object], *, step: int = 1) -> list[int]:
    """Change each byte in turn. Returns the bytes whose change is not reported."""
    before = path.read_bytes()
    unnoticed = []
    for at in range(0, len(before), step):
        other = before[at] ^ (1 + at * 37 % 255)
        path.write_bytes(before[:at] + bytes([other]) + before[at + 1 :])
        try:
            check()
        except (errors.Error, OSError, ValueError, KeyError):
            continue
        unnoticed.append(at)
    path.write_bytes(before)
    check()
    return unnoticed


def verify(*paths: Path) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "deepnvme", "verify", "--json", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout)["files"] if done.stdout else []


def state_of() -> dict[str, Any]:
    return {"w": torch.arange(6.0).view(2, 3), "e": torch.empty(0, 3), "f": torch.empty(3, 0), "b": torch.ones(5)}


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_any_changed_byte_of_a_file_is_reported(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    deepnvme.save({**state_of(), **({"step": 3} if name == "a.pt" else {})}, path)
    assert changed(path, lambda: deepnvme.load(path, verify="full")) == []
    assert verify(path)[1][0]["coverage"] == "file"


@pytest.mark.parametrize("writer", ["deepnvme", "torch"])
def test_an_archive_without_checksums_loads_only_if_it_verifies(tmp_path: Path, writer: str) -> None:
    """CRC-32s cover records only: some changed bytes in the ZIP headers mean nothing, and nothing reports them."""
    path, state = tmp_path / "a.pt", {**state_of(), "step": 3}
    if writer == "torch":
        torch.save(state, path)
    else:
        deepnvme.save(state, path, checksums=False)
    ways = [
        lambda: deepnvme.load(path, verify="full"),
        lambda: deepnvme.load(path, verify="full", into=state_of()),
        lambda: {name: tensor + 0 for name, tensor in deepnvme.load(path, verify="full", lazy=True).items()},
    ]
    for way in ways:
        unnoticed, whole = changed(path, way, step=7), path.read_bytes()
        for at in unnoticed:
            path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 + at * 37 % 255)]) + whole[at + 1 :])
            assert _run_command(["verify", str(path)]) == 0, at
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"F32"', b'"I32"'), (b"[2,3]", b"[3,2]"), (b"[3,0]", b"[4,0]"), (b'"e"', b'"x"')]
)
def test_a_changed_header_is_reported(tmp_path: Path, old: bytes, new: bytes) -> None:
    path = tmp_path / "a.safetensors"
    deepnvme.save(state_of(), path)
    before = path.read_bytes()
    assert before.count(old) > 0
    path.write_bytes(before.replace(old, new, 1))
    for mode in ("full", "sample"):
        with pytest.raises(errors.ChecksumError, match="the header"):
            deepnvme.load(path, verify=mode)
    deepnvme.load(path, verify="off")
    status, (found,) = verify(path)
    assert (status, found["verdict"]) == (1, "damaged")


def test_any_changed_byte_of_shards_and_their_index_is_reported(tmp_path: Path) -> None:
    state = {f"w{index}": torch.full((300,), float(index)) for index in range(3)}
    deepnvme.save(state, tmp_path / "model.safetensors", max_shard_bytes=2500)
    index = tmp_path / "model.safetensors.index.json"
    assert changed(index, lambda: deepnvme.load(tmp_path, verify="full")) == []
    for shard in tmp_path.glob("*.safetensors"):
        assert changed(shard, lambda: deepnvme.load(tmp_path, verify="full"), step=97) == []
    status, found = verify(tmp_path)
    assert (status, [entry["verdict"] for entry in found]) == (0, ["sound"] * 3)
    index.write_text(index.read_text().replace("total_size", "total_sise"))
    assert verify(tmp_path)[1][0]["verdict"] == "damaged"


def test_a_shard_of_another_save_is_reported(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        state = {f"w{index}": torch.full((300,), value) for index in range(3)}
        deepnvme.save(state, tmp_path / name / "model.safetensors", max_shard_bytes=2500)
    shard, other = (min((tmp_path / name).glob("*.safetensors")) for name in ("one", "other"))
    shard.write_bytes(other.read_bytes())
    for mode in ("full", "sample"):
        with pytest.raises(errors.ChecksumError, match="not the file that its index lists"):
            deepnvme.load(tmp_path / "one", verify=mode)
    with pytest.raises(errors.ChecksumError, match="not the file that its index lists"):
        deepnvme.load(tmp_path / "one", into={"w0": torch.empty(300)}, verify="full")
    assert set(deepnvme.load(tmp_path / "one", verify="off")) == {"w0", "w1", "w2"}
    status, found = verify(tmp_path / "one")
    assert status == 1
    assert sorted(entry["verdict"] for entry in found) == ["damaged", "sound", "sound"]


def test_other_readers_of_an_index_find_their_files(tmp_path: Path) -> None:
    state = {f"w{index}": torch.full((300,), float(index)) for index in range(3)}
    deepnvme.save(state, tmp_path / "model.safetensors", max_shard_bytes=2500)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3600
    # The message says what to remove from an edited index.
    index["weight_map"] = {name: index["weight_map"][name] for name in ("w0", "w1")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    with pytest.raises(errors.ChecksumError) as caught:
        deepnvme.load(tmp_path)
    assert set(deepnvme.load(tmp_path, verify="off")) == {"w0", "w1"}
    keys = re.search(r'remove "(.+)" and "(.+)" from it', str(caught.value))
    assert keys is not None
    for key in keys.groups():
        del index["metadata"][key]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    assert set(deepnvme.load(tmp_path)) == {"w0", "w1"}


@pytest.mark.filterwarnings("ignore")
def test_any_changed_byte_of_a_sharded_folder_is_reported(tmp_path: Path) -> None:
    state = {"w": torch.arange(600.0), "note": "text"}
    dcp_save(state, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)

    def load() -> None:
        target = {"w": torch.zeros(600), "note": ""}
        dcp_load(target, storage_reader=DeepnvmeReader(tmp_path, verify="full"), no_dist=True)

    index = tmp_path / "deepnvme.json"
    assert changed(index, lambda: read_list(tmp_path)) == []
    (shard,) = tmp_path.glob("shard-*")
    assert changed(shard, lambda: run_verify(tmp_path), step=61) == []
    load()
    status, found = verify(tmp_path)
    assert (status, [entry["verdict"] for entry in found]) == (0, ["sound", "sound"])


def read_list(folder: Path) -> None:
    DeepnvmeReader(folder, verify="full").read_metadata()


def run_verify(folder: Path) -> None:
    (shard,) = folder.glob("shard-*")
    deepnvme.load(shard, verify="full")


def test_any_changed_byte_of_the_parts_is_reported(tmp_path: Path) -> None:
    stripes = StripeSet([tmp_path / "a.pt", tmp_path / "b.pt"], stripe_bytes=4096)
    deepnvme.save({"w": torch.arange(3000.0)}, stripes)
    manifest = next(tmp_path.glob("*.stripes.json"))
    named = [tmp_path / part for part in json.loads(manifest.read_text())["parts"]]
    for part in named:
        assert changed(part, lambda: deepnvme.load(stripes, verify="full"), step=53) == []
    assert verify(manifest)[1][0]["verdict"] == "sound"
    before = manifest.read_bytes()
    meaning = meaning_of(before)
    for at in changed(manifest, lambda: deepnvme.load(stripes, verify="full")):
        # The exceptions do not affect the data: white space, and the record of who may remove the parts.
        other = before[at] ^ (1 + at * 37 % 255)
        assert meaning_of(before[:at] + bytes([other]) + before[at + 1 :]) == meaning


def meaning_of(manifest: bytes) -> Any:
    """Return the bytes that a list of parts covers."""
    wire = json.loads(manifest)
    return wire["format"], wire["parts"], wire["stripe_bytes"]


def test_the_files_are_those_that_other_readers_know(tmp_path: Path) -> None:
    state = state_of()
    deepnvme.save(state, tmp_path / "a.pt")
    deepnvme.save(state, tmp_path / "a.safetensors", metadata={"a": "b"})
    torch_loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    stock = load_file(tmp_path / "a.safetensors")
    for name, tensor in state.items():
        assert torch.equal(torch_loaded[name], tensor)
        assert torch.equal(stock[name], tensor)
    with safe_open(tmp_path / "a.safetensors", "pt") as opened:
        assert opened.metadata()["a"] == "b"
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None


def test_files_with_checksums_of_the_first_version(tmp_path: Path) -> None:
    tensor = torch.arange(6.0)
    data, path = tensor.numpy().tobytes(), tmp_path / "a.safetensors"
    (tmp_path / "data").write_bytes(data)
    crc64 = _crc64(tmp_path / "data", 0, len(data))
    for crc, is_sound in ((crc64, True), (crc64 ^ 1, False)):
        sums = {"version": 1, "algorithm": "crc-64/nvme", "cell_bytes": 1 << 20, "records": {"w": f"{crc:016x}"}}
        entry = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}
        text = json.dumps({"__metadata__": {"deepnvme.checksums": json.dumps(sums)}, "w": entry}).encode().ljust(4088)
        path.write_bytes((4088).to_bytes(8, "little") + text + data)
        if is_sound:
            assert torch.equal(deepnvme.load(path, verify="full")["w"], tensor)
            status, (found,) = verify(path)
            assert (status, found["verdict"], found["coverage"]) == (0, "sound", "data")
        else:
            with pytest.raises(errors.ChecksumError):
                deepnvme.load(path, verify="full")


def test_archives_with_checksums_of_the_first_version(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(6.0)}, path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        records = {}
        for name in names:
            (tmp_path / "record").write_bytes(archive.read(name))
            nbytes = (tmp_path / "record").stat().st_size
            records[name.removeprefix("a/")] = f"{_crc64(tmp_path / 'record', 0, nbytes):016x}" if nbytes else ""
    sums = {"version": 1, "algorithm": "crc-64/nvme", "cell_bytes": 1 << 20, "records": records}
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("a/deepnvme/checksums.json", json.dumps(sums))
    assert torch.equal(deepnvme.load(path, verify="full")["w"], torch.arange(6.0))
    status, (found,) = verify(path)
    assert (status, found["coverage"]) == (0, "data")


def test_metadata_of_our_own_files_can_be_given_again(tmp_path: Path) -> None:
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    deepnvme.save(state_of(), first, metadata={"mine": "1"})
    with safe_open(first, "pt") as opened:
        metadata = opened.metadata()
    assert "deepnvme.checksums" in metadata
    deepnvme.save({"w": torch.ones(3)}, second, metadata=metadata)
    assert torch.equal(deepnvme.load(second, verify="full")["w"], torch.ones(3))
    with safe_open(second, "pt") as opened:
        assert opened.metadata()["mine"] == "1"
    # Another program copies the metadata, so the checksums are those of another file.
    save_file({"w": torch.zeros(2, 3)}, second, metadata=metadata)
    with pytest.warns(UserWarning, match="made for another file"):
        assert torch.equal(deepnvme.load(second)["w"], torch.zeros(2, 3))
    with (
        pytest.warns(UserWarning, match="made for another file"),
        pytest.raises(ValueError, match="made for another file"),
    ):
        deepnvme.load(second, verify="full")
    status, (found,) = verify(second)
    assert (status, found["verdict"]) == (1, "unverifiable")
    # Damage to a file of deepnvme is still reported.
    for at in (4096, 4100):
        damaged = bytearray(first.read_bytes())
        damaged[at] ^= 1
        first.write_bytes(damaged)
        with pytest.raises(errors.ChecksumError):
            deepnvme.load(first, verify="full")


def reported(path: Path, texts: Iterable[bytes]) -> list[int]:
    """Verify a list or part with other contents. Returns those that pass."""
    before, unnoticed = path.read_bytes(), []
    name = next(path.parent.glob("*.stripes.json"))
    for number, text in enumerate(texts):
        path.write_bytes(text)
        if _run_command(["verify", "--json", str(name)]) == 0:
            unnoticed.append(number)
    path.write_bytes(before)
    assert _run_command(["verify", "--json", str(name)]) == 0
    return unnoticed


def changes(text: bytes, step: int) -> Iterable[bytes]:
    """Change a byte at every position; insert and remove one at every fifth, which shifts all that follow."""
    for at in range(0, len(text), step):
        yield text[:at] + bytes([text[at] ^ (1 + at * 37 % 255)]) + text[at + 1 :]
    for at in range(0, len(text), 5 * step):
        yield text[:at] + bytes([at * 41 % 256]) + text[at:]
        yield text[:at] + text[at + 1 :]
    yield text + b"\0"
    yield b""


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_any_change_of_a_checkpoint_in_parts_is_reported(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    parts = deepnvme.StripeSet([tmp_path / f"{name}.{number}" for number in range(3)], stripe_bytes=4096)
    deepnvme.save({**state_of(), "w": torch.randn(5000)}, parts)
    manifest = Path(parts.manifest_path)
    assert reported(manifest, changes(manifest.read_bytes(), 1)) == []
    for part in StripeSet.from_manifest(manifest).paths:
        assert reported(Path(part), changes(Path(part).read_bytes(), 97)) == []
    # Each of those runs reported it.
    said = capfd.readouterr().out
    assert '"damaged"' in said
    assert "does not match" in said


def test_an_edited_list_of_parts(tmp_path: Path) -> None:
    """A disk is mounted elsewhere: the message says how to use the list again."""
    state, parts = state_of(), [tmp_path / "one" / "a.pt", tmp_path / "two" / "a.pt"]
    for part in parts:
        part.parent.mkdir()
    made = deepnvme.StripeSet(parts, stripe_bytes=4096)
    deepnvme.save(state, made)
    (tmp_path / "two").rename(tmp_path / "elsewhere")
    path = Path(made.manifest_path)
    path.write_text(path.read_text().replace("/two/", "/elsewhere/"))
    with pytest.raises(errors.CorruptFileError, match=r'remove "deepnvme.checksum" .* "version" 1') as caught:
        deepnvme.load(path)
    assert caught.value.filename == str(path)
    with pytest.raises(errors.InvalidArgumentError, match="does not match"):
        deepnvme.save(state, made)
    wire = json.loads(path.read_text())
    del wire["deepnvme.checksum"]
    path.write_text(json.dumps(wire))
    with pytest.raises(errors.CorruptFileError, match="no checksum"):
        deepnvme.load(path)
    path.write_text(json.dumps({**wire, "version": 1}))
    assert torch.equal(deepnvme.load(path, verify="full")["w"], state["w"])
    assert _run_command(["verify", str(path)]) == 0
