"""Change files of a wheel after it was built: the list of its files with their hashes changes as well."""

from __future__ import annotations

import base64
import hashlib
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path


def read(wheel: Path, pattern: str) -> tuple[str, bytes]:
    """Return the name and the content of the only file whose name matches."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if Path(name).match(pattern))
        return name, archive.read(name)


def replace(wheel: Path, changed: Mapping[str, bytes]) -> None:
    """Replace files of a wheel, add those that it lacks, and update RECORD. Other files keep their bytes."""
    new = wheel.with_suffix(".new")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as made:
        entries = old.infolist()
        record = next(entry for entry in entries if entry.filename.endswith(".dist-info/RECORD"))
        added = sorted(changed.keys() - {entry.filename for entry in entries})
        for name in added:
            entry = zipfile.ZipInfo(name, record.date_time)
            entry.external_attr, entry.compress_type = record.external_attr, zipfile.ZIP_DEFLATED
            made.writestr(entry, changed[name])
        for entry in entries:
            content = changed[entry.filename] if entry.filename in changed else old.read(entry)
            if entry is record:
                content = _updated(content.decode(), changed, added).encode()
            made.writestr(entry, content)
    shutil.copymode(wheel, new)
    new.replace(wheel)


def _updated(record: str, changed: Mapping[str, bytes], added: list[str]) -> str:
    """Return the list of a wheel's files with the hashes and sizes of the changed and the added ones."""
    kept = [line for line in record.splitlines() if line.split(",")[0] not in added]
    lines = [_line(name, changed[name]) if (name := line.split(",")[0]) in changed else line for line in kept]
    return "\n".join([*(_line(name, changed[name]) for name in added), *lines]) + "\n"


def _line(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"
