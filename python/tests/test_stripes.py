"""``StripeSet``: several disks as one file."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme import errors, optim
from deepnvme.integrations.weights import iterate_weights

RandomBytes = Callable[[int], bytes]


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"nvme{index}" for index in range(3)]
    for folder in folders:
        folder.mkdir()
    return [folder / "part" for folder in folders]


@pytest.mark.parametrize("size", [0, 1, 8192, 8193, 100_001, 3_000_000])
def test_the_bytes_are_laid_out_as_raid_0_does(
    engine: deepnvme.Engine, parts: list[Path], random_bytes: RandomBytes, size: int
) -> None:
    stripes, data = deepnvme.StripeSet(parts, stripe_bytes=8192), random_bytes(size)
    assert engine.write(data, stripes) == size
    expected = [b"", b"", b""]
    for index, start in enumerate(range(0, size, 8192)):
        expected[index % 3] += data[start : start + 8192]
    assert [part.read_bytes() for part in parts] == expected
    target = bytearray(size)
    assert engine.read(target, stripes) == size
    assert target == data


def test_offsets_and_batches(engine: deepnvme.Engine, parts: list[Path], random_bytes: RandomBytes) -> None:
    stripes, data = deepnvme.StripeSet(parts, stripe_bytes=4096), bytearray(random_bytes(200_001))
    engine.write(data, stripes)
    for offset, length in ((0, 1), (4095, 2), (5000, 90_001), (200_000, 30_000)):
        patch = random_bytes(length)
        data[offset : offset + length] = patch
        engine.start_write(patch, stripes, offset).result()
    target = np.zeros(len(data), np.uint8)
    engine.read_batch([(stripes, 0, target[:77_777]), (stripes, 77_777, target[77_777:])])
    assert target.tobytes() == data
    with pytest.raises(EOFError):
        engine.read(bytearray(10), stripes, len(data) - 5)
    engine.write(b"12345", stripes)
    assert sum(part.stat().st_size for part in parts) == 5


def test_the_manifest_names_the_set(parts: list[Path], random_bytes: RandomBytes) -> None:
    stripes, data = deepnvme.StripeSet(map(str, parts), stripe_bytes=16384), random_bytes(100_000)
    assert stripes.manifest_path == f"{parts[0]}.stripes.json"
    with pytest.raises(FileNotFoundError):
        deepnvme.StripeSet.from_manifest(stripes.manifest_path)
    deepnvme.write(data, stripes)
    manifest = json.loads(Path(stripes.manifest_path).read_text())
    assert manifest["stripe_bytes"] == 16384
    back = deepnvme.StripeSet.from_manifest(os.fsencode(stripes.manifest_path))
    assert (back.paths, back.stripe_bytes) == (tuple(map(str, parts)), 16384)
    target = bytearray(100_000)
    deepnvme.read(target, stripes.manifest_path)
    assert target == data
    target = bytearray(100_000)
    deepnvme.read(target, deepnvme.StripeSet(parts, stripe_bytes=4096))
    assert target == data, "the manifest knows how the parts were striped"
    with pytest.raises(ValueError, match="written over 3 parts, and is opened with 2") as caught:
        deepnvme.read(target, deepnvme.StripeSet(parts[:2], stripe_bytes=16384))
    assert isinstance(caught.value, deepnvme.Error)
    Path(stripes.manifest_path).write_text("{}")
    with pytest.raises(ValueError, match="not a stripe manifest"):
        deepnvme.StripeSet.from_manifest(stripes.manifest_path)


def test_the_folder_of_a_stripe_set_leads_to_the_manifest(parts: list[Path], tmp_path: Path) -> None:
    deepnvme.save({"a": torch.ones(3)}, deepnvme.StripeSet(parts))
    calls: tuple[Callable[[Path], object], ...] = (
        deepnvme.load,
        lambda path: deepnvme.convert(path, tmp_path / "converted.pt"),
        iterate_weights,
    )
    for call in calls:
        with pytest.raises(errors.NotFoundError, match=r"manifest of its stripe set: .*part\.stripes\.json"):
            call(parts[0].parent)


def test_the_name_of_the_first_part_leads_to_the_manifest(parts: list[Path]) -> None:
    deepnvme.save({"a": torch.ones(3)}, deepnvme.StripeSet(parts))
    for call in (deepnvme.load, lambda path: deepnvme.read(np.empty(1), path)):
        with pytest.raises(
            errors.NotFoundError, match=r"part\.stripes\.json is the manifest of a stripe set; open that"
        ):
            call(parts[0])


def test_a_set_is_a_value() -> None:
    first, same = deepnvme.StripeSet(["a", "b"]), deepnvme.StripeSet([Path("a"), b"b"])
    other = deepnvme.StripeSet(["a", "b"], stripe_bytes=4096)
    assert first == same != other
    assert first.stripe_bytes == 1 << 20
    assert len({first, same, other}) == 2
    assert pickle.loads(pickle.dumps(other)) == other
    assert eval(repr(other), {"StripeSet": deepnvme.StripeSet}) == other
    assert first != "a"


@pytest.mark.parametrize(
    ("paths", "stripe_bytes", "message"),
    [
        ([], 4096, "1 to 4096 parts, not 0"),
        (["a"] * 2, 4096, "named twice"),
        ([f"{index}" for index in range(4097)], 4096, "not 4097"),
        (["a", "b"], 5000, "multiple of 4096"),
        (["a", "b"], 0, "stripe_bytes is 0"),
        (["a", "b"], -4096, "stripe_bytes is -4096"),
        (["a\0", "b"], 4096, "null byte"),
    ],
)
def test_invalid_stripe_sets(paths: list[str], stripe_bytes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepnvme.StripeSet(paths, stripe_bytes=stripe_bytes)


def test_a_set_from_a_manifest_is_saved_and_pickled_as_that_set(parts: list[Path]) -> None:
    torch = pytest.importorskip("torch")
    named = deepnvme.StripeSet(parts, stripe_bytes=4096)
    deepnvme.save({"w": torch.rand(5000)}, named)
    found = deepnvme.StripeSet.from_manifest(named.manifest_path)
    assert found != named
    assert found.manifest_path == named.manifest_path
    again = pickle.loads(pickle.dumps(found))
    assert (again, again.manifest_path) == (found, found.manifest_path)
    state = {"w": torch.rand(5000)}
    deepnvme.save(state, again)
    for path in (named, found, named.manifest_path):
        assert torch.equal(deepnvme.load(path)["w"], state["w"])
    assert len([*parts[0].parent.glob("*.part-*")]) <= len(parts)


def test_parts_that_were_written_in_place_stay_and_are_named(parts: list[Path]) -> None:
    torch = pytest.importorskip("torch")
    named = deepnvme.StripeSet(parts, stripe_bytes=4096)
    deepnvme.save({"w": torch.rand(5000)}, named)
    deepnvme.write(torch.rand(3000), named)
    with pytest.warns(UserWarning, match="were changed; they are kept") as warned:
        deepnvme.save({"w": torch.rand(5000)}, named)
    assert warned[0].filename == __file__
    deepnvme.save({"w": torch.rand(5000)}, named)
    for ends_itself in (False, True):
        deepnvme.write(torch.rand(3000), named)
        with pytest.warns(UserWarning, match="were changed; they are kept") as warned:
            if ends_itself:
                file = deepnvme.open(named, "wb")
                file.write(b"new")
                file.close()
            else:
                with deepnvme.open(named, "wb") as file:
                    file.write(b"new")
        assert warned[0].filename == __file__


def test_no_file_takes_the_place_of_the_manifest(tmp_path: Path, parts: list[Path]) -> None:
    stripes = deepnvme.StripeSet(parts, stripe_bytes=4096)
    deepnvme.save({"a": torch.arange(5000)}, stripes)
    plain, manifest = tmp_path / "plain.pt", Path(stripes.manifest_path)
    deepnvme.save({"b": torch.ones(3)}, plain)
    parameter = torch.nn.Parameter(torch.ones(100))
    optimizer = optim.AdamW([parameter], swap_dir=tmp_path / "swap", memory="64MB")
    parameter.grad = torch.ones(100)
    optimizer.step()
    ways: list[Callable[[], object]] = [
        lambda: deepnvme.open(manifest, "wb"),
        lambda: deepnvme.save({"c": torch.ones(3)}, manifest),
        lambda: deepnvme.convert(plain, manifest),
        lambda: optimizer.save_state(manifest),
    ]
    for way in ways:
        with pytest.raises(errors.InvalidArgumentError, match="pass the StripeSet itself"):
            way()
    assert torch.equal(deepnvme.load(manifest)["a"], torch.arange(5000))
    with deepnvme.open(stripes, "wb") as file:
        file.write(b"new")
    assert deepnvme.open(manifest).read() == b"new"


def test_invalid_lists_of_paths() -> None:
    with pytest.raises(TypeError):
        deepnvme.StripeSet([1, 2])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        deepnvme.StripeSet(3)  # type: ignore[arg-type]


def test_a_missing_part_is_named(parts: list[Path], random_bytes: RandomBytes) -> None:
    stripes = deepnvme.StripeSet(parts, stripe_bytes=4096)
    deepnvme.write(random_bytes(50_000), stripes)
    parts[1].unlink()
    with pytest.raises(FileNotFoundError) as caught:
        deepnvme.read(bytearray(50_000), stripes)
    assert caught.value.filename == str(parts[1])


ALIASES: dict[str, Callable[[Path], tuple[Path, Path]]] = {}


def alias(make: Callable[[Path], tuple[Path, Path]]) -> Callable[[Path], tuple[Path, Path]]:
    ALIASES[make.__name__] = make
    return make


@alias
def dot(folder: Path) -> tuple[Path, Path]:
    return folder / "a", Path(f"{folder}/./a")


@alias
def dots(folder: Path) -> tuple[Path, Path]:
    return folder / "a", folder / "sub" / ".." / "a"


@alias
def linked_folder(folder: Path) -> tuple[Path, Path]:
    (folder / "link").symlink_to("sub")
    return folder / "sub" / "a", folder / "link" / "a"


@alias
def symbolic(folder: Path) -> tuple[Path, Path]:
    (folder / "link").symlink_to("a")
    return folder / "a", folder / "link"


@alias
def hard(folder: Path) -> tuple[Path, Path]:
    (folder / "a").write_bytes(b"")
    os.link(folder / "a", folder / "b")
    return folder / "a", folder / "b"


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("left", [0, 10, 4096])
def test_a_part_that_was_cut_short_is_named(parts: list[Path], random_bytes: RandomBytes, part: int, left: int) -> None:
    stripes = deepnvme.StripeSet(parts, stripe_bytes=4096)
    data = random_bytes(40_000)
    deepnvme.write(data, stripes)
    os.truncate(parts[part], left)
    for bytes_read in (40_000, 33_000):
        with pytest.raises(errors.EndOfFileError, match="part of a stripe set ends too early") as caught:
            deepnvme.read_batch([(stripes, 0, bytearray(bytes_read))])
        assert caught.value.filename == str(parts[part])


@pytest.mark.parametrize("name", ALIASES)
def test_one_file_under_two_names_is_no_stripe_set(tmp_path: Path, random_bytes: RandomBytes, name: str) -> None:
    (tmp_path / "sub").mkdir()
    one, other = ALIASES[name](tmp_path)
    with pytest.raises(ValueError, match=r"one file|named twice"):
        deepnvme.write(random_bytes(1 << 20), deepnvme.StripeSet([one, other], stripe_bytes=8192))
    assert not [*tmp_path.rglob("*.json")]


@pytest.mark.parametrize("between", ["sub/..", "link"])
def test_a_save_to_one_file_under_two_names_writes_nothing(tmp_path: Path, between: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(".")
    stripes = deepnvme.StripeSet([tmp_path / "a", tmp_path / between / "a"], stripe_bytes=8192)
    with pytest.raises(ValueError, match="are one file; name a file of its own for each"):
        deepnvme.save({"a": torch.randn(10_000)}, stripes)
    assert {path.name for path in tmp_path.iterdir()} == {"sub", "link"}


@pytest.mark.parametrize("name", ALIASES)
def test_one_file_under_two_names_in_a_batch(tmp_path: Path, random_bytes: RandomBytes, name: str) -> None:
    (tmp_path / "sub").mkdir()
    one, other = ALIASES[name](tmp_path)
    first, second = random_bytes(10_000), random_bytes(10_000)
    for offsets in ((None, None), (0, 9_999)):
        with pytest.raises(ValueError, match="overlap"):
            deepnvme.write_batch([(one, offsets[0], first), (other, offsets[1], second)])
    deepnvme.write_batch([(one, 0, first), (other, 10_000, second)])
    assert one.read_bytes() == first + second


def test_commands_take_a_set(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    stripes = deepnvme.StripeSet([tmp_path / name / "part" for name in ("a", "b")], stripe_bytes=4096)
    deepnvme.save({"w": torch.arange(5000)}, stripes)
    assert deepnvme.verify(stripes)["is_sound"]
    [file] = deepnvme.inspect(stripes)["files"]
    assert [tensor["name"] for tensor in file["tensors"]] == ["w"]
    deepnvme.convert(stripes, tmp_path / "w.safetensors")
    assert torch.equal(deepnvme.load(tmp_path / "w.safetensors")["w"], torch.arange(5000))


@pytest.mark.parametrize("name", ["part", "manifest", "hard link"])
def test_convert_replaces_no_part_of_its_source(tmp_path: Path, name: str) -> None:
    stripes = deepnvme.StripeSet([tmp_path / "a", tmp_path / "b"], stripe_bytes=4096)
    deepnvme.save({"w": torch.arange(5000), "step": 7}, stripes)
    stripes = deepnvme.StripeSet.from_manifest(stripes.manifest_path)
    target = Path(stripes.manifest_path if name == "manifest" else stripes.paths[1])
    if name == "hard link":
        (tmp_path / "link").hardlink_to(target)
        target = tmp_path / "link"
    for source in (stripes, stripes.manifest_path):
        with pytest.raises(ValueError, match=r"would be converted|the name of a list of files"):
            deepnvme.convert(source, target)
    assert deepnvme.load(stripes)["step"] == 7
    assert deepnvme.verify(stripes)["is_sound"]
    with pytest.raises(TypeError, match="the target is a StripeSet; it must be a path"):
        deepnvme.convert(stripes, stripes)  # type: ignore[arg-type]
