"""States in several safetensors files: which files a new state removes, and which it never does."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import deepnvme
from deepnvme._checkpoint import iterate, load_request
from deepnvme._deepnvme import _find_set, _run_command
from deepnvme._stream import model_files as stream_files
from deepnvme.errors import ChecksumError, CorruptFileError
from deepnvme.integrations.weights import iterate_weights
from programs import program, status_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INDEX = "model.safetensors.index.json"


def state_of(seed: int, count: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{index}.weight": torch.randn(1000, generator=generator) for index in range(count)}


def save(seed: int, path: Path, count: int = 10) -> None:
    deepnvme.save(state_of(seed, count), path, max_shard_bytes=12_000)


def is_state(path: Path, seed: int, count: int = 10) -> bool:
    return same(deepnvme.load(path, verify="full"), seed, count)


def same(loaded: Any, seed: int, count: int = 10) -> bool:
    expected = state_of(seed, count)
    return set(loaded) == set(expected) and all(torch.equal(loaded[name], expected[name]) for name in expected)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """Return a folder in memory if possible, so that hundreds of saves do not wait for a disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Path(folder)


FOREIGN = [
    *(f"model-{number:05}-of-{count:05}.safetensors" for count in (1, 3, 4, 9) for number in range(1, count + 1)),
    "model-00001-of-00004-0123abcd.safetensors",
    f"model-00001-of-00004-{'a' * 32}.safetensors",
    ".model.safetensors.deepnvme-tmp-1-0",
    f".{INDEX}.deepnvme-tmp-1-2-0123456789abcdef",
    f".{INDEX}.deepnvme-tmp-new-{'a' * 32}",
    ".model-00001-of-00003.safetensors.deepnvme-tmp-1-0",
]

KILLED = """
import os, signal, sys, torch, deepnvme
from deepnvme._checkpoint import save
plan, left = save.plan_safetensors, 3
def counted(*arguments):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return plan(*arguments)
save.plan_safetensors = counted
state = {f"layers.{index}.weight": torch.randn(1000) for index in range(10)}
deepnvme.save(state, sys.argv[1], max_shard_bytes=12_000)
"""


@pytest.mark.parametrize("stem", ["model", "m[o]d.*el"])
def test_foreign_files_of_every_such_name_stay(tmp_path: Path, stem: str) -> None:
    path = tmp_path / f"{stem}.safetensors"
    foreign = {name.replace("model", stem): os.urandom(100) for name in FOREIGN}
    for name, data in foreign.items():
        (tmp_path / name).write_bytes(data)
    for seed in range(2):
        save(seed, path)
        assert is_state(path, seed)
    assert status_of(KILLED, path) == -signal.SIGKILL
    assert len(content(tmp_path)) > len(foreign) + 5
    with pytest.raises(ValueError, match="complex128"):
        deepnvme.save(state_of(2) | {"z": torch.ones(2, dtype=torch.complex128)}, path, max_shard_bytes=12_000)
    assert is_state(path, 1)
    # The failed save removed its own files, and those that the killed save recorded.
    found = content(tmp_path)
    assert found.items() >= foreign.items()
    assert len(found) == len(foreign) + 5
    deepnvme.save(state_of(3), path)
    assert is_state(path, 3)
    found = content(tmp_path)
    assert found.items() >= foreign.items()
    assert found.keys() == {*foreign, path.name}


KILLED_ONE = """
import resource, signal, sys, torch, deepnvme
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
deepnvme.save({"w": torch.zeros(100_000)}, sys.argv[1])
"""


def test_a_save_of_several_files_removes_leftovers_of_a_killed_save_of_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    (tmp_path / "link.safetensors").symlink_to(path)
    for name in (path, tmp_path / "link.safetensors"):
        deepnvme.save(state_of(0), path)
        assert status_of(KILLED_ONE, path) == -signal.SIGXFSZ
        assert len(list(tmp_path.glob(".*"))) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            save(1, name)
        assert is_state(name, 1)
        assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("count", [1, 10])
def test_files_are_not_removed_because_an_index_names_them(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    mine = ["../other.safetensors", "notes.txt", "other-00001-of-00002.safetensors", "model-1-of-2.safetensors",
            "model-00001-of-00002.safetensors", "model-00001-of-00002-zz345678.safetensors"]  # fmt: skip
    mine.append(str(tmp_path / "model-00001-of-00002.safetensors"))
    for name in mine:
        (folder / name).write_text("mine")
        index = folder / INDEX
        index.unlink(missing_ok=True)
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        # A save of one file removes the index, and the files that it lists.
        with pytest.warns(UserWarning, match=INDEX if count == 1 else Path(name).name):
            save(1, folder / "model.safetensors", count)
        assert is_state(folder, 1, count)
        (folder / "model.safetensors").unlink(missing_ok=True)
    assert all((folder / name).read_text() == "mine" for name in mine)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, path in enumerate(["model.safetensors", "./model.safetensors", str(tmp_path / "model.safetensors")]):
        deepnvme.save(state_of(seed), path, max_shard_bytes=12_000)
        assert is_state(tmp_path, seed)
        assert is_state(Path(path), seed)
        assert len(list(tmp_path.iterdir())) == 5


def test_the_newest_save_of_a_name_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def assert_loaded(seed: int) -> None:
        for name in (tmp_path, path):
            assert is_state(name, seed)
            assert same(deepnvme.load(name, lazy=True), seed)
            assert same(dict(iterate_weights(name)), seed)

    save(1, path)
    assert_loaded(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deepnvme.save(state_of(2), path)
        assert_loaded(2)
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
    # Nothing proves who wrote the single file, so it is kept, and the shards count.
    before = path.read_bytes()
    with pytest.warns(UserWarning, match=r"model\.safetensors: this file is kept"):
        save(3, path)
    assert path.read_bytes() == before
    assert_loaded(3)
    # The same in a copy that keeps times, but not for another file that is written under the name.
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert is_state(tmp_path / "copy", 3)
    save_file(state_of(4), tmp_path / "copy" / "model.safetensors")
    assert same(deepnvme.load(tmp_path / "copy"), 4)
    # The index was copied here. It is kept, and the file is newer.
    with pytest.warns(UserWarning, match="is kept"):
        deepnvme.save(state_of(5), tmp_path / "copy" / "model.safetensors")
    assert is_state(tmp_path / "copy", 5)
    assert len(list((tmp_path / "copy").iterdir())) == 6
    shutil.rmtree(tmp_path / "copy")
    deepnvme.save(state_of(2), path)
    assert_loaded(2)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_damaged_index_is_never_passed_over_for_an_older_file(tmp_path: Path) -> None:
    """It may have stated that it replaces that file."""
    path, index = tmp_path / "model.safetensors", tmp_path / INDEX
    deepnvme.save(state_of(1), path)
    path.write_bytes(path.read_bytes())
    with pytest.warns(UserWarning, match="this file is kept"):
        save(2, path)
    sound = index.read_bytes()
    assert b"deepnvme.replaces" in sound
    generator = random.Random(4)
    places = [generator.randrange(len(sound)) for _ in range(100)]
    damaged = [sound[:at] + bytes([sound[at] ^ 1 << generator.randrange(8)]) + sound[at + 1 :] for at in places]
    damaged += [sound[:at] + b"7" + sound[at:] for at in places] + [sound[:at] + sound[at + 1 :] for at in places]
    damaged += [b"", bytes(len(sound)), sound[: len(sound) // 2], sound[:-1]]
    for text in damaged:
        index.write_bytes(text)
        for name in (tmp_path, path):
            with pytest.raises((ChecksumError, CorruptFileError), match=re.escape(str(index))):
                deepnvme.load(name)
            with pytest.raises((ChecksumError, CorruptFileError), match=re.escape(str(index))):
                list(iterate_weights(name))
    index.unlink()
    index.mkdir()
    with pytest.raises(IsADirectoryError):
        deepnvme.load(path)
    index.rmdir()
    # When a new file replaces both, the warning says what to do.
    index.write_bytes(sound[:-20])
    with pytest.warns(UserWarning, match=r"is damaged, and is kept\. Remove it"):
        deepnvme.save(state_of(3), path)
    index.unlink()
    assert is_state(path, 3)
    # Another program's index has none of this.
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "other.safetensors"}}))
    assert is_state(path, 3)


@pytest.mark.parametrize("max_shard_bytes", [None, 100_000, 12_000])
@pytest.mark.parametrize("stale", ["foreign member", "damaged index"])
def test_warnings_point_at_the_call_of_save(tmp_path: Path, max_shard_bytes: int | None, stale: str) -> None:
    path, index = tmp_path / "model.safetensors", tmp_path / INDEX
    save(1, path)
    if stale == "foreign member":
        member = next(tmp_path.glob("model-00001-*"))
        member.rename(tmp_path / "moved")
        member.write_text("mine")
    else:
        index.write_bytes(index.read_bytes()[:-20])
        path.write_text("mine")
    with pytest.warns(UserWarning, match="kept") as caught:
        deepnvme.save(state_of(2), path, max_shard_bytes=max_shard_bytes)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_moved_folder_is_cleared_up_as_before(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    save(1, tmp_path / "one" / "model.safetensors")
    (tmp_path / "one").rename(tmp_path / "other")
    save(2, tmp_path / "other" / "model.safetensors")
    assert is_state(tmp_path / "other", 2)
    assert len(list((tmp_path / "other").iterdir())) == 5
    assert str(tmp_path) not in (tmp_path / "other" / INDEX).read_text()


SAVER = """
import sys, torch, warnings, deepnvme
path, first, count, one_in = sys.argv[1], *map(int, sys.argv[2:])
# One file stays when several are saved over it, which is a warning.
warnings.simplefilter("ignore")
for seed in range(first, first + count):
    generator = torch.Generator().manual_seed(seed)
    state = {f"layers.{index}.weight": torch.randn(1000, generator=generator) for index in range(10)}
    state["seed"] = torch.tensor([seed])
    # One save in so many is of one file.
    limit = None if seed % one_in == 1 else 12_000
    deepnvme.save(state, path, max_shard_bytes=limit, durability="none")
    if seed % 3 == 0:
        found = deepnvme.load(path, verify="full")
        generator = torch.Generator().manual_seed(found["seed"].item())
        for index in range(10):
            assert torch.equal(found[f"layers.{index}.weight"], torch.randn(1000, generator=generator)), seed
    print("saved", flush=True)
"""


class FailedError(Exception):
    """A command has failed."""


def whole(loaded: Any) -> int:
    """Return the save that a state belongs to, and check all of it."""
    seed = int(loaded["seed"])
    assert set(loaded) == {*state_of(seed), "seed"}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state_of(seed).items())
    return seed


def readers(folder: Path, out: Path) -> list[Callable[[], object]]:
    """Return all ways to read a model."""

    def filled() -> object:
        into = {**state_of(0), "seed": torch.zeros(1, dtype=torch.int64)}
        return whole(deepnvme.load(folder, into=into))

    def chosen() -> None:
        found = deepnvme.load(folder, only=["layers.0", "layers.9", "seed"], verify="full")
        expected = state_of(int(found["seed"]))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items() if name != "seed")

    def commanded(*arguments: object) -> None:
        status = _run_command([str(argument) for argument in arguments])
        if status:
            raise FailedError(f"status {status}")

    def converted() -> object:
        commanded("convert", folder, out)
        return whole(deepnvme.load(out))

    def streamed() -> None:
        assert len(stream_files.ModelFiles(folder).tensors) == 11

    return [
        lambda: whole(deepnvme.load(folder, verify="full")),
        lambda: whole(deepnvme.load(folder / "model.safetensors")),
        lambda: whole({name: tensor.clone() for name, tensor in deepnvme.load(folder, lazy=True).items()}),
        lambda: whole(dict(iterate_weights(folder))),
        filled,
        chosen,
        converted,
        streamed,
        lambda: commanded("inspect", folder),
        lambda: commanded("verify", folder),
    ]


@pytest.mark.parametrize(("each", "one_in"), [(150, 10_000), (50, 2)])
def test_saves_and_loads_of_one_name_at_once(memory_path: Path, each: int, one_in: int) -> None:
    """Each save of two processes leaves a complete state, and readers find only complete states."""
    path, count = memory_path / "model.safetensors", 0
    deepnvme.save({**state_of(0), "seed": torch.tensor([0])}, path, max_shard_bytes=12_000)
    with program(SAVER, path, 1000, each, one_in) as one, program(SAVER, path, 2000, each, one_in) as other:
        ways = readers(memory_path, memory_path / "converted.pt")
        while one.is_running or other.is_running:
            ways[count % len(ways)]()
            count += 1
        assert [one.wait(), other.wait()] == [0, 0]
        assert [len(writer.stdout.readlines()) for writer in (one, other)] == [each, each]
    assert count >= len(ways), "the readers hardly read"
    # The result is the last state of one of them.
    assert whole(deepnvme.load(path, verify="full")) in {1000 + each - 1, 2000 + each - 1}
    assert not list(memory_path.glob(".*")), "no list of files that were to be removed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(1, path)
    assert is_state(path, 1)
    assert len(list(memory_path.glob("model-*"))) == 4, "no rest of any save"


def test_killed_at_random_instants(memory_path: Path) -> None:
    path = memory_path / "model.safetensors"
    save(0, path)
    foreign = memory_path / "model-00001-of-00004.safetensors"
    foreign.write_bytes(data := os.urandom(100))
    for _ in range(8):
        deepnvme.save({**state_of(0), "seed": torch.tensor([0])}, path, max_shard_bytes=12_000)
        with program(SAVER, path, 2, 1000, 10_000) as saving:
            assert saving.stdout.readline() == "saved\n"
            time.sleep(random.uniform(0, 0.03))
            saving.kill()
        assert whole(deepnvme.load(path, verify="full")) >= 1
        save(3, path)
        assert is_state(path, 3)
        assert len(list(memory_path.iterdir())) == 6
    assert foreign.read_bytes() == data


def test_a_set_that_is_replaced_when_its_list_has_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader retries, since the old shards are gone."""
    path = tmp_path / "model.safetensors"
    seed = 0

    def replaced_meanwhile(find: Callable[..., Any]) -> Callable[..., Any]:
        left = 1

        def found(*arguments: Any) -> Any:
            nonlocal left
            answer = find(*arguments)
            if left:
                left = 0
                save(seed, path)
            return answer

        return found

    loads: list[Callable[[], Any]] = [
        lambda: deepnvme.load(path),
        lambda: deepnvme.load(tmp_path, lazy=True),
        lambda: deepnvme.load(tmp_path, into=state_of(0)),
        lambda: deepnvme.load(tmp_path / INDEX, only="layers"),
        lambda: dict(iterate_weights(tmp_path)),
        lambda: stream_files.ModelFiles(tmp_path),
    ]
    for load in loads:
        save(seed, path)
        seed += 1
        with monkeypatch.context() as patched:
            patched.setattr(load_request, "_find_set", replaced_meanwhile(_find_set))
            loaded = load()
        if isinstance(loaded, stream_files.ModelFiles):
            assert len(loaded.tensors) == 10
            assert all(Path(str(source)).exists() for source in loaded.sources)
        else:
            assert same(loaded, seed)
        seed += 1


def test_weights_are_read_to_the_end_of_a_model_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save(1, path)
    given = iterate_weights(tmp_path, prefetch_bytes=1)
    loaded = dict([next(given)])
    save(2, path)
    assert same(loaded | dict(given), 1)
    # If not all of its files can stay open, this is an error.
    monkeypatch.setattr(iterate, "_DESCRIPTOR_FRACTION", 0)
    assert same(dict(iterate_weights(tmp_path, prefetch_bytes=1)), 2)
    given = iterate_weights(tmp_path, prefetch_bytes=1)
    next(given)
    save(3, path)
    with pytest.raises(deepnvme.errors.ChangedFileError, match="replaced") as caught:
        list(given)
    assert caught.value.filename is not None


def test_every_reader_compares_shards_with_their_index(tmp_path: Path) -> None:
    for seed in (1, 2):
        (tmp_path / str(seed)).mkdir()
        deepnvme.save({**state_of(seed), "seed": torch.tensor([seed])}, tmp_path / str(seed) / "model.safetensors",
                      max_shard_bytes=12_000)  # fmt: skip
    shards = [min((tmp_path / str(seed)).glob("*.safetensors")) for seed in (1, 2)]
    shards[0].write_bytes(shards[1].read_bytes())
    for read in readers(tmp_path / "1", tmp_path / "out.pt"):
        with pytest.raises((ChecksumError, FailedError), match=r"not the file that its index lists|status 1"):
            read()
    assert not (tmp_path / "out.pt").exists()
    deepnvme.load(tmp_path / "1", verify="off")
    list(iterate_weights(tmp_path / "1", verify="off"))


@pytest.mark.parametrize("length", [240, 244, 250, 255])
def test_a_name_that_leaves_no_room_for_an_index_is_saved_without_a_word(tmp_path: Path, length: int) -> None:
    path = tmp_path / ("n" * (length - len(".safetensors")) + ".safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deepnvme.save(state_of(1), path)
        assert same(deepnvme.load(path), 1)
