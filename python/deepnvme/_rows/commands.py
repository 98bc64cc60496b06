"""``deepnvme rows``: its commands by name. The Rust command line parses their arguments."""

from __future__ import annotations

import json
import math
import shlex
import time
from pathlib import Path
from typing import Any

import torch

from deepnvme._checkpoint.load import load
from deepnvme._deepnvme import __version__, _packed_block_bytes
from deepnvme._rows import bench
from deepnvme._rows.gather import check_ids
from deepnvme._rows.locate import Located, list_tables
from deepnvme._rows.named_table import NamedTable, as_argument, dtype_name, labelled, row_text, shape_text, size_text
from deepnvme._utils.interrupts import is_of_handler
from deepnvme._utils.metadata_file import open_regular
from deepnvme._utils.terminal import printable, report_errors, say
from deepnvme.errors import CorruptFileError, InvalidArgumentError, OutOfMemoryError, UnsupportedError

_PAGE_BYTES = 4096
# The cache whose rows are counted, in bytes.
_CACHE_BYTES = 10**9
# Tensors that the text lists.
_LISTED_MAX = 30
# The memory of a packed table while it is made, beyond that for a few of its rows.
_PACK_MEMORY_BYTES = 64 << 20
_PACK_ROWS = 16
# Memory of the store for each copy of a hot row.
_HOT_ROW_BYTES = 9


def run(name: str, options: str) -> int:
    """Run a command with its options as JSON. Returns the exit status."""
    commands = {"rows inspect": _inspect, "rows pack": _pack, "rows bench": bench.run}
    return report_errors(commands[name], options)


def _inspect(options: dict[str, Any]) -> int:
    """Describe a table, or list the tensors that can be one."""
    table = NamedTable.parse(options)
    packed = table.packed()
    is_described = packed is not None or table.tensor is not None or table.shape is not None
    answer = _describe(table) if is_described else _candidates(table)
    if options["json"]:
        say(json.dumps({"version": __version__, "source": table.source, **answer}, indent=2))
    elif is_described:
        _print_table(table, answer)
    else:
        _print_candidates(table, answer["tables"])
    return 0


def _describe(table: NamedTable) -> dict[str, Any]:
    """Describe a table: its size, its layout on disk, and the memory that it needs."""
    least = least_memory(table)
    packed = table.packed()
    rows = packed.rows if packed is not None else table.located()
    answer: dict[str, Any] = {
        "files": table.files(),
        "shape": [rows.rows, *rows.row_shape],
        "dtype": dtype_name(rows.dtype),
        "row_bytes": rows.row_bytes,
        "bytes": rows.rows * rows.row_bytes,
        "scales": None,
        "packed": None,
        "rows_across_pages": None,
        "read_bytes": None,
        "packed_read_bytes": None,
        "memory_bytes_min": least,
        "rows_in_1gb": _cached_rows(table, least),
    }
    if packed is None:
        scales = table.located_scales()
        if scales is not None:
            answer["scales"] = {"count": math.prod(scales.row_shape), "dtype": dtype_name(scales.dtype)}
        across = rows_across_pages(rows)
        pages = -(-rows.row_bytes // _PAGE_BYTES) + (across / rows.rows if rows.rows else 0)
        packed_bytes = rows.row_bytes if scales is None else rows.row_bytes + scales.row_bytes
        answer["rows_across_pages"] = across
        answer["read_bytes"] = pages * _PAGE_BYTES
        answer["packed_read_bytes"] = _packed_block_bytes(packed_bytes)
        return answer
    if packed.scales is not None:
        dtype, count = packed.scales
        answer["scales"] = {"count": count, "dtype": dtype_name(dtype)}
    stored = -(-(rows.rows + packed.hot_rows) // packed.rows_per_block) * packed.block_bytes
    answer["packed"] = {
        "row_bytes": packed.row_bytes,
        "rows_per_block": packed.rows_per_block,
        "block_bytes": packed.block_bytes,
        "checksums": "list" if packed.has_checksum_list else "block",
        "hot_rows": packed.hot_rows,
        "bytes": stored,
        "overhead": 1 - rows.rows * packed.row_bytes / stored if stored else 0.0,
    }
    return answer


def least_memory(table: NamedTable) -> int:
    """Return the least ``memory`` that opens the table."""
    try:
        table.open(1).close()
    except InvalidArgumentError as error:
        least = getattr(error, "memory_bytes_min", None)
        if least is None:
            raise
        return int(least)
    return 1


def rows_across_pages(rows: Located) -> int:
    """Count the rows that lie in one page more than their size needs."""
    row_bytes = rows.row_bytes
    pages = -(-row_bytes // _PAGE_BYTES)
    # Behind this many rows, their places in pages are the same again.
    period = _PAGE_BYTES // math.gcd(row_bytes, _PAGE_BYTES)
    count = 0
    for _, offset, number in rows.ranges:
        starts = (offset + torch.arange(period) * row_bytes) % _PAGE_BYTES
        crosses = starts + row_bytes > pages * _PAGE_BYTES
        periods, rest = divmod(number, period)
        count += periods * int(crosses.sum()) + int(crosses[:rest].sum())
    return count


def _cached_rows(table: NamedTable, least: int) -> int | None:
    """Return how many rows a cache of 1 GB holds; ``None`` if this process cannot get that memory."""
    if least > _CACHE_BYTES:
        return 0
    try:
        with table.open(_CACHE_BYTES) as store:
            return min(store.stats().cached_rows_max, len(store))
    except MemoryError:
        return None


def _candidates(table: NamedTable) -> dict[str, Any]:
    tables = list_tables(table.source)
    if not tables:
        msg = (
            f"{table.source}: no tensor can be a table, which has two or more dimensions, contiguous rows and a plain "
            "dtype; name another file, or save a tensor with .contiguous()"
        )
        raise UnsupportedError(msg)
    return {"files": table.files(), "tables": tables}


def _print_table(table: NamedTable, answer: dict[str, Any]) -> None:
    rows, *row_shape = answer["shape"]
    size = f"{answer['row_bytes']:,} bytes each, {size_text(answer['bytes'])} in all"
    say(labelled("table", f"{rows:,} rows of {row_text(row_shape, answer['dtype'])}, {size}"))
    for number, path in enumerate(answer["files"]):
        say(labelled("" if number else "file", path))
    scales, packed = answer["scales"], answer["packed"]
    if scales is not None:
        place = "behind each row" if packed else "for each row, all in memory"
        say(labelled("scales", f"{scales['count']} {scales['dtype']} {place}"))
    if packed is None:
        across = answer["rows_across_pages"]
        share = across / rows if rows else 0.0
        say(labelled("layout", f"in place; {across:,} rows ({share:.1%}) span a page more than they need"))
    else:
        text = f"packed; blocks of {packed['rows_per_block']:,} rows in {packed['block_bytes']:,} bytes"
        say(labelled("layout", f"{text}, {packed['overhead']:.1%} of them beyond the rows"))
        if packed["hot_rows"]:
            say(labelled("", f"with copies of {packed['hot_rows']:,} hot rows"))
    cached = answer["rows_in_1gb"]
    held = "" if cached is None else f"; a cache of 1 GB holds {'all' if rows <= cached else f'{cached:,}'} rows"
    say(labelled("memory", f"{answer['memory_bytes_min']:,} bytes at least{held}"))
    say(labelled("measure", f"deepnvme rows bench {table.arguments}"))
    if packed is None:
        now, then = (f"{round(answer[key]):,}" for key in ("read_bytes", "packed_read_bytes"))
        say(
            labelled(
                "reads", f"{now} bytes for a row in place, on average; {then} packed, with its scales and a checksum"
            )
        )
        say(labelled("pack", f"deepnvme rows pack {table.arguments} rows.safetensors"))


def _print_candidates(table: NamedTable, tables: list[dict[str, Any]]) -> None:
    shown = tables[:_LISTED_MAX]
    lines = [
        (size_text(one["bytes"]), f"{one['row_bytes']:,}", one["dtype"], shape_text(one["shape"]), one["name"])
        for one in shown
    ]
    heads = ("size", "bytes/row", "dtype", "shape", "tensor")
    widths = [max(len(line[column]) for line in [heads, *lines]) for column in range(4)]
    for size, row, dtype, shape, name in [heads, *lines]:
        say(f"{size:>{widths[0]}}  {row:>{widths[1]}}  {dtype:<{widths[2]}}  {shape:<{widths[3]}}  {printable(name)}")
    if len(tables) > len(shown):
        say(f"and {len(tables) - len(shown):,} more; --json lists all")
    named = table._replace(tensor=[tables[0]["name"]])
    say(f"\nName one: deepnvme rows inspect {printable(named.arguments)}")


def _pack(options: dict[str, Any]) -> int:
    """Pack a table into a new file, and verify it."""
    table, target = NamedTable.parse(options, "it needs no packing"), Path(options["target"])
    located = table.located()
    if target.is_dir():
        msg = f"{target} is a folder; name a file in it, such as {target / 'rows.safetensors'}"
        raise InvalidArgumentError(msg)
    trace = read_trace(options["trace"]) if options["trace"] else None
    began = time.perf_counter()
    with table.create(str(target), _memory_bytes(located, trace), trace) as store:
        packed_s = time.perf_counter() - began
        answer = {
            "version": __version__,
            "source": table.source,
            "target": str(target),
            "rows": located.rows,
            "bytes": located.rows * located.row_bytes,
            "file_bytes": target.stat().st_size,
            "seconds": packed_s,
            "gb_per_s": located.rows * located.row_bytes / packed_s / 1e9,
        }
        if not options["json"]:
            _print_packed(answer)
        began = time.perf_counter()
        name = shlex.quote(as_argument(str(target)))
        try:
            answer["verified_blocks"] = store.verify()
        except KeyboardInterrupt:
            say(f"The new file is complete, and was not verified: deepnvme verify {printable(name)}")
            raise
        answer["verify_seconds"] = time.perf_counter() - began
    if options["json"]:
        say(json.dumps(answer, indent=2))
        return 0
    say(
        labelled(
            "verified", f"{answer['verified_blocks']:,} blocks match their checksums; {answer['verify_seconds']:.2f} s"
        )
    )
    say(labelled("measure", f"deepnvme rows bench {name}"))
    return 0


def _memory_bytes(located: Located, trace: torch.Tensor | None) -> int:
    hot = 0 if trace is None else min(located.rows, trace.numel()) * _HOT_ROW_BYTES
    # Of the checksums of the blocks, if they are in memory. A block has 4 KiB at least, and two thirds of it are rows.
    checksums = located.rows * located.row_bytes // 512
    return _PACK_MEMORY_BYTES + _PACK_ROWS * located.row_bytes + checksums + hot


def read_trace(path: str) -> torch.Tensor:
    """Read a trace of ids.

    Raises:
        CorruptFileError: the file is no array.
        InvalidArgumentError: it is no tensor or array of integers.
    """
    if path.endswith(".npy"):
        return _read_array(path)
    loaded = load(path, progress=False)
    tensors = [loaded] if isinstance(loaded, torch.Tensor) else [*loaded.values()] if isinstance(loaded, dict) else []
    if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
        msg = f"{path} is not one tensor; a trace of ids is one tensor, or a .npy file"
        raise InvalidArgumentError(msg)
    try:
        return check_ids(tensors[0])[0]
    except TypeError as error:
        msg = f"{path}: {error}"
        raise InvalidArgumentError(msg) from error


def _read_array(path: str) -> torch.Tensor:
    try:
        import numpy as np  # noqa: PLC0415 (not required)
    except ImportError as error:
        msg = f"{path}: numpy is needed for a .npy file; pip install numpy, or save the ids with torch.save"
        raise InvalidArgumentError(msg) from error
    try:
        with open_regular(Path(path)) as file:
            # A pickle could run code.
            array: Any = np.load(file, allow_pickle=False)
    except (OSError, CorruptFileError):
        raise
    except MemoryError as error:
        msg = f"{path}: {error}"
        raise OutOfMemoryError(msg) from error
    except Exception as error:
        # numpy evaluates the header of a file, which raises errors of Python's parser.
        if is_of_handler(error):
            raise
        msg = f"{path} is no array of numbers ({error}); save the ids with numpy.save"
        raise CorruptFileError(msg) from error
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        kind = array.dtype if isinstance(array, np.ndarray) else "several arrays"
        msg = f"{path}: ids are {kind}; they must be integers: save one array of them with numpy.save"
        raise InvalidArgumentError(msg)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _print_packed(answer: dict[str, Any]) -> None:
    size = f"{answer['rows']:,} rows, {size_text(answer['bytes'])}"
    say(labelled("packed", f"{size}; {answer['seconds']:.2f} s, {answer['gb_per_s']:.2f} GB/s"))
    say(labelled("file", f"{answer['target']}, {size_text(answer['file_bytes'])}"))
