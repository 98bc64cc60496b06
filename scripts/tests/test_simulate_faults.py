"""The patches of `make simulate-faults` apply to the current code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import simulate_faults

PATCHES = sorted(simulate_faults.FAULTS.glob("*.patch"))
KINDS = simulate_faults.ROOT / "crates" / "deepnvme-simulation" / "src" / "scenario" / "kind.rs"


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
def test_each_applies(patch: Path) -> None:
    assert simulate_faults.why_not(patch) == ""
    names = re.findall(r"Self::\w+ => \"(\w+)\"", KINDS.read_text())
    assert simulate_faults.scenario_of(patch) in names


def test_one_that_does_not_apply_is_noticed(tmp_path: Path) -> None:
    patch = tmp_path / "files-gone.patch"
    text = PATCHES[0].read_text()
    patch.write_text(re.sub(r"^-.+$", "-    this line is not there", text, flags=re.MULTILINE))
    assert simulate_faults.why_not(patch)
