"""The rows by name, and how one runs."""

from __future__ import annotations

import json
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from common import cache
from common.not_offered import NotOffered
from gpubench import timeline
from gpubench.checkpoint import checkpoint
from gpubench.gpu import Gpu, RealGpu
from gpubench.job import Job
from gpubench.load import load
from gpubench.optimizer import optimizer
from gpubench.rows import RoundLimits, RowResult
from gpubench.streaming import stream
from gpubench.tool import Setup, reason
from gpubench.transfers import read, write

ROWS: dict[str, Callable[[Setup, RowResult, RoundLimits], RowResult]] = {
    "read": read,
    "write": write,
    "load": load,
    "stream": stream,
    "optimizer": optimizer,
    "checkpoint": checkpoint,
}
TIMELINE = "timeline"
KEYS = (*ROWS, TIMELINE)


def run_row(job: Job, gpu: Gpu | None = None) -> RowResult:
    """Run a row in this process. If it fails, its `failure` has the error.

    Args:
        job: the work.
        gpu: the GPU to use. Default: the real one, or the fake driver in a rehearsal.
    """
    row = RowResult(job.key, left_out=dict(job.skip))
    facts: dict[str, object] = {}
    path = Path(job.row_path)

    def save(row: RowResult) -> None:
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"row": row.to_json(), "gpu": facts}), encoding="utf-8")
        new.replace(path)

    save(row)
    scratch = Path(job.scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        gpu = gpu or _gpu(is_rehearsal=job.is_rehearsal)
        facts.update(gpu.facts())
        setup = Setup(gpu, scratch, job.nbytes, job.model_nbytes)
        limits = RoundLimits(job.rounds, job.rounds_s, save)
        if job.key == TIMELINE:
            timeline.record(setup, row, limits, Path(job.stem))
        else:
            ROWS[job.key](setup, row, limits)
    except NotOffered as error:
        row.not_offered = str(error)
    except Exception as error:  # noqa: BLE001 - the other rows run without this one
        traceback.print_exc(file=sys.stderr)
        row.failure = f"{reason(error)}, while {row.activity}"
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
