"""``deepnvme rows bench``: gather random rows, compared with fio and a mapped file in alternating rounds."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepnvme._deepnvme import __version__
from deepnvme._rows.named_table import NamedTable, Region, dtype_name, find_region, labelled, row_text, size_text
from deepnvme._rows.row_store import RowStore
from deepnvme._utils.memory import available_bytes
from deepnvme._utils.public import parse_bytes
from deepnvme._utils.terminal import is_terminal, say, show
from deepnvme.errors import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

# A turn makes as many gathers as take about this time, within these limits.
_TURN_S = 0.5
_GATHERS = (3, 400)
# The ids of a gather, as integers of 64 bits.
_ID_BYTES = 8
_NO_COLUMN = "-"
# A turn ends after this time, with the gathers that it has made.
TURN_S_MAX = 5
_DEPTHS = (32, 128)
_TRIAL_READS = 8192
_TRIAL_S = 1
_SEED = 5
_ID_BITS = 62
# The golden ratio spreads consecutive ranks over the table.
_SPREAD = 0.618


class _Setting(NamedTuple):
    """The table of a run, and how it is measured."""

    table: NamedTable
    memory: int
    zipf: float | None
    rounds: int
    against: list[str]
    region: Region | str
    """The bytes of the rows, or why there is no such region."""


def run(options: dict[str, Any]) -> int:
    """Run the benchmark with its options. Returns the exit status."""
    table = NamedTable.parse(options)
    if table.tensor is None and table.shape is None and table.packed() is None:
        msg = (
            f"{table.source} is no packed table; name a tensor with --tensor (deepnvme rows inspect lists them), or "
            "give --shape and --dtype of a raw file"
        )
        raise InvalidArgumentError(msg)
    memory = parse_bytes(options["memory"], "--memory")
    setting = _Setting(table, memory, options["zipf"], options["rounds"], options["against"], find_region(table))
    results: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    with table.open(memory) as store:
        if len(store) == 0:
            msg = f"{table.source}: the table has no rows; name another one"
            raise InvalidArgumentError(msg)
        described = _described(store, setting)
    if not options["json"]:
        _print_table(described, setting)
    for count in options["rows"]:
        measured = _measure(setting, count, left_out)
        results.append(measured)
        if not options["json"]:
            _print_result(measured, is_first=len(results) == 1)
    if options["json"]:
        say(json.dumps({"version": __version__, **described, "results": results, "left_out": left_out}, indent=2))
        return 0
    say("")
    _print_notes(setting, results, left_out)
    return 0


def _described(store: RowStore, setting: _Setting) -> dict[str, Any]:
    row_bytes = math.prod(store.shape[1:]) * store.dtype.itemsize
    return {
        "source": setting.table.source,
        "shape": [*store.shape],
        "dtype": dtype_name(store.dtype),
        "row_bytes": row_bytes,
        "is_packed": setting.table.packed() is not None,
        "memory_bytes": store.stats().memory_bytes,
        "cached_rows_max": store.stats().cached_rows_max,
        "zipf": setting.zipf,
        "rounds": setting.rounds,
    }


def _measure(setting: _Setting, count: int, left_out: dict[str, str]) -> dict[str, Any]:
    """Measure gathers of this many rows."""
    table = setting.table
    progress = _Progress()
    files = table.files()
    with table.open(setting.memory) as store:
        row_bytes = math.prod(store.shape[1:]) * store.dtype.itemsize
        _check_room(count, math.prod(store.shape[1:]) * store.gathered_dtype.itemsize, setting)
        ids = DrawnIds(len(store), setting.zipf)
        ours = RowStoreTool(store, count)
        tools: list[Tool] = [ours, *_baselines(setting, store, count, left_out)]
        drop_pages(files)
        # The first gather allocates, so the second is timed.
        took = [_seconds(ours, ids.draw(count)) for _ in range(2)][1]
        low, high = _GATHERS
        gathers = min(max(math.ceil(_TURN_S / took), low), high)
        turns: dict[str, list[Turn]] = {one.name: [] for one in tools}
        try:
            for number in range(setting.rounds):
                wanted = [ids.draw(count) for _ in range(gathers)]
                first = number % len(tools)
                for one in [*tools[first:], *tools[:first]]:
                    progress.show(f"{count:,} rows, round {number + 1} of {setting.rounds}: {one.name}")
                    drop_pages(files)
                    turns[one.name].append(one.turn(wanted, number))
        finally:
            progress.close()
    rows = {one.name: _summary(turns[one.name], count, row_bytes) for one in tools}
    depths = {one.name: one.depth for one in tools if isinstance(one, FioTool)}
    return {"rows_per_gather": count, "gathers_per_round": gathers, "tools": rows, "fio_depth": depths.get("fio")}


def _baselines(setting: _Setting, store: RowStore, count: int, left_out: dict[str, str]) -> list[Tool]:
    """Return the baselines that can read this table. The others are left out, with a reason."""
    found: list[Tool] = []
    for name in dict.fromkeys(setting.against):
        region = setting.region
        if isinstance(region, str):
            left_out[name] = region
        elif name not in left_out:
            try:
                found.append(_baseline(name, region, store, count))
            except UnsupportedError as error:
                left_out[name] = str(error)
    return found


def _baseline(name: str, region: Region, store: RowStore, count: int) -> Tool:
    if name == "fio":
        return FioTool(region, count)
    return MmapTool(region, len(store), math.prod(store.shape[1:]) * store.dtype.itemsize, count)


def _check_room(count: int, row_bytes: int, setting: _Setting) -> None:
    """Check that there is memory for the ids and the results of gathers."""
    results = 1 + ("mmap" in setting.against)
    needed = count * (row_bytes * results + _ID_BYTES * 2 * _GATHERS[0])
    available = available_bytes()
    if available is not None and needed > available:
        msg = f"gathers of {count:,} rows need {needed:,} bytes, and {available:,} are available; lower --rows"
        raise InvalidArgumentError(msg)


def _seconds(tool: Tool, ids: torch.Tensor) -> float:
    began = time.perf_counter()
    tool.turn([ids], 0)
    return max(time.perf_counter() - began, 1e-6)


def _summary(turns: list[Turn], count: int, row_bytes: int) -> dict[str, Any]:
    """Summarise the rounds of a tool by their medians."""
    speed = median(turn.rows / turn.seconds for turn in turns)
    latencies = [turn.latencies_s for turn in turns if turn.latencies_s is not None]
    read = [turn.bytes_read / turn.rows for turn in turns if turn.bytes_read is not None]
    hits = [turn.hits for turn in turns if turn.hits is not None]
    return {
        "p50_ms": median(_percentile(one, 50) for one in latencies) * 1e3 if latencies else None,
        "p99_ms": median(_percentile(one, 99) for one in latencies) * 1e3 if latencies else None,
        "mean_ms": count / speed * 1e3,
        "rows_per_s": speed,
        "mb_per_s": speed * row_bytes / 1e6,
        "cpu_us_per_row": median(turn.cpu_s / turn.rows for turn in turns) * 1e6,
        "bytes_read_per_row": median(read) if read else None,
        "hits": median(hits) if hits else None,
        "rounds_rows_per_s": [turn.rows / turn.seconds for turn in turns],
    }


def _percentile(values: list[float], percent: int) -> float:
    """Return the value that this percentage of the values does not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100) - 1, 0)]


def _print_table(described: dict[str, Any], setting: _Setting) -> None:
    rows, *row_shape = described["shape"]
    kind = "packed" if described["is_packed"] else "in place"
    size = f"{described['row_bytes']:,} bytes each, {size_text(rows * described['row_bytes'])} in all, {kind}"
    say(labelled("table", f"{rows:,} rows of {row_text(row_shape, described['dtype'])}, {size}"))
    cached = described["cached_rows_max"]
    held = "all rows: nothing is read after the first time" if cached >= rows else f"{cached:,} rows"
    say(labelled("memory", f"{setting.memory:,} bytes for {held}"))
    ids = "uniform" if setting.zipf is None else f"Zipf, exponent {setting.zipf:g}"
    say(labelled("ids", f"{ids}; medians of {setting.rounds} round{'' if setting.rounds == 1 else 's'}"))
    say("")


def _print_result(measured: dict[str, Any], *, is_first: bool) -> None:
    if is_first:
        say("rows/gather            p50 ms   p99 ms      rows/s     MB/s  CPU us/row  bytes read/row   hits")
    for number, (name, one) in enumerate(measured["tools"].items()):
        count = f"{measured['rows_per_gather']:,}" if number == 0 else ""
        p50 = one["mean_ms"] if one["p50_ms"] is None else one["p50_ms"]
        p99 = _NO_COLUMN if one["p99_ms"] is None else f"{one['p99_ms']:.3f}"
        read = _NO_COLUMN if one["bytes_read_per_row"] is None else f"{one['bytes_read_per_row']:,.0f}"
        hits = _NO_COLUMN if one["hits"] is None else f"{one['hits']:.1%}"
        say(
            f"{count:>11}  {name:<8}  {p50:7.3f}  {p99:>7}  {one['rows_per_s']:>10,.0f}  {one['mb_per_s']:7.1f}  "
            f"{one['cpu_us_per_row']:10.2f}  {read:>14}  {hits:>5}"
        )


def _print_notes(setting: _Setting, results: list[dict[str, Any]], left_out: dict[str, str]) -> None:
    say("MB/s counts the bytes of the rows. CPU time includes the kernel's.")
    depths = [str(measured["fio_depth"]) for measured in results if measured["fio_depth"] is not None]
    if depths and isinstance(setting.region, Region):
        block = f"blocks of {setting.region.read_bytes:,} bytes, queue depth {', '.join(depths)}"
        say(f"fio: io_uring, direct, {block}. It makes no gathers: its ms is the mean time of as many reads.")
    if any("mmap" in measured["tools"] for measured in results):
        say("mmap: its pages stay in the page cache until its turn ends, beyond --memory. In a table smaller than the")
        say("      machine's memory, late gathers of a turn find theirs there.")
    for name, reason in left_out.items():
        say(f"{name} is left out: {reason}.")


class _Progress:
    """A line on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._is_shown = is_terminal()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self._is_shown:
            show(f"\r{text}\x1b[K")

    def close(self) -> None:
        """Erase the line."""
        if self._is_shown:
            show("\r\x1b[K")


class Turn(NamedTuple):
    """The gathers of a tool in a round."""

    rows: int
    seconds: float
    latencies_s: list[float] | None
    """The time of each gather; ``None`` for fio, which makes no gathers."""
    cpu_s: float
    bytes_read: int | None
    """Bytes read from disk; ``None`` if the kernel does not tell."""
    hits: float | None = None
    """The fraction of rows found in memory."""


class Tool(ABC):
    """One way to gather rows.

    Attributes:
        name: its name in the results.
    """

    name: str

    @abstractmethod
    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:
        """Gather these rows in the round with this number."""


class RowStoreTool(Tool):
    """Gathers from a ``RowStore``, into the same tensor each time."""

    name = "deepnvme"

    def __init__(self, store: RowStore, count: int) -> None:
        self._store = store
        self._out = torch.empty((count, *store.shape[1:]), dtype=store.gathered_dtype)

    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:  # noqa: ARG002 (fio's)
        """Gather these rows."""
        before = self._store.stats()
        turn = _timed(ids, lambda rows: self._store.gather(rows, out=self._out))
        after = self._store.stats()
        return turn._replace(
            bytes_read=after.bytes_read - before.bytes_read,
            hits=(after.hits - before.hits) / max(after.rows - before.rows, 1),
        )


class MmapTool(Tool):
    """Indexes a tensor on a mapped file.

    Raises:
        UnsupportedError: the rows are not in one place of the file.
    """

    name = "mmap"

    def __init__(self, region: Region, rows: int, row_bytes: int, count: int) -> None:
        if region.first_row is None:
            msg = "the rows are packed, or in several tensors"
            raise UnsupportedError(msg)
        self._path, self._begin, self._end = region.path, region.first_row, region.first_row + rows * row_bytes
        self._shape = rows, row_bytes
        self._out = torch.empty((count, row_bytes), dtype=torch.uint8)

    def turn(self, ids: list[torch.Tensor], number: int) -> Turn:  # noqa: ARG002 (fio's)
        """Gather these rows. Pages of a mapped file cannot leave the page cache, so it is mapped for a turn."""
        mapped = torch.from_file(self._path, shared=False, size=self._end, dtype=torch.uint8)
        table = mapped[self._begin :].view(self._shape)
        before = _bytes_read()
        turn = _timed(ids, lambda rows: torch.index_select(table, 0, rows, out=self._out))
        after = _bytes_read()
        return turn._replace(bytes_read=None if before is None or after is None else after - before)


def drop_pages(files: list[str]) -> None:
    """Ask the kernel to drop the pages of these files from the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _timed(ids: list[torch.Tensor], gather: Callable[[torch.Tensor], object]) -> Turn:
    """Call ``gather`` for each tensor of ids, and measure each call."""
    took: list[float] = []
    rows = 0
    cpu = time.process_time()
    first = began = time.perf_counter()
    for one in ids:
        gather(one)
        ended = time.perf_counter()
        took.append(ended - began)
        rows += len(one)
        if ended - first > TURN_S_MAX:
            break
        began = ended
    return Turn(rows, sum(took), took, time.process_time() - cpu, None)


def _bytes_read() -> int | None:
    """Return the bytes that this process has read from disks."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))
    except (OSError, StopIteration):
        return None


class FioTool(Tool):
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


class DrawnIds:
    """Draws ids of the rows of a table. The same seed gives the same ids in every run, and each call draws others.

    Args:
        rows: number of rows.
        exponent: that of the Zipf distribution; ``None`` draws uniformly.
    """

    def __init__(self, rows: int, exponent: float | None) -> None:
        self._rows, self._exponent = rows, exponent
        self._generator = torch.Generator().manual_seed(_SEED)
        factor = max(1, min(int(rows * _SPREAD), (1 << _ID_BITS) // rows))
        while math.gcd(factor, rows) != 1:
            factor -= 1
        self._factor = factor

    def draw(self, count: int) -> torch.Tensor:
        """Draw this many ids."""
        if self._exponent is None:
            return torch.randint(0, self._rows, (count,), generator=self._generator)
        uniform = torch.rand(count, generator=self._generator, dtype=torch.float64)
        # Hot rows are not neighbours, as in a table whose order does not depend on use.
        return self._ranks(uniform, self._exponent) * self._factor % self._rows

    def _ranks(self, uniform: torch.Tensor, exponent: float) -> torch.Tensor:
        """Invert the distribution, treated as continuous on [1, rows + 1). Ranks begin at 0."""
        end = self._rows + 1
        if math.isclose(exponent, 1):
            place = end**uniform
        else:
            power = 1 - exponent
            place = (uniform * (end**power - 1) + 1) ** (1 / power)
        return (place.long() - 1).clamp(0, self._rows - 1)
