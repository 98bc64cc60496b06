"""Count time and bytes of each step of a model."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from deepnvme._utils.interrupts import make_lock
from deepnvme._utils.public import public

if TYPE_CHECKING:
    from collections.abc import Callable

# Steps whose individual counters are kept.
_STEPS_MAX = 10_000
# Decimals of numbers in the text of stats.
_SHOWN_DIGITS = 4


@dataclass(frozen=True, repr=False)
class Step:
    """The cost of one call: a prompt, or the next token of each sequence of a batch. Times are in seconds."""

    seconds: float
    stalled_s: float  # waiting for layers
    disk_busy_s: float  # while the disk was read
    bytes_read: int
    tokens: int  # sequences times positions

    def __repr__(self) -> str:
        values = (f"{name}={round(value, _SHOWN_DIGITS)}" for name, value in self.to_dict().items())
        return f"{type(self).__name__}({', '.join(values)})"

    @property
    def compute_s(self) -> float:
        """Seconds not spent waiting for weights."""
        return max(self.seconds - self.stalled_s, 0.0)

    @property
    def roofline_s(self) -> float:
        """Seconds that the slower one, disk or CPU, needs alone."""
        return max(self.compute_s, self.disk_busy_s)

    @property
    def roofline_fraction(self) -> float:
        """The roofline, divided by the duration: 1 if the slower of disk and CPU never waited for the other."""
        return min(self.roofline_s / self.seconds, 1.0) if self.seconds else 1.0

    @property
    def overlap(self) -> float:
        """Fraction of the disk's time that was hidden behind computation."""
        return max(1 - self.stalled_s / self.disk_busy_s, 0.0) if self.disk_busy_s else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, prompts included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def disk_gb_per_s(self) -> float:
        """GB (10^9 bytes) per second while the disk was read."""
        return self.bytes_read / self.disk_busy_s / 1e9 if self.disk_busy_s else 0.0

    def to_dict(self) -> dict[str, float]:
        """Return all values by name, ready for JSON."""
        properties = [
            name for each in type(self).__mro__ for name, kind in vars(each).items() if isinstance(kind, property)
        ]
        return {**asdict(self), **{name: getattr(self, name) for name in properties}}


@public
@dataclass(frozen=True, repr=False)
class StreamStats(Step):
    """The cost of all steps so far, and of reads between them.

    Attributes:
        seconds: duration of all calls.
        stalled_s: seconds spent waiting for layers.
        disk_busy_s: seconds during which the disk was read.
        bytes_read: bytes read.
        tokens: sequences times positions; 0 for a model whose inputs are not token ids.
        steps: calls of the model.
        hits: calls of layers that were in memory.
        waits: calls of layers that waited.
        fetches: layers loaded.
        fetches_ahead: layers loaded before they were needed.
        row_hits: rows and experts that were in memory.
        row_waits: rows and experts that had to be read.

    Example:
        >>> layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> size = deepnvme.save(layers.state_dict(), "layers.safetensors")
        >>> model = deepnvme.stream(layers, weights="layers.safetensors", memory="1MB")
        >>> output = model(torch.randn(2, 64))
        >>> stats = model.streaming.stats()
        >>> stats.steps, 0 <= stats.hit_rate <= 1
        (1, True)
    """

    steps: int
    hits: int
    waits: int
    fetches: int
    fetches_ahead: int
    row_hits: int
    row_waits: int

    @property
    def hit_rate(self) -> float:
        """Fraction of layer calls whose weights were in memory; 0 before the first call."""
        calls = self.hits + self.waits
        return self.hits / calls if calls else 0.0

    @property
    def row_hit_rate(self) -> float:
        """Fraction of rows and experts that were in memory; 0 before the first one, or if the model streams none."""
        rows = self.row_hits + self.row_waits
        return self.row_hits / rows if rows else 0.0


class StepRecorder:
    """Records the cost of each call of the model."""

    def __init__(self, counters: Callable[[], dict[str, float]]) -> None:
        self._counters = counters
        self._before = counters()
        self._lock = make_lock()
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self.last: deque[Step] = deque(maxlen=_STEPS_MAX)

    def record(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Make a ``forward`` that records its calls, and those that raise."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, began, process = self._counters(), time.perf_counter(), os.getpid()
            try:
                return forward(*args, **kwargs)
            finally:
                # A hook of the model may have forked. The child's exception goes on, and it has no counters.
                if process == os.getpid():
                    self._add(time.perf_counter() - began, before, _tokens(args, kwargs))

        return run

    def stats(self) -> StreamStats:
        """Add up all steps."""
        now = self._counters()
        since = {name: value - self._before.get(name, 0) for name, value in now.items()}
        return StreamStats(
            steps=self._steps,
            tokens=self._tokens,
            seconds=self._seconds,
            bytes_read=int(since.get("bytes_read", 0)),
            stalled_s=since.get("stalled_s", 0.0),
            disk_busy_s=since.get("disk_busy_s", 0.0),
            hits=int(since.get("hits", 0)),
            waits=int(since.get("waits", 0)),
            fetches=int(since.get("fetches", 0)),
            fetches_ahead=int(since.get("fetches_ahead", 0)),
            row_hits=int(since.get("row_hits", 0)),
            row_waits=int(since.get("row_waits", 0)),
        )

    def _add(self, seconds: float, before: dict[str, float], tokens: int) -> None:
        now = self._counters()
        spent = {name: now[name] - before.get(name, 0) for name in now}
        step = Step(
            seconds, spent.get("stalled_s", 0), spent.get("disk_busy_s", 0), int(spent.get("bytes_read", 0)), tokens
        )
        with self._lock:
            self._steps += 1
            self._tokens += tokens
            self._seconds += seconds
            self.last.append(step)


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Count the positions of a call: elements of its first integer tensor, or of its embedded inputs."""
    for value in (kwargs.get("input_ids"), kwargs.get("decoder_input_ids"), *args):
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            return value.numel()
    embedded = kwargs.get("inputs_embeds")
    return embedded.shape[0] * embedded.shape[1] if isinstance(embedded, torch.Tensor) else 0
