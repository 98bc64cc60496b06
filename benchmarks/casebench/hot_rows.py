"""``python -m casebench.hot_rows``: reads a row with and without copies of hot rows, for two kinds of requests.

Rows of 160 bytes. Independent: each row is drawn by itself, Zipf 1.0. Together: a request is 48 of the 50 rows of
one group, Zipf 1.0 over the groups. The trace is drawn like the requests.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import deepnvme
import torch

from common import command

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, COLUMNS = 400_000, 80
GROUPS, GROUP_ROWS, REQUEST_ROWS = 8000, 50, 48
TRACE_ROWS, WARM_ROWS, COUNTED_ROWS = 2_000_000, 400_000, 150_000


def zipf(count: int) -> Callable[[int], torch.Tensor]:
    """Return a function that draws numbers below `count`, small ones more often."""
    weights = torch.cumsum(1 / torch.arange(1, count + 1, dtype=torch.float64), 0)
    weights /= weights[-1].clone()
    return lambda drawn: torch.searchsorted(weights, torch.rand(drawn, dtype=torch.float64)).clamp_(max=count - 1)


def independent() -> Callable[[int], torch.Tensor]:
    """Return a function that draws rows of which each is requested by itself."""
    draw, places = zipf(ROWS), torch.randperm(ROWS)
    return lambda rows: places[draw(rows)]


def together() -> Callable[[int], torch.Tensor]:
    """Return a function that draws rows of whole requests."""
    draw, groups = zipf(GROUPS), torch.randint(0, ROWS, (GROUPS, GROUP_ROWS))

    def rows(count: int) -> torch.Tensor:
        requests = count // REQUEST_ROWS
        chosen = torch.rand(requests, GROUP_ROWS).argsort(1)[:, :REQUEST_ROWS]
        return groups[draw(requests).unsqueeze(1), chosen].flatten()

    return rows


def measure(path: Path, memory: int, rows: int, draw: Callable[[int], torch.Tensor]) -> tuple[float, float]:
    """Return reads a row, and the share of rows in memory."""
    with deepnvme.RowStore(path, memory=memory) as store:
        for ids in draw(WARM_ROWS).split(rows):
            store.gather(ids)
        before = store.stats()
        counted = draw(COUNTED_ROWS)
        for ids in counted.split(rows):
            store.gather(ids)
        after = store.stats()
    return (after.reads - before.reads) / len(counted), (after.hits - before.hits) / len(counted)


def main() -> None:
    """Print a line for each kind of requests, rows per gather, and memory."""
    parser = argparse.ArgumentParser(prog="casebench.hot_rows", description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path("scratch"), help="folder on the disk to measure")
    arguments = parser.parse_args()
    torch.manual_seed(1)
    with command.scratch_folder(arguments.scratch, "hot-rows") as folder:
        table = torch.randn(ROWS, COLUMNS).bfloat16()
        deepnvme.save({"table": table}, folder / "table.safetensors", progress=False)
        for name, sizes, draw in (
            ("independent", (REQUEST_ROWS, 4096), independent()),
            ("together", (REQUEST_ROWS,), together()),
        ):
            for copies, trace in (("without", None), ("with", draw(TRACE_ROWS))):
                deepnvme.RowStore.create(
                    folder / copies,
                    folder / "table.safetensors",
                    "table",
                    memory="16MB",
                    trace=trace,
                    progress=False,
                ).close()
            for rows in sizes:
                for part in (20, 10):
                    memory = table.nbytes // part
                    found = {copies: measure(folder / copies, memory, rows, draw) for copies in ("without", "with")}
                    line = "; ".join(
                        f"{one} copies {reads:.3f}, {hits:.1%}" for one, (reads, hits) in found.items()
                    )
                    print(
                        f"{name}, {rows} rows a gather, 1/{part} in memory: reads a row and hits {line}", flush=True
                    )


if __name__ == "__main__":
    main()
