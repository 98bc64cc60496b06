"""Private files and folders, sets that are replaced at once, and small files that are read with a bound."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import deepnvme
from deepnvme import _deepnvme
from deepnvme.errors import InvalidArgumentError

InThreads = Callable[[Callable[[int], object], int], None]

RECORD = ("metadata", "deepnvme.owned")


def save(folder: Path, text: str) -> None:
    """Replace the set ``model`` by two files of that text."""
    index = folder / "model.json"
    members = [(str(folder / f"model-{number}-"), ".bin") for number in range(2)]
    new = _deepnvme._SetReplacement(index, members, RECORD)
    for member in new.members:
        member.write_text(text)
    new.commit(json.dumps({"weight_map": {name.name: name.name for name in new.names}}))


def load(folder: Path) -> str:
    """Give the text of the set, which all of its files share."""
    names = json.loads((folder / "model.json").read_text())["weight_map"]
    texts: set[str] = {(folder / name).read_text() for name in names}
    (text,) = texts
    return text


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_set_is_replaced_at_once_and_foreign_files_stay(tmp_path: Path) -> None:
    foreign = {f"model-{number}-{'0' * 32}.bin": os.urandom(100) for number in range(3)}
    foreign[f".model.json.deepnvme-tmp-{os.getpid()}-1"] = b"somebody's"
    for name, data in foreign.items():
        (tmp_path / name).write_bytes(data)
    for text in ("one", "two"):
        save(tmp_path, text)
        assert load(tmp_path) == text
        found = content(tmp_path)
        assert found.items() >= foreign.items()
        assert len(found) == len(foreign) + 3
    discarded = _deepnvme._SetReplacement(tmp_path / "model.json", [(str(tmp_path / "model-"), ".bin")], RECORD)
    discarded.discard()
    assert load(tmp_path) == "two"
    assert len(content(tmp_path)) == len(foreign) + 3


def test_threads_that_replace_one_set_leave_one_that_is_whole(tmp_path: Path, in_threads: InThreads) -> None:
    def run(number: int) -> None:
        for _ in range(10):
            save(tmp_path, str(number))

    in_threads(run, 4)
    assert load(tmp_path) in "0123"
    assert len(content(tmp_path)) == 3


def test_a_model_that_is_replaced_while_it_is_loaded_is_one_or_the_other(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    members = [(str(tmp_path / f"model-{number}-"), ".safetensors") for number in range(6)]
    is_over = threading.Event()

    def replace_it(text: int) -> None:
        new = _deepnvme._SetReplacement(index, members, RECORD)
        for number, member in enumerate(new.members):
            save_file({f"weight{number}": torch.full((5000,), text)}, member)
        weight_map = {f"weight{number}": name.name for number, name in enumerate(new.names)}
        # A checksum of the list. It also covers the record of its files.
        blank = {"deepnvme.checksum": "-".join(["0" * 16] * 3)}
        new.commit(json.dumps({"metadata": blank, "weight_map": weight_map}))

    def keep_replacing() -> None:
        text = 1
        while not is_over.is_set():
            replace_it(text)
            text += 1

    replace_it(0)
    thread = threading.Thread(target=keep_replacing)
    thread.start()
    try:
        for _ in range(60):
            found = deepnvme.load(index)
            assert len(found) == 6
            assert len({int(value) for tensor in found.values() for value in (tensor.min(), tensor.max())}) == 1
    finally:
        is_over.set()
        thread.join()
    assert "0" * 16 not in json.loads(index.read_text())["metadata"]["deepnvme.checksum"]


@pytest.mark.parametrize("way", ["save", "open"])
def test_only_regular_files_are_replaced_and_links_must_lead_somewhere(tmp_path: Path, way: str) -> None:
    def put(path: Path) -> None:
        if way == "save":
            deepnvme.save({"a": torch.ones(3)}, path)
        else:
            with deepnvme.open(path, "wb") as out:
                out.write(b"new")

    os.mkfifo(tmp_path / "pipe.pt")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "socket.pt"))
    with contextlib.suppress(PermissionError):
        # Only the administrator makes devices.
        os.mknod(tmp_path / "device.pt", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    (tmp_path / "dangling.pt").symlink_to("nowhere")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    for name in [path.name for path in tmp_path.iterdir()]:
        before = (tmp_path / name).lstat()
        with pytest.raises(OSError, match=name):
            put(tmp_path / name)
        assert (tmp_path / name).lstat().st_ino == before.st_ino
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "file.pt").touch(mode=0o644)
    (tmp_path / "file.pt").chmod(0o6754)
    (tmp_path / "link.pt").symlink_to("file.pt")
    put(tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert (tmp_path / "file.pt").stat().st_size > 0
    assert stat.S_IMODE((tmp_path / "file.pt").stat().st_mode) == 0o754


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize("name", ["model.pt", "folder", "folder/model.safetensors.index.json", "x.stripes.json"])
def test_commands_wait_for_no_pipe(tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / "folder").mkdir()
    for pipe in ("model.pt", "folder/model.safetensors.index.json", "x.stripes.json"):
        os.mkfifo(tmp_path / pipe)
    run = [sys.executable, "-m", "deepnvme", command, str(tmp_path / name)]
    done = subprocess.run(run, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert "it is a pipe" in done.stdout + done.stderr  # `verify` prints it as a result


KILLED = """
import os, signal, sys
from deepnvme import _deepnvme
folder = sys.argv[1]
private = _deepnvme._PrivateFolder(f"{folder}/new")
open(private.add("one"), "w").write("1")
new = _deepnvme._SetReplacement(f"{folder}/model.json", [(f"{folder}/model-", ".bin")], ["files"])
for member in new.members:
    member.write_text("half")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_process_are_removed_by_the_next_one(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 3, "a folder, a member, and the list of it"
    _deepnvme._remove_leftovers(tmp_path / "new")
    save(tmp_path, "next")
    assert sorted(content(tmp_path)) == sorted(path.name for path in tmp_path.iterdir())
    assert len(content(tmp_path)) == 3


def test_a_folder_appears_as_a_whole(tmp_path: Path) -> None:
    # Names as temporaries once had them, planted.
    for number in range(100):
        (tmp_path / f".step.deepnvme-tmp-{os.getpid()}-{number}").mkdir()
    folder = _deepnvme._PrivateFolder(tmp_path / "step")
    folder.add("file").write_text("1")
    with pytest.raises(InvalidArgumentError, match="lies in it"):
        folder.add("../file")
    folder.commit()
    assert [path.name for path in (tmp_path / "step").iterdir()] == ["file"]
    with pytest.raises(RuntimeError):
        folder.commit()
    other = _deepnvme._PrivateFolder(tmp_path / "other")
    other.add("file").write_text("1")
    other.discard()
    assert len(list(tmp_path.iterdir())) == 101


def test_only_small_regular_files_are_metadata(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "file").write_bytes(b"12345")
    assert _deepnvme._read_small_file(tmp_path / "file", 5) == b"12345"
    for name, what in (("pipe", "a pipe"), ("endless", "a character device"), ("file", "5 bytes")):
        with pytest.raises(InvalidArgumentError, match=what):
            _deepnvme._read_small_file(tmp_path / name, 4)
    with pytest.raises(FileNotFoundError):
        _deepnvme._read_small_file(tmp_path / "none", 4)
