"""Tests that a wheel gets the licences of the crates in it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

import release_licences as licences

INFO = "deepnvme-0.1.0.dist-info"
SBOM = f"{INFO}/sboms/a.cyclonedx.json"
COMPONENTS = [
    {"name": "one", "version": "1.0.0", "purl": "pkg:cargo/one@1.0.0"},
    {"name": "two", "version": "2.0.0", "purl": "pkg:cargo/two@2.0.0"},
    {"name": "deepnvme-io", "version": "0.1.0", "purl": "pkg:cargo/deepnvme-io@0.1.0?download_url=file://../io"},
]


@pytest.fixture
def cargo_home(tmp_path: Path) -> Path:
    """Sources of two crates. They share a text, but not its line ends."""
    crates = tmp_path / "cargo" / "registry" / "src" / "index"
    files = {
        "one-1.0.0/LICENSE-MIT": "MIT\nby one",
        "one-1.0.0/LICENSE-APACHE": "Apache\nwithout a name",
        "two-2.0.0/COPYING": "Apache\r\n  without a name\r\n",
        "two-2.0.0/vendored/licence.txt": "ISC of vendored code",
        "two-2.0.0/src/license.rs": "fn code() {}",
    }
    for name, text in files.items():
        (crates / name).parent.mkdir(parents=True, exist_ok=True)
        (crates / name).write_text(text)
    return tmp_path / "cargo"


def make_wheel(path: Path, metadata: str) -> None:
    files = {
        f"{INFO}/METADATA": metadata,
        SBOM: json.dumps({"components": COMPONENTS}),
        f"{INFO}/RECORD": f"{INFO}/METADATA,sha256=old,1\n{SBOM},sha256=kept,2\n{INFO}/RECORD,,\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_each_text_appears_once(cargo_home: Path) -> None:
    text = licences.text(COMPONENTS, cargo_home)
    assert text.count("without a name") == 1
    assert "one 1.0.0, two 2.0.0\n\nApache" in text
    assert "\none 1.0.0\n\nMIT\nby one\n" in text
    assert "\ntwo 2.0.0\n\nISC of vendored code\n" in text
    assert "fn code" not in text
    assert "deepnvme-io" not in text


def test_the_wheel_lists_the_new_file(tmp_path: Path, cargo_home: Path) -> None:
    wheel = tmp_path / "a.whl"
    make_wheel(wheel, "Name: deepnvme\nLicense-File: LICENSE\n\ntext\n")
    licences.add(wheel, cargo_home)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{INFO}/METADATA").decode()
        assert metadata == "Name: deepnvme\nLicense-File: LICENSE\nLicense-File: THIRD-PARTY.txt\n\ntext\n"
        record = {line[0]: line[1:] for line in csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode()))}
        assert record.keys() == set(archive.namelist())
        for name in (f"{INFO}/METADATA", f"{INFO}/licenses/THIRD-PARTY.txt"):
            content = archive.read(name)
            digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert record[name] == [f"sha256={digest}", str(len(content))]
    assert record[SBOM] == ["sha256=kept", "2"]


def test_a_crate_without_a_licence_is_an_error(tmp_path: Path, cargo_home: Path) -> None:
    with pytest.raises(ValueError, match=r"sources of three 3\.0\.0 have no licence file"):
        licences.text([{"name": "three", "version": "3.0.0", "purl": "pkg:cargo/three@3.0.0"}], cargo_home)
    make_wheel(tmp_path / "a.whl", "Name: deepnvme\n")
    with pytest.raises(ValueError, match="does not name LICENSE once"):
        licences.add(tmp_path / "a.whl", cargo_home)
