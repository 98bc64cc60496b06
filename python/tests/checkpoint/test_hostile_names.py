"""Names that control a terminal are shown with escapes. Paths that are not UTF-8 work everywhere."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import errors
from deepnvme._deepnvme import _python_command, _run_command

# Sequences that clear a screen, begin a line, or turn text around, and a control sequence in one character.
EVIL = "\x1b[2J\r\x07line\nsound        forged\u202e\u009b"


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = _run_command(list(arguments))
    said = capfd.readouterr()
    return status, said.out + said.err


def is_plain(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_no_command_prints_terminal_controls(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / f"f{EVIL}"
    folder.mkdir()
    state = {f"layer{EVIL}": torch.randn(3), f"other.{EVIL}x": torch.randn(2)}
    tensors, archive = folder / "x.safetensors", folder / "x.pt"
    deepnvme.save(state, tensors, metadata={f"key{EVIL}": f"value{EVIL}"})
    deepnvme.save({**state, f"no tensor {EVIL}": 5}, archive)
    broken, missing = folder / "broken.safetensors", folder / "missing.pt"
    broken.write_bytes(tensors.read_bytes()[:-1])
    toml = folder / "bad.toml"
    toml.write_text(f'[engine]\n"{EVIL}" = 1')
    for arguments in (
        ["inspect", str(tensors)], ["inspect", str(archive), "--all"], ["inspect", str(missing)],
        ["inspect", str(broken)],
        ["verify", str(tensors), str(broken)], ["verify", str(missing)], ["inspect", str(folder)],
        ["convert", str(archive), str(folder / "new.safetensors")],
        ["convert", str(archive), str(folder / "no" / "x.pt")],
        ["report", str(folder)], ["pack", str(folder), str(folder / "packed")], ["tune", str(missing)],
    ):  # fmt: skip
        _, said = run(capfd, *arguments)
        assert is_plain(said), (arguments, said)
        assert "\nsound        forged" not in said, said
    status, said = run(capfd, "inspect", str(tensors), "--all")
    assert status == 0
    assert r"layer\u{1b}[2J\r\u{7}line\nsound" in said
    # JSON is exact.
    status, said = run(capfd, "inspect", str(tensors), "--json")
    assert {tensor["name"] for tensor in json.loads(said)["files"][0]["tensors"]} == set(state)
    with pytest.raises(errors.Error) as caught:
        deepnvme.Engine.from_file(toml)
    assert caught.value.filename == str(toml)


NAME = os.fsdecode(b"n\xff\xfe")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    try:
        (tmp_path / NAME).mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    return tmp_path / NAME


def test_files_whose_names_are_no_utf8(folder: Path) -> None:
    state: dict[str, Any] = {"a": torch.randn(3000), "b": {"c": torch.randn(2)}}
    flat = {"a": torch.randn(3000)}
    for kind in (Path, str, os.fsencode):
        for suffix, saved in (("pt", state), ("safetensors", flat)):
            path = kind(folder / f"x{NAME}.{suffix}")
            deepnvme.save(saved, path)
            for options in ({"verify": "full"}, {"lazy": True}, {"only": "a"}):
                assert torch.equal(deepnvme.load(path, **options)["a"], saved["a"])
            into = {"a": torch.empty(3000)}
            deepnvme.load(path, into=into) if suffix == "safetensors" else None
    raw = folder / f"raw{NAME}"
    deepnvme.write(flat["a"], raw)
    back = torch.empty(3000)
    deepnvme.read(back, raw)
    assert torch.equal(back, flat["a"])
    with deepnvme.open(raw, "rb") as file:
        assert file.read() == raw.read_bytes()
    with pytest.raises(FileNotFoundError) as missing:
        deepnvme.load(folder / f"none{NAME}")
    assert missing.value.filename == str(folder / f"none{NAME}")
    (folder / f"bad{NAME}").write_bytes(b"hello, this is no checkpoint")
    with pytest.raises(errors.UnsupportedError) as bad:
        deepnvme.load(folder / f"bad{NAME}")
    assert bad.value.filename == str(folder / f"bad{NAME}")


def test_sets_and_folders_whose_names_are_no_utf8(folder: Path) -> None:
    state = {str(index): torch.randn(300) for index in range(4)}
    deepnvme.save(state, folder / "model.safetensors", max_shard_bytes=2500)
    assert deepnvme.load(folder, verify="full").keys() == state.keys()
    with deepnvme.Checkpointer(folder / "steps") as checkpointer:
        checkpointer.save(1, state)
        assert torch.equal(checkpointer.restore(verify="full")["0"], state["0"])
    with deepnvme.Checkpointer(folder / "steps") as checkpointer:
        assert checkpointer.latest() is not None
    # A manifest names the parts in its own folder by file name, whatever the folder is called.
    parts = deepnvme.StripeSet([folder / "a", folder / "b"], stripe_bytes=4096)
    deepnvme.save(state, parts)
    assert deepnvme.load(parts, verify="full").keys() == state.keys()


def test_a_manifest_cannot_name_a_part_in_a_folder_that_is_no_utf8(folder: Path, tmp_path: Path) -> None:
    state = {str(index): torch.randn(300) for index in range(4)}
    parts = deepnvme.StripeSet([tmp_path / "a", folder / "b"], stripe_bytes=4096)
    with pytest.raises(errors.InvalidArgumentError, match="UTF-8"):
        deepnvme.save(state, parts)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_commands_on_names_that_are_no_utf8(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    state = {"a": torch.randn(300)}
    source, target = folder / f"x{NAME}.pt", folder / f"y{NAME}.safetensors"
    deepnvme.save(state, source)
    for arguments in (
        ["inspect", str(source)], ["inspect", "--json", str(source)], ["verify", str(source)],
        ["verify", "--json", str(source)],
        ["convert", str(source), str(target)], ["verify", str(target)], ["report", str(folder)],
        ["report", "--json", str(folder)],
    ):  # fmt: skip
        status, said = run(capfd, *arguments)
        assert status == 0 or arguments[0] == "report", (arguments, said)
        assert r"\xff\xfe" in said.replace(r"\\", "\\"), (arguments, said)
        assert "\ufffd" not in said
    assert torch.equal(deepnvme.load(target)["a"], state["a"])
    for processes in (1, 2):
        measured = deepnvme.bench("read", folder, size="64K", loops=1, processes=processes)
        assert r"\xff\xfe" in measured["workload"]["folders"][0]
    # Settings are TOML, which is UTF-8. The refusal comes before any trial.
    began = time.monotonic()
    with pytest.raises(errors.Error, match="UTF-8"):
        deepnvme.tune(folder, budget=30, output=folder / "deepnvme.toml")
    assert time.monotonic() - began < 20
    assert sorted(path.name for path in folder.iterdir()) == [source.name, target.name]
    # Python gets the exact path.
    (folder / "config.json").write_text("{}")
    asked = _python_command(["generate", "--model", str(folder), "--prompt", "x", "--memory", "1GB"])
    assert asked is not None
    assert os.fsdecode(bytes(json.loads(asked[1])["model"])) == str(folder)


def test_the_program_takes_such_names(folder: Path) -> None:
    source = folder / f"x{NAME}.pt"
    deepnvme.save({"a": torch.randn(3)}, source)
    done = subprocess.run([sys.executable, "-m", "deepnvme", "inspect", source], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert rb"\xff\xfe" in done.stdout
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401

        done = subprocess.run(
            [sys.executable, "-m", "deepnvme", "generate", "--model", folder, "--prompt", "x", "--memory", "1GB"],
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert b"config.json" in done.stderr
