"""Nobody may read a new file who could not read what it replaces or is made from: groups, and access control lists."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme._deepnvme import _run_command
from forked_child import status_of_child

STATE = {"a": torch.arange(100)}
USER, OWN_GROUP, TEAM, STRANGERS = 4321, 4322, 5555, 6666
# Tags of the entries of a list.
OWNER, NAMED_USER, GROUP, LIMIT, OTHERS = 1, 2, 4, 0x10, 0x20


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that another user reaches and owns."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def as_user(work: Callable[[], object]) -> None:
    """Run it as a user who is a member of the team, in a child."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")

    def run() -> None:
        os.setgroups([TEAM])
        os.setgid(OWN_GROUP)
        os.setuid(USER)
        os.umask(0o022)
        work()

    assert status_of_child(run) == 0


def access(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_mode & 0o777, stat.st_gid


def access_list(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def set_list(path: Path, kind: str, *entries: tuple[int, int, int]) -> None:
    try:
        os.setxattr(path, f"system.posix_acl_{kind}", access_list(*entries))
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error}")


@pytest.mark.parametrize("group", [TEAM, STRANGERS])
def test_a_group_keeps_its_files_and_no_other_gets_them(folder: Path, group: int) -> None:
    """A member gives the new file to the same group. For a user who is none, the group loses it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    os.chown(folder, USER, OWN_GROUP)
    saved, source, converted = folder / "saved.pt", folder / "source.pt", folder / "converted.safetensors"
    for path in (saved, source):
        deepnvme.save(STATE, path)
        os.chown(path, USER, group)
        path.chmod(0o640)

    def work() -> None:
        deepnvme.save(STATE, saved)
        assert _run_command(["convert", str(source), str(converted)]) == 0

    as_user(work)
    expected = (0o640, TEAM) if group == TEAM else (0o600, OWN_GROUP)
    assert [access(path) for path in (saved, converted)] == [expected] * 2
    assert torch.equal(deepnvme.load(saved)["a"], STATE["a"])


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors"])
def test_the_limit_of_a_list_is_not_taken_for_the_group(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    deepnvme.save(STATE, path)
    set_list(path, "access", (OWNER, 6, 0), (NAMED_USER, 6, USER), (GROUP, 0, 0), (LIMIT, 6, 0), (OTHERS, 0, 0))
    assert path.stat().st_mode & 0o777 == 0o660
    converted = tmp_path / "converted.safetensors"
    command = [sys.executable, "-m", "deepnvme", "convert", str(path), str(converted)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    deepnvme.save(STATE, path)
    assert [access(each)[0] for each in (path, converted)] == [0o600] * 2


def test_new_files_follow_the_list_of_their_folder(tmp_path: Path) -> None:
    set_list(tmp_path, "default", (OWNER, 7, 0), (GROUP, 0, 0), (OTHERS, 0, 0))
    (tmp_path / "plain").write_bytes(b"")
    deepnvme.save(STATE, tmp_path / "file.pt")
    deepnvme.save({"a": STATE["a"], "b": STATE["a"].clone()}, tmp_path / "parts.safetensors", max_shard_bytes=1000)
    with deepnvme.open(tmp_path / "opened", "wb") as file:
        file.write(b"text")
    with deepnvme.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, STATE)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert len(files) >= 5
    assert {path.name: access(path)[0] for path in files} == {path.name: 0o600 for path in files}


@pytest.mark.parametrize("kind", ["file", "run"])
def test_verify_of_a_path_that_this_user_may_not_read(folder: Path, kind: str) -> None:
    closed = folder / "closed"
    closed.mkdir()
    deepnvme.save(STATE, closed / "file")
    with deepnvme.Checkpointer(closed / "run") as checkpointer:
        checkpointer.save(1, STATE)
    closed.chmod(0o600)
    os.chown(closed, USER, OWN_GROUP)

    def verify() -> None:
        with pytest.raises(PermissionError, match="unreadable: ") as raised:
            deepnvme.verify(closed / kind)
        assert raised.value.errno == errno.EACCES
        assert isinstance(raised.value, deepnvme.errors.PermissionDeniedError)

    as_user(verify)
