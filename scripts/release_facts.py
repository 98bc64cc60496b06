"""Read the facts of a release from texts and archives: versions, ELF requirements, contents. Standard library only.

`release_steps.py` runs the tools; this module judges their output, so tests need no build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatch

OLDEST_GLIBC = (2, 28)
# A release needs these addresses in `project.urls`.
URL_NAMES = ("Repository", "Documentation", "Changelog", "Issues")

# manylinux_2_28 guarantees more libraries; deepnvme needs only these.
SYSTEM_LIBRARIES = (
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "librt.so.1",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "ld-linux-*.so.*",
)
IN_WHEEL = (
    "deepnvme/__init__.py",
    "deepnvme/py.typed",
    "deepnvme/_deepnvme.pyi",
    "deepnvme/_deepnvme.abi3.so",
    "deepnvme-*.dist-info/METADATA",
    "deepnvme-*.dist-info/entry_points.txt",
    "deepnvme-*.dist-info/licenses/LICENSE",
    "deepnvme-*.dist-info/sboms/*.cyclonedx.json",
)
IN_SDIST = ("PKG-INFO", "pyproject.toml", "Cargo.toml", "Cargo.lock", "LICENSE", "README.md", "CHANGELOG.md")
# Top-level folders of a wheel.
WHEEL_FOLDERS = ("deepnvme/*", "deepnvme-*.dist-info/*")

# Python 3.10 exports these without promising them. The first two are in the stable ABI from 3.11 on; python/src/memory
# says why each is used. The steps that use the wheel with each Python show that they are there.
EXPORTED_SYMBOLS = frozenset({"PyObject_GetBuffer", "PyBuffer_Release", "PyGILState_Check"})

NEEDED_LIBRARY = re.compile(r"\(NEEDED\)\s+Shared library: \[(.+?)\]")
NEEDED_VERSION = re.compile(r"\bName: (GLIBC_[\w.]+)\s+Flags:")
CARGO_VERSION = re.compile(r'^\[workspace\.package\]\n(?:(?!\[).*\n)*?version = "([^"]+)"', re.MULTILINE)
CHANGELOG_SECTION = re.compile(r"^## \[([^\]]+)\](?: - (\S+))?[ \t]*$", re.MULTILINE)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def cargo_version(cargo_toml: str) -> str:
    """Return the workspace's version."""
    found = CARGO_VERSION.search(cargo_toml)
    if not found:
        raise ValueError("Cargo.toml has no version in [workspace.package]")
    return found[1]


def changelog_dates(changelog: str) -> dict[str, str]:
    """Return each version that has a section, with its date, or `unreleased`."""
    return {version: date or "unreleased" for version, date in CHANGELOG_SECTION.findall(changelog)}


def wheel_tags(name: str) -> tuple[str, str, set[str]]:
    """Split the name of a wheel into its version, its Python and ABI tags, and its platforms."""
    parts = name.removesuffix(".whl").split("-")
    if not name.endswith(".whl") or len(parts) != 5:  # noqa: PLR2004
        raise ValueError(f"{name} is not the name of a wheel without a build number")
    return parts[1], "-".join(parts[2:4]), set(parts[4].split("."))


def sdist_version(name: str) -> str:
    """Return the version in the name of a source distribution."""
    return name.removesuffix(".tar.gz").rpartition("-")[2]


def libraries(dynamic_section: str) -> set[str]:
    """Return the shared libraries that `readelf --dynamic` lists."""
    return set(NEEDED_LIBRARY.findall(dynamic_section))


def glibc_versions(version_info: str) -> set[str]:
    """Return the versions of glibc's symbols that `readelf --version-info` lists as needed."""
    return set(NEEDED_VERSION.findall(version_info))


def foreign_libraries(names: Iterable[str]) -> list[str]:
    """Return the libraries that a Linux with glibc need not have."""
    return sorted(name for name in names if not any(fnmatch(name, known) for known in SYSTEM_LIBRARIES))


def newer_than(names: Iterable[str], oldest: tuple[int, int] = OLDEST_GLIBC) -> list[str]:
    """Return the symbol versions that a glibc of that version lacks. Private ones count: no version guarantees them."""
    return sorted(name for name in names if (version := version_of(name)) is None or version > oldest)


def version_of(symbol_version: str) -> tuple[int, ...] | None:
    """Return `GLIBC_2.17` as numbers, or None for a name without a number."""
    digits = symbol_version.removeprefix("GLIBC_").split(".")
    return tuple(map(int, digits)) if all(part.isdigit() for part in digits) else None


def newest(names: Iterable[str]) -> str:
    """Return the newest of these symbol versions."""
    return max(names, key=lambda name: version_of(name) or (0,), default="none")


def unstable_symbols(abi3audit_report: str) -> set[str]:
    """Return the symbols that the JSON of `abi3audit --report` calls foreign to the wheel's stable ABI."""
    names: set[str] = set()
    for spec in json.loads(abi3audit_report)["specs"].values():
        for extension in spec["wheel"]:
            names |= {*extension["result"]["non_abi3_symbols"], *extension["result"]["future_abi3_objects"]}
    return names


def absent(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the patterns that no name matches."""
    return [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in names)]


def astray(names: Iterable[str]) -> list[str]:
    """Return the files of a wheel that would land outside the package."""
    return sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in WHEEL_FOLDERS))


def sbom_faults(text: str, version: str, locked: Mapping[str, str]) -> Iterator[str]:
    """Yield the ways in which an SBOM does not describe the crates of this release."""
    try:
        bom = json.loads(text)
    except json.JSONDecodeError as error:
        yield f"the SBOM is not JSON: {error}"
        return
    if bom.get("bomFormat") != "CycloneDX":
        yield f"the SBOM's format is {bom.get('bomFormat')!r}, expected 'CycloneDX'"
    if (found := bom.get("metadata", {}).get("component", {}).get("version")) != version:
        yield f"the SBOM describes version {found}, expected {version}"
    components = bom.get("components", [])
    if not any(component.get("name") == "pyo3" for component in components):
        yield "the SBOM does not list pyo3, which every wheel contains"
    for component in components:
        if component.get("name") not in locked:
            yield f"the SBOM lists {component.get('name')}, which Cargo.lock does not"


def locked_crates(cargo_lock: str) -> dict[str, str]:
    """Return a version of each crate of a lock file."""
    return dict(re.findall(r'^name = "([^"]+)"\nversion = "([^"]+)"', cargo_lock, re.MULTILINE))


def url_faults(urls: Mapping[str, str]) -> list[str]:
    """Return the faults of `project.urls`."""
    faults = [f"project.urls lacks {name}" for name in URL_NAMES if name not in urls]
    return faults + [f"{name} is not an https address: {url}" for name, url in urls.items() if not is_https(url)]


def is_https(url: str) -> bool:
    """Whether this is an address with a host that can be public."""
    host = re.match(r"https://([^/:@\s]+\.[a-z]+)(?:/|$)", url)
    return host is not None and not host[1].endswith((".example", ".invalid", ".test", ".local", "example.com"))


def tag_faults(tag: str, version: str, date: str, urls: Mapping[str, str]) -> list[str]:
    """Return the reasons against a release of this tag."""
    faults = [] if tag == f"v{version}" else [f"the tag is {tag}, and Cargo.toml's version {version}"]
    if not DATE.fullmatch(date):
        faults.append(f"CHANGELOG.md has {date!r} in place of the date of {version}")
    return faults + url_faults(urls)
