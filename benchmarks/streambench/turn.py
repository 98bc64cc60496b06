"""One generation, measured step by step."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from common import cache, generation

_STATUS, _CLEAR, _IO = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/self/io")


@dataclass(frozen=True)
class Turn:
    """The cost of one generation.

    A step ends with a call of the model, and includes the work of ``generate`` before that call.
    """

    prompt_s: float
    """The first step."""
    step_s: float
    """The median of the others."""
    seconds: float
    """All steps; dropping the page cache is in none of them."""
    cpu_s: float
    """Of all threads, in all steps."""
    step_bytes: float
    """Bytes read from the disk in each step after the first: the median."""
    tokens: int
    """The number of generated tokens."""
    batch: int
    peak_bytes: int
    """Resident memory at its highest, all in: Python, torch, activations, and pages of mapped files."""
    start_bytes: int
    """Resident memory before the model was opened."""
    cached: float
    """The largest share of pages that were still in the page cache when a cold step began."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens for each second, the prompt's step included."""
        return self.tokens / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens for each second of a step."""
        return self.batch / self.step_s

    @property
    def cpu_s_per_token(self) -> float:
        """CPU seconds for each token."""
        return self.cpu_s / self.tokens

    def to_json(self) -> dict[str, float]:
        """Return it as JSON-ready values."""
        derived = ("tokens_per_s", "decode_tokens_per_s", "cpu_s_per_token")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


@dataclass
class _Mark:
    """The time, CPU seconds and bytes read at the end of a step, or the cost of dropping the page cache."""

    at: float
    cpu_s: float
    read: int


class Watch:
    """Measures each call of a model.

    Args:
        model: calls are counted from now on.
        files: dropped from the page cache before each call; none to leave it as it is.
    """

    def __init__(self, model: Any, files: list[Path]) -> None:
        self._files = files
        self.marks = [_mark()]
        self.dropped: list[_Mark] = []
        self.cached = 0.0
        self._handles = [
            # Before all other hooks: those of a streaming tool must find the files cold.
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end),
        ]

    def close(self) -> None:
        """Stop measuring."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, _model: object, _args: object) -> None:
        before = _mark()
        if self._files:
            self.cached = max(self.cached, _drop(self._files))
        after = _mark()
        self.dropped.append(_Mark(after.at - before.at, after.cpu_s - before.cpu_s, 0))

    def _end(self, _model: object, _args: object, _output: object) -> None:
        self.marks.append(_mark())

    def steps(self) -> list[_Mark]:
        """Return the cost of each call."""
        pairs = zip(self.marks, self.marks[1:], self.dropped, strict=False)
        return [_Mark(b.at - a.at - d.at, b.cpu_s - a.cpu_s - d.cpu_s, b.read - a.read) for a, b, d in pairs]


def _mark() -> _Mark:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return _Mark(time.perf_counter(), usage.ru_utime + usage.ru_stime, _field(_IO, "read_bytes"))


def _field(path: Path, name: str) -> int:
    for line in path.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def _drop(files: list[Path]) -> float:
    """Drop these files alone: other programs keep their pages. Returns the share of their pages that stayed."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return sum(cache.cached_share(path) for path in files) / len(files)


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the resident memory of the process (``VmHWM``: its peak)."""
    return _field(_STATUS, field) * 1024


def take(
    model: Any, ids: torch.Tensor, new_tokens: int, files: list[Path], start_bytes: int
) -> tuple[Turn, list[int]]:
    """Generate greedily. Returns the cost, and the generated tokens of the whole batch in one list.

    Args:
        model: of transformers.
        ids: the prompts.
        new_tokens: for each of them.
        files: to be made cold before each step.
        start_bytes: resident memory before the model was opened.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if os.access(_CLEAR, os.W_OK):
        _CLEAR.write_text("5", encoding="ascii")
    gc.disable()
    watch = Watch(model, files)
    try:
        made = generation.generate(model, ids, new_tokens)
    finally:
        watch.close()
        gc.enable()
    prompt, *steps = watch.steps()
    turn = Turn(
        prompt_s=prompt.at,
        step_s=median(one.at for one in steps),
        seconds=prompt.at + sum(one.at for one in steps),
        cpu_s=prompt.cpu_s + sum(one.cpu_s for one in steps),
        step_bytes=median(one.read for one in steps),
        tokens=ids.shape[0] * new_tokens,
        batch=ids.shape[0],
        peak_bytes=resident_bytes("VmHWM"),
        start_bytes=start_bytes,
        cached=watch.cached,
    )
    return turn, made[:, ids.shape[1] :].reshape(-1).tolist()
