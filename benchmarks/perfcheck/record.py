"""The ratios on record, one set for each kind of machine, and the comparison with them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Ratios:
    """Times of the baseline divided by ours, of some rounds. Higher means that deepnvme is faster."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratios:
        """Summarise rounds."""
        ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
        return cls(median(ratios), min(ratios), max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def has_fallen(now: Ratios, before: Ratios) -> bool:
    """Return whether the median is below all ratios on record, and the median on record above all new ratios."""
    return now.median < before.low and now.high < before.median


def kind_of_machine(environment: dict[str, Any]) -> str:
    """Return the name under which ratios are kept: they depend on the CPUs and on the disk."""
    disk = environment["disk"]
    where = f"{disk.get('driver')}, {disk.get('file_system')}"
    return f"{environment['cpu']}, {environment['cpu_count']} CPUs, {where}"


def read(path: Path, kind: str) -> dict[str, Ratios]:
    """Return the ratios of a kind of machine, or an empty dict."""
    if not path.exists():
        return {}
    recorded = json.loads(path.read_text(encoding="utf-8")).get(kind, {"cases": {}})
    return {name: Ratios(case["median"], case["low"], case["high"]) for name, case in recorded["cases"].items()}


def write(path: Path, kind: str, fields: dict[str, Any], cases: dict[str, Ratios]) -> None:
    """Replace the cases of this kind of machine that were run; others stay."""
    everything = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = everything.get(kind, {}).get("cases", {})
    everything[kind] = {**fields, "cases": {**kept, **{name: asdict(ratios) for name, ratios in cases.items()}}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
