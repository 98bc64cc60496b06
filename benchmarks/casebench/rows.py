"""Cases of rows from a table on disk: a prompt, single steps, and skewed ids with a small cache."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import quantiles
from typing import TYPE_CHECKING, Any

import deepnvme
import numpy as np
import torch

from casebench.turns import MIB, cold

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Tools = dict[str, Callable[[], float]]

PAGE = 4096
# A prompt of 2,048 tokens that needs 16 rows for each.
PROMPT_ROWS = 32_768
STEP_ROWS, STEPS = 16, 400
# fio's settings: depth and jobs. The best is taken for each folder.
FIO_SETTINGS = [(128, 1), (256, 1), (64, 2), (128, 2)]


def _write_table(path: Path, mib: int) -> None:
    """Write random bytes, so that no disk compresses them."""
    block = np.random.default_rng(3).integers(0, 256, 64 * MIB, dtype=np.uint8)
    with path.open("wb") as file:
        for index in range(0, mib, 64):
            file.write(np.roll(block, index).tobytes())
        os.fsync(file.fileno())


def _fio(path: Path, ios: int, depth: int, jobs: int = 1, *options: str) -> dict[str, Any]:
    """Read random pages of the file, and return fio's report of them."""
    command = [
        "fio", "--name=rows", f"--filename={path}", "--rw=randread", f"--bs={PAGE}", "--direct=1",
        "--ioengine=io_uring", f"--iodepth={depth}", f"--numjobs={jobs}", f"--number_ios={ios // jobs}",
        "--norandommap", "--randrepeat=0", "--group_reporting", "--output-format=json", "--lat_percentiles=1",
        *options,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    read: dict[str, Any] = json.loads(done.stdout)["jobs"][0]["read"]
    return read


def _seconds(report: dict[str, Any]) -> float:
    return float(report["total_ios"]) / float(report["iops"])


class _Prompt:
    """Reads as many rows as a prompt needs, in each turn others."""

    def __init__(self, path: Path, row_bytes: int) -> None:
        self.path, self.row_bytes = path, row_bytes
        self.rows = path.stat().st_size // row_bytes
        self.table = deepnvme.RowStore(path, shape=(self.rows, row_bytes), dtype=torch.uint8, memory="64MiB")
        self.out = torch.empty(PROMPT_ROWS, row_bytes, dtype=torch.uint8)
        self.ids = torch.empty(0, dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(5)
        self.pool = ThreadPoolExecutor(64)
        self.descriptor = os.open(path, os.O_RDONLY)
        self.fio = min(FIO_SETTINGS, key=lambda setting: _seconds(_fio(path, PROMPT_ROWS, *setting)))

    def tools(self) -> Tools:
        return {
            "gather": self._turn(self._gather),
            "fio, 4 KiB each": lambda: _seconds(_fio(self.path, PROMPT_ROWS, *self.fio)),
            "mmap, MADV_WILLNEED": self._turn(self._will_need),
            "pread, 64 threads": self._turn(self._in_threads),
            "torch.from_file": self._turn(self._embedding),
        }

    def _turn(self, work: Callable[[], object]) -> Callable[[], float]:
        run = cold(self.path, work)

        def turn() -> float:
            self.ids = torch.randint(0, self.rows, (PROMPT_ROWS,), generator=self.generator)
            return run()

        return turn

    def _places(self) -> Iterator[tuple[int, memoryview]]:
        """Return the offset of each row, and its place in the result."""
        target = memoryview(self.out.numpy()).cast("B")
        for index, number in enumerate(self.ids.tolist()):
            yield number * self.row_bytes, target[index * self.row_bytes : (index + 1) * self.row_bytes]

    def _gather(self) -> None:
        self.table.gather(self.ids, out=self.out)

    def _will_need(self) -> None:
        places = list(self._places())
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as mapped:
            mapped.madvise(mmap.MADV_RANDOM)
            for start, _ in places:
                page = start // PAGE * PAGE
                mapped.madvise(mmap.MADV_WILLNEED, page, start + self.row_bytes - page)
            for start, target in places:
                target[:] = mapped[start : start + self.row_bytes]

    def _in_threads(self) -> None:
        places = list(self._places())

        def read(first: int) -> None:
            for start, target in places[first::64]:
                os.preadv(self.descriptor, [target], start)

        list(self.pool.map(read, range(64)))

    def _embedding(self) -> None:
        weight = torch.from_file(str(self.path), size=self.rows * self.row_bytes, dtype=torch.uint8)
        torch.index_select(weight.view(self.rows, self.row_bytes), 0, self.ids, out=self.out)


@contextmanager
def rows_160(folder: Path, mib: int) -> Iterator[Tools]:
    """Read 32,768 random rows of 160 bytes."""
    _write_table(folder / "rows", mib * 2)
    yield _Prompt(folder / "rows", 160).tools()


@contextmanager
def rows_4096(folder: Path, mib: int) -> Iterator[Tools]:
    """Read 32,768 random rows of 4 KiB."""
    _write_table(folder / "rows", mib * 2)
    yield _Prompt(folder / "rows", 4096).tools()


@contextmanager
def rows_step(folder: Path, mib: int) -> Iterator[Tools]:
    """Read 16 random rows of 160 bytes, again and again: the median and the 99th percentile of a gather."""
    path, row_bytes = folder / "rows", 160
    _write_table(path, mib * 2)
    rows = path.stat().st_size // row_bytes
    table = deepnvme.RowStore(path, shape=(rows, row_bytes), dtype=torch.uint8, memory="64MiB")
    out = torch.empty(STEP_ROWS, row_bytes, dtype=torch.uint8)

    def gathers(percentile: int) -> float:
        took = []
        for _ in range(STEPS):
            ids = torch.randint(0, rows, (STEP_ROWS,))
            began = time.perf_counter()
            table.gather(ids, out=out)
            took.append(time.perf_counter() - began)
        return quantiles(took, n=100)[percentile - 1]

    def fio(percentile: int) -> float:
        # All of a batch are submitted at once, and waited for.
        batches = (f"--iodepth_batch_submit={STEP_ROWS}", f"--iodepth_batch_complete_min={STEP_ROWS}")
        report = _fio(path, STEPS * STEP_ROWS, STEP_ROWS, 1, *batches)
        return float(report["lat_ns"]["percentile"][f"{percentile}.000000"]) / 1e9

    yield {
        "gather, p50": lambda: gathers(50),
        "gather, p99": lambda: gathers(99),
        "fio, p50": lambda: fio(50),
        "fio, p99": lambda: fio(99),
    }


def _lru_reads(ids: list[int], capacity: int) -> int:
    """Return how many reads an LRU cache of this many entries needs."""
    entries: OrderedDict[int, None] = OrderedDict()
    reads = 0
    for number in ids:
        if number in entries:
            entries.move_to_end(number)
            continue
        reads += 1
        entries[number] = None
        if len(entries) > capacity:
            entries.popitem(last=False)
    return reads


@contextmanager
def rows_skewed(folder: Path, _mib: int) -> Iterator[Tools]:
    """Read rows of 160 bytes with Zipf-distributed ids (exponent 1), with memory for 5% of them: megabytes read.

    A number of megabytes stands in place of each number of seconds. LRU caches of rows, and of pages, have the same
    memory; they are counted, not run.
    """
    rows, row_bytes, count = 400_000, 160, 400_000
    path = folder / "rows"
    _write_table(path, rows * row_bytes // MIB + 1)
    memory = rows * row_bytes // 20
    shuffled = np.random.default_rng(7).permutation(rows).tolist()

    def draw(seed: int) -> list[int]:
        uniform = np.random.default_rng(seed).random(count)
        return [shuffled[int(rank)] for rank in rows**uniform - 1]

    rounds = iter(range(1000))
    drawn = [draw(next(rounds))]

    def ours() -> float:
        drawn[0] = draw(next(rounds))
        with deepnvme.RowStore(path, shape=(rows, row_bytes), dtype=torch.uint8, memory=memory) as table:
            for first in range(0, count, 64):
                table.gather(drawn[0][first : first + 64])
            return table.stats().bytes_read / 1e6

    def pages(ids: list[int]) -> list[int]:
        ends = ((number * row_bytes // PAGE, ((number + 1) * row_bytes - 1) // PAGE) for number in ids)
        return [page for first, last in ends for page in range(first, last + 1)]

    yield {
        "gather": ours,
        "LRU of rows": lambda: _lru_reads(drawn[0], memory // row_bytes) * PAGE / 1e6,
        "LRU of pages": lambda: _lru_reads(pages(drawn[0]), memory // PAGE) * PAGE / 1e6,
    }
