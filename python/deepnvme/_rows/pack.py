"""``deepnvme rows pack``: pack a table into a new file, and verify it."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from deepnvme._deepnvme import __version__
from deepnvme._rows.named_table import NamedTable
from deepnvme._rows.text import labelled, size_text
from deepnvme._utils.terminal import say
from deepnvme.errors import InvalidArgumentError

# The memory of the new table, beyond that for a few of its rows.
_MEMORY_BYTES = 64 << 20
_ROWS = 16


def run(options: dict[str, Any]) -> int:
    """Run the command with its options. Returns the exit status."""
    table, target = NamedTable.parse(options, "it needs no packing"), Path(options["target"])
    located = table.located()
    for path in table.files():
        if target.exists() and target.samefile(path):
            msg = f"{target} is a file of the source; name another file as the target"
            raise InvalidArgumentError(msg)
    if target.is_dir():
        msg = f"{target} is a folder; name a file in it, such as {target / 'rows.safetensors'}"
        raise InvalidArgumentError(msg)
    began = time.perf_counter()
    with table.create(str(target), _MEMORY_BYTES + _ROWS * located.row_bytes) as store:
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


def _print_packed(answer: dict[str, Any]) -> None:
    size = f"{answer['rows']:,} rows, {size_text(answer['bytes'])}"
    say(labelled("packed", f"{size}; {answer['seconds']:.2f} s, {answer['gb_per_s']:.2f} GB/s"))
    say(labelled("file", f"{answer['target']}, {size_text(answer['file_bytes'])}"))
