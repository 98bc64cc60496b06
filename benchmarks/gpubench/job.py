"""The work of one row, as it goes to the row's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpubench.rows import RowResult


@dataclass(frozen=True)
class Job:
    """The work of one row."""

    key: str
    #: Use the tests' fake driver.
    is_rehearsal: bool
    scratch: str
    nbytes: int
    model_nbytes: int
    rounds: int
    #: The row begins no other round after this many seconds.
    rounds_s: float
    #: The file of the row, which is replaced before each turn.
    row_path: str
    #: The path of the timelines, without the end of their names.
    stem: str
    #: Tools to leave out, with the reason.
    skip: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read it from a file."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def row(self) -> RowResult:
        """Return the row as it was saved last."""
        try:
            return RowResult.from_json(json.loads(Path(self.row_path).read_text(encoding="utf-8"))["row"])
        except FileNotFoundError:
            return RowResult(self.key, left_out=dict(self.skip), activity="starting")

    def gpu_facts(self) -> dict[str, object]:
        """Return the description of the GPU, if the row came that far."""
        try:
            facts: dict[str, object] = json.loads(Path(self.row_path).read_text(encoding="utf-8"))["gpu"]
        except FileNotFoundError:
            return {}
        return facts
