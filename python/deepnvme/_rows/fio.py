"""fio as a contestant of ``deepnvme rows bench``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from deepnvme._rows.contestants import TURN_S_MAX, Contestant, Turn
from deepnvme.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from deepnvme._rows.region import Region

_DEPTHS = (32, 128)
_TRIAL_READS = 8192
_TRIAL_S = 1


class FioContestant(Contestant):
    """Runs fio on the rows' bytes of the file: as many random reads as there are rows.

    Raises:
        UnsupportedError: fio is missing, or does not run here.
    """

    name = "fio"

    def __init__(self, region: Region, count: int) -> None:
        if shutil.which("fio") is None:
            msg = "it is not installed; install it, for example with apt install fio"
            raise UnsupportedError(msg)
        if region.nbytes < region.read_bytes:
            msg = "the table is smaller than one of its reads"
            raise UnsupportedError(msg)
        self._region = region
        # A small gather waits for all of its reads before the next begins.
        self._batch = count if count <= _DEPTHS[0] else None
        depths = [depth for depth in _DEPTHS if depth <= count] if self._batch is None else [count]
        trials = {depth: self._run(depth, _TRIAL_READS, _TRIAL_S, 0) for depth in depths}
        self.depth = min(depths, key=lambda depth: trials[depth].seconds / max(trials[depth].rows, 1))

    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:
        """Read as many random blocks as there are ids; the round's number seeds them."""
        return self._run(self.depth, sum(len(rows) for rows in ids), TURN_S_MAX, number)

    def _run(self, depth: int, reads: int, seconds: int, seed: int) -> Turn:
        path, offset, nbytes, read_bytes, _ = self._region
        command = [
            "fio", "--name=rows", f"--filename={_escaped(path)}", "--readonly", "--rw=randread", f"--bs={read_bytes}",
            "--direct=1", "--ioengine=io_uring", f"--iodepth={depth}", f"--offset={offset}", f"--size={nbytes}",
            f"--number_ios={reads}", f"--runtime={seconds}", "--norandommap", f"--randseed={seed + 1}",
            "--output-format=json",
        ]  # fmt: skip
        if self._batch is not None:
            command += [f"--iodepth_batch_submit={depth}", f"--iodepth_batch_complete_min={depth}"]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
        except OSError as error:
            msg = f"fio does not start: {error.strerror}"
            raise UnsupportedError(msg) from error
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines()
            msg = f"fio fails here: {lines[-1] if lines else f'exit status {done.returncode}'}"
            raise UnsupportedError(msg)
        # Warnings may precede the report.
        job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        read = job["read"]
        if not read["total_ios"]:
            msg = "fio reads nothing here"
            raise UnsupportedError(msg)
        # fio reports whole milliseconds; a job shorter than one counts as one.
        spent = max(int(read["runtime"]), 1) / 1e3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Turn(int(read["total_ios"]), spent, None, cpu_s, int(read["io_bytes"]))


def _escaped(path: str) -> str:
    """Return a path for fio, which takes a colon for the end of a name."""
    return os.path.abspath(path).replace(":", "\\:")  # noqa: PTH100 (it may be a link)
