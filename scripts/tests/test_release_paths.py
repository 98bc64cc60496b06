"""Tests that no path of the building machine is left in a wheel."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import release_paths as paths
import release_steps
from release_steps import Failed, Release

SBOM = "deepnvme-0.1.0.dist-info/sboms/deepnvme-python.cyclonedx.json"
RECORD = "deepnvme-0.1.0.dist-info/RECORD"


def make_wheel(path: Path, root: Path, extension: bytes = b"code") -> None:
    bom = {
        "metadata": {"component": {"bom-ref": f"path+file://{root}/python#deepnvme-python@0.1.0"}},
        "components": [{"bom-ref": f"path+file://{root}/crates/deepnvme-io#0.1.0", "name": "deepnvme-io"}],
        "dependencies": [{"ref": "registry+x#pyo3@1", "dependsOn": [f"path+file://{root}/crates/deepnvme-io#0.1.0"]}],
    }
    files = {"deepnvme/_deepnvme.abi3.so": extension, SBOM: json.dumps(bom).encode()}
    lines = [f"{name},sha256={digest(content)},{len(content)}" for name, content in files.items()]
    files["deepnvme-0.1.0.dist-info/licenses/THIRD-PARTY.txt"] = b"licences"
    files[RECORD] = "\n".join([*lines, f"{RECORD},,", ""]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6)), content)


def digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_the_sbom_of_a_wheel_gets_relative_references(tmp_path: Path) -> None:
    root, path = Path("/src/somebody/deepnvme"), tmp_path / "a.whl"
    make_wheel(path, root)
    with zipfile.ZipFile(path) as archive:
        assert len(list(paths.leaks(archive, [root]))) == 1
    paths.rewrite_sbom(path, root)
    assert list(tmp_path.iterdir()) == [path]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert list(paths.leaks(archive, [root])) == []
        bom = json.loads(archive.read(SBOM))
        assert bom["components"][0] == {"bom-ref": "path+file:crates/deepnvme-io#0.1.0", "name": "deepnvme-io"}
        assert bom["dependencies"][0]["dependsOn"] == ["path+file:crates/deepnvme-io#0.1.0"]
        assert archive.getinfo(SBOM).date_time == (2026, 1, 2, 3, 4, 6)
        # The list of files matches: pip compares it.
        for name, checksum, size in csv.reader(io.StringIO(archive.read(RECORD).decode())):
            if checksum:
                content = archive.read(name)
                assert (checksum, size) == (f"sha256={digest(content)}", str(len(content))), name


def test_a_path_in_the_extension_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = Release(folder=tmp_path)
    release.dist.mkdir()
    monkeypatch.setattr(release_steps, "check_contents", lambda *_: 3)
    monkeypatch.setattr(release_steps, "ROOT", tmp_path)
    wheel = release.dist / "a_x86_64.whl"
    make_wheel(wheel, Path("/elsewhere"))
    assert "3 crates" in release_steps.contents(release)
    for folder in (tmp_path, paths.cargo_home(), Path.home()):
        make_wheel(wheel, Path("/elsewhere"), b"\0" + os.fsencode(folder) + b"/src/lib.rs\0")
        with pytest.raises(Failed, match=r"contains paths of the machine.*_deepnvme\.abi3\.so"):
            release_steps.contents(release)


def test_the_compiler_leaves_the_folders_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("rustc") is None:
        pytest.skip("rustc is not installed")
    monkeypatch.setenv("RUSTFLAGS", "-C debuginfo=0")
    flags = paths.rustc_flags(tmp_path).split("\x1f")
    assert flags[:2] == ["-C", "debuginfo=0"]
    source = tmp_path / "main.rs"
    source.write_text('fn main() { println!("{}", file!()); }')
    command: list[str | Path] = ["rustc", *flags, "-o", tmp_path / "program", source]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert os.fsencode(tmp_path) + b"/main" not in (tmp_path / "program").read_bytes()
    told = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    assert told == "deepnvme/main.rs\n"
