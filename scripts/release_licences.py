"""The licences of the crates that an extension contains. MIT, ISC and Unicode ask for their text with each copy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import wheel_files

NAME = "THIRD-PARTY.txt"
_LICENCE = re.compile(r"(licen[sc]e|copying|copyright|notice|unlicense)[^/]*", re.IGNORECASE)
_CODE = (".rs", ".toml", ".py")


def add(wheel: Path, cargo_home: Path) -> None:
    """Add the licences of the crates that the wheel's SBOM lists.

    `ValueError`: a crate has none, or METADATA does not name LICENSE exactly once.
    """
    sbom = json.loads(wheel_files.read(wheel, "*.cyclonedx.json")[1])
    name, metadata = wheel_files.read(wheel, "*.dist-info/METADATA")
    licence = b"License-File: LICENSE\n"
    if metadata.count(licence) != 1:
        raise ValueError(f"{name} does not name LICENSE once")
    changed = {
        name: metadata.replace(licence, licence + f"License-File: {NAME}\n".encode()),
        name.replace("METADATA", f"licenses/{NAME}"): text(sbom["components"], cargo_home).encode(),
    }
    wheel_files.replace(wheel, changed)


def text(components: list[dict[str, str]], cargo_home: Path) -> str:
    """Return all licences of other people's crates. Each text appears once, after the names of its crates."""
    crates: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for name, version in foreign(components):
        for found in licences(name, version, cargo_home):
            # Copies differ in line ends and indents.
            key = " ".join(found.split())
            texts.setdefault(key, found)
            crates.setdefault(key, []).append(f"{name} {version}")
    sections = [f"{', '.join(dict.fromkeys(crates[key]))}\n\n{texts[key].strip()}\n" for key in texts]
    bar = "\n" + "=" * 80 + "\n\n"
    return bar.join(["The extension of deepnvme contains these crates, under these licences.\n", *sections])


def foreign(components: list[dict[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the name and version of each crate that comes from a registry."""
    for component in components:
        if "download_url=file" not in component["purl"]:
            yield component["name"], component["version"]


def licences(name: str, version: str, cargo_home: Path) -> list[str]:
    """Return the texts of a crate's licence files."""
    folders = sorted(cargo_home.glob(f"registry/src/*/{name}-{version}"))
    paths = sorted(folders[0].rglob("*")) if folders else []
    chosen = [path for path in paths if _LICENCE.fullmatch(path.name) and path.suffix not in _CODE and path.is_file()]
    if not chosen:
        raise ValueError(f"the sources of {name} {version} have no licence file")
    return [path.read_text(errors="replace") for path in chosen]
