"""The demo's output: a progress bar on a terminal, one table, and next steps."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

from measure import Cost

BAR_COLUMNS = 24


class Progress:
    """One progress line on stderr. Silent if stderr is not a terminal."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done = steps, 0
        self._shown = sys.stderr.isatty()

    def step(self, label: str) -> None:
        """Begin the next step."""
        if self._shown:
            filled = min(self._done * BAR_COLUMNS // self._steps, BAR_COLUMNS)
            line = f"[{'#' * filled:<{BAR_COLUMNS}}] {label}"
            sys.stderr.write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            sys.stderr.flush()
        self._done += 1

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def table(costs: dict[str, list[tuple[Cost, Cost]]], total_bytes: int) -> str:
    """Print medians over the rounds. Ratios are taken within each round, relative to the first way."""
    size_gb = total_bytes / 1e9
    base = next(iter(costs.values()))
    rows = [
        f"{'':<26}{'write, durable':^26}  {'read, cold':^26}".rstrip(),
        (f"{'':<26}" + f"{'GB/s':>8}{'CPU s/GB':>10}{'ratio':>8}  " * 2).rstrip(),
    ]
    for name, rounds in costs.items():
        cells = ""
        for column in (0, 1):
            gb_per_s = median(size_gb / pair[column].wall_s for pair in rounds)
            cpu_s_per_gb = median(pair[column].cpu_s / size_gb for pair in rounds)
            pairs = zip(base, rounds, strict=True)
            ratio = median(first[column].wall_s / pair[column].wall_s for first, pair in pairs)
            cells += f"{gb_per_s:>8.2f}{cpu_s_per_gb:>10.2f}{ratio:>7.1f}x  "
        rows.append(f"{name:<26}{cells}".rstrip())
    return "\n".join(rows)


def footnotes(rounds: int, ways_to_evict: list[str]) -> str:
    """Print how the numbers were measured."""
    return (
        f"medians of {rounds} alternating rounds; a write ends when the device has it; ratio: speed against torch\n"
        f"reads allocate their tensors; files made cold by {' and '.join(ways_to_evict)}\n"
        "every round of every row came back bit for bit\n"
    )


def machine(found: dict[str, Any]) -> str:
    """Print which backend moved the bytes, and what costs speed on this machine."""
    chosen = next(backend["name"] for backend in found["backends"] if backend["is_chosen"])
    place = found["folders"][0]
    direct = "past the page cache" if place["direct"] and place["direct"]["works"] else "through the page cache"
    lines = [f"\n{chosen} moved the bytes, {direct}, on {place['file_system']}"]
    for finding in found["findings"]:
        lines += [f"{finding['severity']:<8}{finding['text']}", f"        > {finding['remedy']}"]
    if not found["findings"]:
        lines.append("nothing was found that costs speed")
    return "\n".join(lines)


def farewell(seconds: float) -> str:
    """Print the next three commands."""
    python, command = brief(Path(sys.executable)), brief(Path(sys.executable).with_name("deepnvme"))
    one_line = "import deepnvme, torch; t = torch.rand(1 << 26); deepnvme.write(t, 'x.bin'); print(deepnvme.stats())"
    return (
        f"\ndone in {seconds:.0f} s. Next:\n"
        f"  {command} report .         what works here, and what to do about what does not\n"
        f"  {command} bench read .     how fast this disk is; --against fio, if that is installed\n"
        f'  {python} -c "{one_line}"'
    )


def brief(path: Path) -> str:
    """Return the path as a user would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
