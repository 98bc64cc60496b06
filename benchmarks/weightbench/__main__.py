"""``python -m weightbench``: fill a model from cold files with every tool, in alternating rounds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import cache, command, fio, hugepages
from common.disk_idle import idle_disk
from common.limit import DiskLimit
from common.measure import Sample
from common.round_order import order
from weightbench import model
from weightbench.child import SMALL_LAYERS
from weightbench.tools import EVERYBODY

_FIO = "fio best"
_FIO_64 = "fio, 64 MiB of memory"
# 64 MiB fit no CPU cache. The memory of fio's best setting may fit.
_SETTING_64 = fio.FioSetting("libaio", 1 << 20, 64, huge=True)


@dataclass
class Contest:
    """The files, and the time of each tool."""

    scratch: Path
    layers: int
    nbytes: int
    limit: DiskLimit | None
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)

    def turn(self, name: str, *, is_counted: bool) -> None:
        """Have one tool fill the model.

        In the uncounted round, every byte is compared with the result of the others.
        """
        try:
            is_fio = name in {_FIO, _FIO_64}
            sample = self._fio(name) if is_fio else self._fill(name, is_compared=not is_counted)
        except Exception as error:  # noqa: BLE001 - whatever a baseline throws must not end the others' run
            self.left_out[name] = f"{type(error).__name__}: {str(error)[-300:]}"
            print(f"left out: {name}: {self.left_out[name]}", file=sys.stderr, flush=True)
            return
        if is_counted:
            self.samples.setdefault(name, []).append(sample)
        note = "" if is_counted else " (not counted)"
        print(f"{name:28} {sample.gb_per_s:.2f} GB/s{note}", file=sys.stderr, flush=True)

    def _fio(self, name: str) -> Sample:
        if self.limit is None:
            raise RuntimeError("fio is not installed, or has no huge pages")
        path = self.scratch / "limit.raw"
        cache.make_cold(path)
        if name == _FIO_64:
            return fio.transfer(_SETTING_64, "read", path, self.nbytes)
        return self.limit.read(path)

    def _fill(self, name: str, *, is_compared: bool) -> Sample:
        command = [sys.executable, "-m", "weightbench.child", name, str(self.scratch / "model")]
        command += [str(self.layers), str(self.scratch / "small")]
        log = self.scratch / "child.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as child,
        ):
            line = ""
            if child.stdout is not None and child.stdout.readline() == "ready\n":
                for path in model.files(self.scratch / "model"):
                    cache.make_cold(path)
                line, _ = child.communicate("compare\n" if is_compared else "\n")
        if not line:
            raise RuntimeError(log.read_text(errors="replace").strip())
        answer: dict[str, Any] = json.loads(line)
        if is_compared:
            self.expected = self.expected or answer["sums"]
            if answer["sums"] != self.expected:
                raise RuntimeError("what was filled in is not what the others filled in")
        extra = {"grown_mb": answer["grown_bytes"] / 1e6}
        return Sample(answer["wall_s"], answer["cpu_s"], self.nbytes, extra)


def summary(samples: dict[str, list[Sample]]) -> list[dict[str, Any]]:
    """Medians, and the medians of the ratios within the rounds to fio and to the servers' default."""
    lines: list[dict[str, Any]] = []
    for name, taken in sorted(samples.items(), key=lambda item: median(one.wall_s for one in item[1])):
        line: dict[str, Any] = {
            "name": name,
            "wall_s": median(one.wall_s for one in taken),
            "min_s": min(one.wall_s for one in taken),
            "max_s": max(one.wall_s for one in taken),
            "gb_per_s": median(one.gb_per_s for one in taken),
            "cpu_s_per_gb": median(one.cpu_s_per_gb for one in taken),
            "grown_mb": median(one.extra.get("grown_mb", 0) for one in taken),
        }
        for baseline in (_FIO, _FIO_64, "safetensors, lazy"):
            pairs = zip(taken, samples.get(baseline, []), strict=False)
            ratios = [other.wall_s / one.wall_s for one, other in pairs]
            line[f"of {baseline}"] = median(ratios) if ratios else None
        lines.append(line)
    return lines


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table."""
    heads = f"{'GB/s':>6} {'wall s':>7} {'min - max':>15} {'CPU s/GB':>9} {'grown by MB':>12}"
    print(f"{'':28} {heads} {'x fio':>6} {'x fio 64':>8} {'x lazy':>7}")
    for line in lines:
        of_fio, of_64, of_lazy = (
            "-" if line[f"of {baseline}"] is None else f"{line[f'of {baseline}']:.2f}"
            for baseline in (_FIO, _FIO_64, "safetensors, lazy")
        )
        spread = f"{line['min_s']:.3f} - {line['max_s']:.3f}"
        print(
            f"{line['name']:28} {line['gb_per_s']:6.2f} {line['wall_s']:7.3f} {spread:>15} "
            f"{line['cpu_s_per_gb']:9.3f} {line['grown_mb']:12,.0f} {of_fio:>6} {of_64:>8} {of_lazy:>7}",
        )


def run(arguments: argparse.Namespace, scratch: Path) -> Path:
    """Measure, and write the record."""
    model.write(scratch / "small", SMALL_LAYERS, arguments.shard_mb * 1_000_000)
    nbytes = model.write(scratch / "model", arguments.layers, arguments.shard_mb * 1_000_000)
    loads = [os.getloadavg()[0]]
    with hugepages.reserved(128 << 20), idle_disk(scratch) as disk:
        limit = None
        if fio.version() is not None and hugepages.free_bytes() >= 128 << 20:
            limit = DiskLimit.measure(scratch / "limit.raw", nbytes, huge=True)
            limit.write(scratch / "limit.raw")
            print(f"fio: {limit}", flush=True)
        contest = Contest(scratch, arguments.layers, nbytes, limit)
        for index in range(arguments.rounds + 1):
            for name in order([_FIO, _FIO_64, *EVERYBODY], index):
                if name not in contest.left_out:
                    disk.wait()
                    contest.turn(name, is_counted=index > 0)
            loads.append(os.getloadavg()[0])
    fields = {
        "weights_bytes": nbytes,
        "files": len(model.files(scratch / "model")),
        "rounds": arguments.rounds,
        "load": loads,
        "summary": summary(contest.samples),
        "samples": {name: [one.to_json() for one in taken] for name, taken in contest.samples.items()},
        "left_out": contest.left_out,
    }
    show(summary(contest.samples))
    return command.write_record(arguments.results, "weights", scratch, fields)


def main() -> int:
    """Parse the options, measure, and write the record."""
    parser = argparse.ArgumentParser(prog="weightbench", description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=22, help="number of layers of 88 MB, besides two ends of 131 MB"
    )
    parser.add_argument(
        "--shard-mb", type=int, default=500, help="approximate size of each file in MB (10^6 bytes)"
    )
    command.add_options(parser, rounds=5)
    arguments = parser.parse_args()
    return command.run_in_scratch(arguments.scratch, "weights", lambda scratch: run(arguments, scratch))


if __name__ == "__main__":
    sys.exit(main())
