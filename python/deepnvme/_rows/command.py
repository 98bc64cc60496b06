"""``deepnvme rows``: its commands by name. The Rust command line parses their arguments."""

from __future__ import annotations

from deepnvme._rows import bench, inspect, pack
from deepnvme._utils.python_commands import report_errors

_COMMANDS = {"rows inspect": inspect.run, "rows pack": pack.run, "rows bench": bench.run}


def run(name: str, options: str) -> int:
    """Run a command with its options as JSON. Returns the exit status."""
    return report_errors(_COMMANDS[name], options)
