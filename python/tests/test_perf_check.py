"""The comparison of ``make perf-check``: a case has fallen if both sets of rounds agree on it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def record() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("perfcheck.record")
    for name in [name for name in sys.modules if name.partition(".")[0] == "perfcheck"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("ours", "has_fallen"),
    [
        ([1.0, 1.0, 1.1, 1.0, 0.9], False),  # as before
        ([0.5, 0.5, 0.5, 0.5, 0.5], False),  # faster
        ([1.2, 1.3, 0.9, 1.3, 1.2], False),  # slower, but one round was as fast as before
        ([1.3, 1.3, 1.4, 1.3, 1.3], True),
    ],
)
def test_a_case_has_fallen_if_all_its_rounds_say_so(record: Any, ours: list[float], has_fallen: bool) -> None:
    theirs = [2.0] * 5
    before = record.Ratios.of([1.0, 1.1, 0.9, 1.0, 1.0], theirs)
    assert (before.median, before.low) == (2.0, pytest.approx(1.818, abs=0.001))
    assert record.has_fallen(record.Ratios.of(ours, theirs), before) == has_fallen


def test_records_of_other_machines_and_cases_stay(record: Any, tmp_path: Path) -> None:
    path, ratios = tmp_path / "results" / "perf-check.json", record.Ratios(1.0, 0.9, 1.1)
    assert record.read(path, "A") == {}
    record.write(path, "A", {"date": "1"}, {"load": ratios, "save": ratios})
    record.write(path, "B", {"date": "2"}, {"load": record.Ratios(3.0, 2.0, 4.0)})
    record.write(path, "A", {"date": "3"}, {"save": record.Ratios(5.0, 5.0, 5.0)})
    assert record.read(path, "A") == {"load": ratios, "save": record.Ratios(5.0, 5.0, 5.0)}
    assert record.read(path, "B")["load"].median == 3.0
    assert record.read(path, "C") == {}


def test_the_kind_of_a_machine_has_no_path(record: Any) -> None:
    described = {"cpu": "Some CPU", "cpu_count": 2, "disk": {"driver": "nvme", "file_system": "xfs"}}
    assert record.kind_of_machine(described) == "Some CPU, 2 CPUs, nvme, xfs"
