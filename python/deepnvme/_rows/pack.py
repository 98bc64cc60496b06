"""``deepnvme rows pack``: pack a table into a new file, and verify it."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._checkpoint.load import load
from deepnvme._deepnvme import __version__
from deepnvme._rows.ids import check_ids
from deepnvme._rows.named_table import NamedTable
from deepnvme._rows.text import labelled, size_text
from deepnvme._utils.signal_errors import is_of_handler
from deepnvme._utils.terminal import say
from deepnvme.errors import CorruptFileError, InvalidArgumentError, OutOfMemoryError

if TYPE_CHECKING:
    from deepnvme._rows.locate import Located

# The memory of the new table, beyond that for a few of its rows.
_MEMORY_BYTES = 64 << 20
_ROWS = 16
# Of a copy of a hot row.
_HOT_ROW_BYTES = 9


def run(options: dict[str, Any]) -> int:
    """Run the command with its options. Returns the exit status."""
    table, target = NamedTable.parse(options, "it needs no packing"), Path(options["target"])
    located = table.located()
    for path in table.all_files():
        if target.exists() and target.samefile(path):
            msg = f"{target} is a file of the source; name another file as the target"
            raise InvalidArgumentError(msg)
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
        answer["verified_blocks"] = store.verify()
        answer["verify_seconds"] = time.perf_counter() - began
    if options["json"]:
        say(json.dumps(answer, indent=2))
        return 0
    say(
        labelled(
            "verified", f"{answer['verified_blocks']:,} blocks match their checksums; {answer['verify_seconds']:.2f} s"
        )
    )
    say(labelled("measure", f"deepnvme rows bench {shlex.quote(str(target))}"))
    return 0


def _memory_bytes(located: Located, trace: torch.Tensor | None) -> int:
    hot = 0 if trace is None else min(located.rows, trace.numel()) * _HOT_ROW_BYTES
    return _MEMORY_BYTES + _ROWS * located.row_bytes + hot


def read_trace(path: str) -> torch.Tensor:
    """Read the ids of earlier requests.

    Raises:
        CorruptFileError: the file is no array.
        InvalidArgumentError: it is no tensor or array of integers.
    """
    if path.endswith(".npy"):
        return _read_array(path)
    loaded = load(path, progress=False)
    tensors = [loaded] if isinstance(loaded, torch.Tensor) else [*loaded.values()] if isinstance(loaded, dict) else []
    if len(tensors) != 1 or not isinstance(tensors[0], torch.Tensor):
        msg = f"{path} is not one tensor; a trace is one tensor of ids, or a .npy file"
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
        # No pickle.
        array: Any = np.load(path, allow_pickle=False)
    except OSError:
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
