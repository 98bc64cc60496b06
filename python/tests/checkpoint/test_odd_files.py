"""A pipe, a device, a folder or a dangling link in place of a small file gives a library error at once."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_saver as dcp

import deepnvme
from deepnvme import errors, optim
from deepnvme._deepnvme import _run_command
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

DEADLINE_S = 60


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def as_folder(path: Path) -> None:
    path.mkdir()


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def as_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def as_circular_link(path: Path) -> None:
    path.symlink_to(path.name)


def checkpoint(folder: Path) -> None:
    deepnvme.Checkpointer(folder).restore()


def locked(folder: Path) -> None:
    with deepnvme.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2)})


def checked(folder: Path) -> None:
    """Return a manifest that lists an empty file, which is no checkpoint."""
    entry = {
        "file": "step-00000001.pt", "step": 1, "nbytes": 0, "time": "", "index_offset": 0, "index_nbytes": 0,
        "torch": "", "index_crc64": "0" * 16, "deepnvme": "",
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps({"version": 2, "checkpoints": [entry]}))
    deepnvme.Checkpointer(folder).restore()


def sharded(folder: Path) -> None:
    entry = {
        "file": "step-00000001", "step": 1, "nbytes": 0, "time": "", "index_offset": 0, "index_nbytes": 0, "torch": "",
        "index_crc64": "0" * 16, "deepnvme": "",
    }  # fmt: skip
    (folder.parent / "manifest.json").write_text(json.dumps({"version": 2, "checkpoints": [entry]}))
    deepnvme.Checkpointer(folder.parent).restore(into={"a": torch.zeros(2)})


def optimizer(path: Path) -> None:
    made = optim.AdamW([torch.nn.Parameter(torch.ones(8))], swap_dir=path.parent, memory=1 << 20)
    made.load_state(path)


def command(path: Path) -> None:
    for name in ("inspect", "verify"):
        assert _run_command([name, str(path)]) == 1
    raise errors.Error(f"{path}: as it should be")


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "manifest": ("manifest.json", lambda path: checkpoint(path.parent)),
    "lock": (".deepnvme-lock", lambda path: locked(path.parent)),
    "listed": ("step-00000001.pt", lambda path: checked(path.parent)),
    "sharded": ("step-00000001/deepnvme.json", lambda path: sharded(path.parent)),
    "index of a folder": ("model.safetensors.index.json", lambda path: deepnvme.load(path.parent)),
    "index": ("x.safetensors.index.json", deepnvme.load),
    "archive": ("x.pt", deepnvme.load),
    "safetensors": ("x.safetensors", lambda path: deepnvme.load(path, lazy=True)),
    "stripes": ("x.stripes.json", deepnvme.StripeSet.from_manifest),
    "distributed": ("deepnvme.json", lambda path: DeepnvmeReader(path.parent).read_metadata()),
    "optimizer": ("state", optimizer),
    "settings": ("deepnvme.toml", deepnvme.Engine.from_file),
    "command": ("y.pt", command),
    "command on an index": ("y.safetensors.index.json", command),
}  # fmt: skip


@pytest.mark.parametrize("make", [as_pipe, as_device, as_folder, as_socket, as_dangling_link, as_circular_link])
def test_special_files_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, (what, (name, use)) in enumerate(READERS.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        make(path)
        ended: list[BaseException | None] = []

        def run(use: Callable[[Path], Any] = use, path: Path = path, ended: Any = ended) -> None:
            try:
                use(path)
            except BaseException as raised:
                ended.append(raised)
            else:
                ended.append(None)

        # A thread would wait forever for a writer of the pipe.
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        assert ended, f"{what} waits"
        (error,) = ended
        is_folder_for_itself = make is as_folder and what in ("archive", "safetensors", "command")
        expected: tuple[type[BaseException], ...] = (
            (errors.Error, FileNotFoundError) if is_folder_for_itself else (errors.Error,)
        )
        assert isinstance(error, expected), (what, error)
        assert getattr(error, "filename", None) == str(path) or str(path.parent) in str(error), (what, error)


def saved_folder(folder: Path) -> deepnvme.Checkpointer:
    checkpointer = deepnvme.Checkpointer(folder)
    checkpointer.save(1, {"a": torch.randn(100)})
    checkpointer.save(2, {"a": torch.randn(100)})
    checkpointer.close()
    return deepnvme.Checkpointer(folder)


def test_a_manifest_that_leads_nowhere_is_no_empty_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved_folder(tmp_path)
    (tmp_path / "manifest.json").unlink()
    as_dangling_link(tmp_path / "manifest.json")
    for use in (
        lambda: deepnvme.Checkpointer(tmp_path).checkpoints,
        lambda: deepnvme.Checkpointer(tmp_path).restore(),
        lambda: deepnvme.Checkpointer(tmp_path).save(3, {"a": torch.ones(2)}),
    ):
        with pytest.raises(errors.CorruptFileError, match=r"manifest\.json.*leads nowhere"):
            use()
    assert _run_command(["verify", str(tmp_path)]) == 1
    assert "manifest.json: this is not a manifest" in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_model_that_leads_nowhere_is_not_an_older_one(tmp_path: Path, name: str) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    as_dangling_link(tmp_path / name)
    with pytest.raises(errors.NotFoundError, match=name):
        deepnvme.load(tmp_path)


def test_a_list_of_parts_that_leads_nowhere_is_no_new_set(tmp_path: Path) -> None:
    parts = deepnvme.StripeSet([tmp_path / "0", tmp_path / "1"], stripe_bytes=4096)
    deepnvme.write(torch.randn(10_000), parts)
    manifest = Path(parts.manifest_path)
    manifest.unlink()
    as_dangling_link(manifest)
    other = deepnvme.StripeSet([tmp_path / "0", tmp_path / "1"], stripe_bytes=8192)
    with pytest.raises(errors.NotFoundError, match="leads nowhere"):
        deepnvme.read(torch.empty(10_000), other)


@pytest.mark.parametrize("make", [as_pipe, as_folder, as_socket, as_dangling_link, as_circular_link, Path.touch])
def test_verify_goes_on_after_a_checkpoint_that_is_something_else(
    tmp_path: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpointer = saved_folder(tmp_path)
    path = checkpointer.checkpoints[0].path
    path.unlink()
    make(path)
    assert _run_command(["verify", str(tmp_path), "--json"]) == 1
    files = {Path(file["path"]).name: file for file in json.loads(capfd.readouterr().out)["files"]}
    assert files["step-00000002.pt"]["verdict"] == "sound"
    assert files[path.name]["verdict"] == "damaged"
    with pytest.raises(errors.Error, match=path.name):
        checkpointer.restore(1)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.parametrize("left", [0, 3, 9])
def test_a_file_that_was_cut_to_almost_nothing_is_corrupt(tmp_path: Path, name: str, left: int) -> None:
    path = tmp_path / name
    deepnvme.save({"a": torch.ones(2)}, path)
    os.truncate(path, left)
    with pytest.raises(errors.CorruptFileError, match="write it again"):
        deepnvme.load(path)


@pytest.mark.parametrize("head", [b"GGUF", b"\x80\x02}q", b"once upon a time"])
def test_a_file_of_another_kind_is_unsupported(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "x").write_bytes(head)
    with pytest.raises(errors.UnsupportedError):
        deepnvme.load(tmp_path / "x")


@pytest.mark.filterwarnings("ignore")
def test_a_script_is_named_as_one(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 3)), tmp_path / "script.pt")
    with pytest.raises(errors.UnsupportedError, match=r"TorchScript.*torch\.jit\.load"):
        deepnvme.load(tmp_path / "script.pt")


def test_a_sharded_checkpoint_names_its_reader(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dcp.save({"a": torch.ones(2)}, storage_writer=DeepnvmeWriter(tmp_path / "shards"), no_dist=True)
    with pytest.raises(errors.NotFoundError, match=r"sharded checkpoint .*DeepnvmeReader"):
        deepnvme.load(tmp_path / "shards")
    assert _run_command(["convert", str(tmp_path / "shards"), str(tmp_path / "x.pt")]) != 0
    assert "DeepnvmeReader" in capfd.readouterr().err
