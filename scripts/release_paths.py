"""Paths of the building machine: kept out of the extension, taken out of the SBOM, and looked for in a wheel."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import wheel_files

# cargo-cyclonedx names a crate of this workspace by its folder.
_LOCAL_CRATE = "path+file://"


def cargo_home() -> Path:
    """Return the folder of cargo's registry, with the sources of other crates."""
    return Path(os.environ.get("CARGO_HOME") or Path.home() / ".cargo").absolute()


def machine_folders(root: Path) -> dict[Path, str]:
    """Return the folders that a build knows, each with the name that stands for it."""
    return {root: "deepnvme", cargo_home(): "cargo"}


def rustc_flags(root: Path) -> str:
    """Return `CARGO_ENCODED_RUSTFLAGS` by which panics and assertions name files without these folders."""
    flags = os.environ.get("RUSTFLAGS", "").split()
    # Of several that match, rustc takes the last.
    flags += [f"--remap-path-prefix={folder}={name}" for folder, name in machine_folders(root).items()]
    return "\x1f".join(flags)


def without_folder(sbom: str, root: Path) -> str:
    """Return an SBOM whose references name this workspace's crates relative to the workspace."""

    def shortened(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shortened(one) for name, one in value.items()}
        if isinstance(value, list):
            return [shortened(one) for one in value]
        if isinstance(value, str):
            return value.replace(f"{_LOCAL_CRATE}{root}/", "path+file:")
        return value

    return json.dumps(shortened(json.loads(sbom)), indent=2) + "\n"


def rewrite_sbom(wheel: Path, root: Path) -> None:
    """Replace the SBOM of a wheel by one without the build folder."""
    name, content = wheel_files.read(wheel, "*.cyclonedx.json")
    wheel_files.replace(wheel, {name: without_folder(content.decode(), root).encode()})


def leaks(archive: zipfile.ZipFile, folders: Iterable[Path]) -> Iterator[str]:
    """Yield each file of a wheel that contains the path of a folder, with the text from there on."""
    wanted = [os.fsencode(folder) for folder in folders]
    for entry in archive.infolist():
        content = archive.read(entry)
        for folder in wanted:
            # With the slash: the name of a folder may begin the name of another one.
            at = content.find(folder + b"/")
            if at >= 0:
                around = content[at : at + len(folder) + 40].split(b"\0")[0]
                yield f"{entry.filename}: {around.decode(errors='replace')!r}"
                break
