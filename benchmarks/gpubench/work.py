"""The rows by name, and the description of one row's work that goes to its process."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpubench import timeline
from gpubench.checkpoint import checkpoint
from gpubench.gpu import Gpu, RealGpu
from gpubench.load import load
from gpubench.optimizer import optimizer
from gpubench.rows import Pace, Row, restored
from gpubench.streaming import stream
from gpubench.tool import Place, reason
from gpubench.transfers import read, write
from storagebench import cache
from storagebench.tools.base import NotOffered

ROWS: dict[str, Callable[[Place, Row, Pace], Row]] = {
    "read": read,
    "write": write,
    "load": load,
    "stream": stream,
    "optimizer": optimizer,
    "checkpoint": checkpoint,
}
TIMELINE = "timeline"
KEYS = (*ROWS, TIMELINE)


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
    #: The row begins no other round after this time.
    seconds: float
    #: The file of the row, which is replaced before each step.
    saved: str
    #: The folder and the beginning of the names of timelines.
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

    def row(self) -> Row:
        """Return the row as it was saved last."""
        try:
            return restored(json.loads(Path(self.saved).read_text(encoding="utf-8"))["row"])
        except FileNotFoundError:
            return Row(self.key, left_out=dict(self.skip), now="starting")

    def facts(self) -> dict[str, object]:
        """Return the description of the GPU, if the row came that far."""
        try:
            facts: dict[str, object] = json.loads(Path(self.saved).read_text(encoding="utf-8"))["gpu"]
        except FileNotFoundError:
            return {}
        return facts


def do(job: Job, gpu: Gpu | None = None) -> Row:
    """Run the row in this process. An error of the row is in the row.

    Args:
        job: the work.
        gpu: the GPU to use. Default: the real one, or the fake driver in a rehearsal.
    """
    row = Row(job.key, left_out=dict(job.skip))
    facts: dict[str, object] = {}
    path = Path(job.saved)

    def save(row: Row) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"row": row.saved(), "gpu": facts}), encoding="utf-8")
        new.replace(path)

    save(row)
    scratch = Path(job.scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        gpu = gpu or _gpu(is_rehearsal=job.is_rehearsal)
        facts.update(gpu.facts())
        place = Place(gpu, scratch, job.nbytes, job.model_nbytes)
        pace = Pace(job.rounds, job.seconds, save)
        if job.key == TIMELINE:
            timeline.record(place, row, pace, Path(job.stem))
        else:
            ROWS[job.key](place, row, pace)
    except NotOffered as error:
        row.not_offered = str(error)
    except Exception as error:  # noqa: BLE001 - the other rows run without this one
        traceback.print_exc(file=sys.stderr)
        row.failure = f"{reason(error)}, while {row.now}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    save(row)
    return row


def _gpu(*, is_rehearsal: bool) -> Gpu:
    if is_rehearsal:
        cache.spare_others()
        from gpubench.fake import fake_gpu  # noqa: PLC0415

        return fake_gpu()
    return RealGpu()
