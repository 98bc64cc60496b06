"""``deepnvme rows bench``: gather random rows, beside fio and a mapped file in alternating rounds."""

from __future__ import annotations

import json
import math
import time
from statistics import median
from typing import Any, NamedTuple

import torch

from deepnvme._deepnvme import __version__
from deepnvme._rows.contestants import Contestant, MmapContestant, StoreContestant, Turn, drop_pages
from deepnvme._rows.drawn_ids import DrawnIds
from deepnvme._rows.fio import FioContestant
from deepnvme._rows.named_table import NamedTable
from deepnvme._rows.region import Region, find_region
from deepnvme._rows.row_store import RowStore
from deepnvme._rows.text import dtype_name, labelled, row_text, size_text
from deepnvme._utils.arguments import parse_bytes
from deepnvme._utils.memory import available_bytes
from deepnvme._utils.terminal import is_terminal, say, show
from deepnvme.errors import InvalidArgumentError, UnsupportedError

# A turn makes as many gathers as take about this time, within these limits.
_TURN_S = 0.5
_GATHERS = (3, 400)
# The ids of a gather, as integers of 64 bits.
_ID_BYTES = 8
_NO_COLUMN = "-"


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
        ours = StoreContestant(store, count)
        contestants: list[Contestant] = [ours, *_baselines(setting, store, count, left_out)]
        drop_pages(files)
        # The first gather allocates, so the second is timed.
        took = [_seconds(ours, ids.draw(count)) for _ in range(2)][1]
        low, high = _GATHERS
        gathers = min(max(math.ceil(_TURN_S / took), low), high)
        turns: dict[str, list[Turn]] = {one.name: [] for one in contestants}
        try:
            for number in range(setting.rounds):
                wanted = [ids.draw(count) for _ in range(gathers)]
                first = number % len(contestants)
                for one in [*contestants[first:], *contestants[:first]]:
                    progress.show(f"{count:,} rows, round {number + 1} of {setting.rounds}: {one.name}")
                    drop_pages(files)
                    turns[one.name].append(one.turn(wanted, number))
        finally:
            progress.close()
    rows = {one.name: _summary(turns[one.name], count, row_bytes) for one in contestants}
    depths = {one.name: one.depth for one in contestants if isinstance(one, FioContestant)}
    return {"rows_per_gather": count, "gathers_per_round": gathers, "contestants": rows, "fio_depth": depths.get("fio")}


def _baselines(setting: _Setting, store: RowStore, count: int, left_out: dict[str, str]) -> list[Contestant]:
    """Return the baselines that can read this table. The others are left out, with a reason."""
    found: list[Contestant] = []
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


def _baseline(name: str, region: Region, store: RowStore, count: int) -> Contestant:
    if name == "fio":
        return FioContestant(region, count)
    return MmapContestant(region, len(store), math.prod(store.shape[1:]) * store.dtype.itemsize, count)


def _check_room(count: int, row_bytes: int, setting: _Setting) -> None:
    """Check that there is memory for the ids and the results of gathers."""
    results = 1 + ("mmap" in setting.against)
    needed = count * (row_bytes * results + _ID_BYTES * 2 * _GATHERS[0])
    available = available_bytes()
    if available is not None and needed > available:
        msg = f"gathers of {count:,} rows need {needed:,} bytes, and {available:,} are available; lower --rows"
        raise InvalidArgumentError(msg)


def _seconds(contestant: Contestant, ids: torch.Tensor) -> float:
    began = time.perf_counter()
    contestant.turn([ids], 0)
    return max(time.perf_counter() - began, 1e-6)


def _summary(turns: list[Turn], count: int, row_bytes: int) -> dict[str, Any]:
    """Summarise the rounds of a contestant by their medians."""
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
    say(labelled("memory", f"{size_text(setting.memory)} for {held}"))
    ids = "uniform" if setting.zipf is None else f"Zipf, exponent {setting.zipf:g}"
    say(labelled("ids", f"{ids}; medians of {setting.rounds} round{'' if setting.rounds == 1 else 's'}"))
    say("")


def _print_result(measured: dict[str, Any], *, is_first: bool) -> None:
    if is_first:
        say("rows/gather            p50 ms   p99 ms      rows/s     MB/s  CPU us/row  bytes read/row   hits")
    for number, (name, one) in enumerate(measured["contestants"].items()):
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
    if any("mmap" in measured["contestants"] for measured in results):
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
