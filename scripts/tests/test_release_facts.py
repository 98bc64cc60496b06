"""Tests of the judgements on a release."""

from __future__ import annotations

import json

import pytest

import release_facts as facts

CARGO = """[workspace]
version = "9.9.9"

[workspace.package]
edition = "2024"
version = "1.2.3"

[workspace.dependencies]
version = "8.8.8"
"""

VERSION_INFO = """
Version needs section '.gnu.version_r' contains 3 entries:
 Addr: 0x0000000000000b60  Offset: 0x00000b60  Link: 5 (.dynstr)
  000000: Version: 1  File: libc.so.6  Cnt: 3
  0x0010:   Name: GLIBC_2.2.5  Flags: none  Version: 12
  0x0020:   Name: GLIBC_2.28  Flags: none  Version: 2
  0x0030:   Name: GLIBC_2.9  Flags: none  Version: 3
  0x0040: Version: 1  File: libgcc_s.so.1  Cnt: 1
  0x0050:   Name: GCC_3.0  Flags: none  Version: 4
"""

DYNAMIC = """
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
 0x0000000000000001 (NEEDED)             Shared library: [liburing.so.2]
 0x000000000000000e (SONAME)             Library soname: [lib_deepnvme.so]
"""

URLS = dict.fromkeys(facts.URL_NAMES, "https://www.rust-lang.org/x")


def test_the_version_is_that_of_the_workspace() -> None:
    assert facts.cargo_version(CARGO) == "1.2.3"
    with pytest.raises(ValueError, match="no version"):
        facts.cargo_version("[workspace.package]\nedition = '2024'\n[package]\nversion = \"1.0.0\"\n")


def test_sections_of_the_changelog() -> None:
    text = "# Changelog\n\n## [0.2.0] - unreleased\n\n## [0.1.0] - 2026-12-01\n### Added\n## [0.0.1]\n## other\n"
    assert facts.changelog_dates(text) == {"0.2.0": "unreleased", "0.1.0": "2026-12-01", "0.0.1": "unreleased"}


def test_names_of_files() -> None:
    name = "deepnvme-0.1.0-cp310-abi3-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"
    assert facts.wheel_tags(name) == ("0.1.0", "cp310-abi3", {"manylinux_2_17_x86_64", "manylinux2014_x86_64"})
    with pytest.raises(ValueError, match="without a build number"):
        facts.wheel_tags("deepnvme-0.1.0.tar.gz")
    assert facts.sdist_version("deepnvme-0.1.0.tar.gz") == "0.1.0"


def test_needed_symbols_compare_as_numbers() -> None:
    needs = facts.glibc_versions(VERSION_INFO)
    assert needs == {"GLIBC_2.2.5", "GLIBC_2.28", "GLIBC_2.9"}
    assert facts.newer_than(needs) == []
    assert facts.newer_than(needs, (2, 10)) == ["GLIBC_2.28"]
    assert facts.newest(needs) == "GLIBC_2.28"
    assert facts.newest([]) == "none"


def test_a_symbol_without_a_number_is_too_new() -> None:
    assert facts.newer_than({"GLIBC_2.2.5", "GLIBC_ABI_DT_RELR", "GLIBC_PRIVATE", "GLIBC_2.29"}) == [
        "GLIBC_2.29",
        "GLIBC_ABI_DT_RELR",
        "GLIBC_PRIVATE",
    ]


def test_needed_libraries() -> None:
    names = facts.libraries(DYNAMIC)
    assert names == {"libc.so.6", "ld-linux-x86-64.so.2", "liburing.so.2"}
    assert facts.foreign_libraries(names) == ["liburing.so.2"]


def test_symbols_outside_the_stable_abi() -> None:
    result = {
        "non_abi3_symbols": ["PyGILState_Check", "_PyPrivate"],
        "future_abi3_objects": {"PyBuffer_Release": "3.11"},
    }
    report = {"specs": {"a.whl": {"kind": "wheel", "wheel": [{"name": "x.abi3.so", "result": result}]}}}
    assert facts.unstable_symbols(json.dumps(report)) - facts.EXPORTED_SYMBOLS == {"_PyPrivate"}


def test_contents_of_a_wheel() -> None:
    names = [pattern.replace("*", "0.1.0") for pattern in facts.IN_WHEEL]
    assert facts.absent(facts.IN_WHEEL, names) == []
    assert facts.absent(facts.IN_WHEEL, [name for name in names if "LICENSE" not in name]) == [
        "deepnvme-*.dist-info/licenses/LICENSE"
    ]
    assert facts.astray([*names, "tests/test_x.py"]) == ["tests/test_x.py"]


def test_an_sbom_describes_the_locked_crates() -> None:
    locked = facts.locked_crates('[[package]]\nname = "pyo3"\nversion = "0.30.1"\n\n[[package]]\nname = "libc"\n')
    assert locked == {"pyo3": "0.30.1"}
    bom = {"bomFormat": "CycloneDX", "metadata": {"component": {"version": "0.1.0"}}, "components": [{"name": "pyo3"}]}
    assert list(facts.sbom_faults(json.dumps(bom), "0.1.0", locked)) == []
    assert list(facts.sbom_faults(json.dumps(bom), "0.2.0", locked)) == [
        "the SBOM describes version 0.1.0, expected 0.2.0"
    ]
    other = {**bom, "bomFormat": "SPDX", "components": [{"name": "left"}]}
    assert len(list(facts.sbom_faults(json.dumps(other), "0.1.0", locked))) == 3
    assert len(list(facts.sbom_faults("{", "0.1.0", locked))) == 1


def test_a_tag_needs_a_date_and_addresses() -> None:
    assert facts.tag_faults("v0.1.0", "0.1.0", "2026-12-01", URLS) == []
    faults = facts.tag_faults("v0.1.1", "0.1.0", "unreleased", {})
    assert len(faults) == 2 + len(facts.URL_NAMES)


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("https://www.rust-lang.org", True),
        ("https://www.rust-lang.org/some/issues", True),
        ("http://www.rust-lang.org", False),
        ("https://example.com/deepnvme", False),
        ("https://deepnvme.example/", False),
        ("https://localhost/deepnvme", False),
        ("https://host.invalid", False),
        ("https://TO-SET", False),
    ],
)
def test_addresses_that_can_be_public(url: str, *, is_good: bool) -> None:
    assert facts.is_https(url) == is_good
