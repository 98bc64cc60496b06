"""How fast it could be: the disk by itself, and the processor by itself, measured over the same layers."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deepnvme._stream.streaming import Streaming


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step."""

    disk_s: float
    compute_s: float
    bytes_read: int

    @property
    def seconds(self) -> float:
        """What the slower of the two needs."""
        return max(self.disk_s, self.compute_s)


def measure(streaming: Streaming, step: Callable[[], object], rounds: int = 3) -> Roofline:
    """Measure disk and processor, each by itself, in alternating rounds.

    Args:
        streaming: of the model.
        step: calls the model once.
        rounds: how often; medians count.
    """
    disk, compute, read = [], [], 0
    fetch_all(streaming)
    for _ in range(rounds):
        before = streaming.figures()["bytes_read"]
        began = time.perf_counter()
        fetch_all(streaming)
        disk.append(time.perf_counter() - began)
        read = int(streaming.figures()["bytes_read"] - before)
        with without_disk(streaming):
            began = time.perf_counter()
            step()
            compute.append(time.perf_counter() - began)
    middle = rounds // 2
    return Roofline(sorted(disk)[middle], sorted(compute)[middle], read)


def fetch_all(streaming: Streaming) -> None:
    """Call for each layer in turn, and compute nothing."""
    if streaming.units is not None:
        streaming.units.fetch_all()


@contextmanager
def without_disk(streaming: Streaming) -> Iterator[None]:
    """Have layers compute with whatever is in the slots: as fast as with their own weights, and wrong."""
    if streaming.units is None:
        yield
        return
    with streaming.units.without_disk():
        yield
