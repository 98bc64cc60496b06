"""The targets of deepnvme, judged by medians of per-round ratios: met, missed or not measured.

The judged backend is the choice of ``backend="auto"``: the first of io_uring, aio and threads that works here. For
DeepSpeed, the drop-in handle is judged as well, called exactly like DeepSpeed's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.verdict import Verdict
from storagebench.summary import Line, RowSummary, ratio_between, summarise
from storagebench.tools.fio_job import FioAsMuchMemory

if TYPE_CHECKING:
    from storagebench.rounds import RowResult

_LARGE_ALIGNED = ("write-new-pinned", "write-over-pinned", "read-pinned")
_LARGE_PLAIN = ("write-new-plain", "read-plain")
_ALIGNED_RATIO = 0.97
_PLAIN_RATIO = 0.92
_SMALL_RATIO = 0.8
_OURS = ("deepnvme auto", "deepnvme io_uring", "deepnvme aio", "deepnvme threads")
_DROP_IN = "deepnvme aio_handle"
_CPU_BASELINE = "fio libaio"
_ONE_LARGE = ", one large"


def judge(results: list[RowResult]) -> list[Verdict]:
    """Return the verdict on every target."""
    by_key = {result.row.key: result for result in results}
    summaries = {key: summarise(result) for key, result in by_key.items()}
    verdicts = []
    for keys, goal in ((_LARGE_ALIGNED, _ALIGNED_RATIO), (_LARGE_PLAIN, _PLAIN_RATIO)):
        for key in keys:
            line = _our_line(summaries.get(key))
            ratio = line.ratio_to_fio if line else None
            verdicts.append(_at_least(f"{key}: speed against fio's best", ratio, goal))
            measured = ratio_between(by_key[key], line.name, FioAsMuchMemory.NAME) if line else None
            verdicts.append(_at_least(f"{key}: speed against fio from or to as much memory", measured, goal))
    verdicts.extend(_cpu(key, summaries.get(key)) for key in _LARGE_ALIGNED)
    for key, summary in summaries.items():
        for who, line in (("", _our_line(summary)), (" through aio_handle", summary.line(_DROP_IN))):
            verdicts.append(_ahead(key + who, line.ratio_to_deepspeed if line else None))
    verdicts.extend(_small(by_key.get("small-read"), summaries.get("read-pinned")))
    return verdicts


def _our_line(summary: RowSummary | None) -> Line | None:
    if summary is None:
        return None
    return next((line for name in _OURS if (line := summary.line(name))), None)


def _at_least(text: str, measured: float | None, goal: float) -> Verdict:
    return Verdict(text, f">= {goal}", measured, None if measured is None else measured >= goal)


def _ahead(key: str, ratio: float | None) -> Verdict:
    return Verdict(f"{key}: speed against DeepSpeed", "> 1", ratio, None if ratio is None else ratio > 1)


def _cpu(key: str, summary: RowSummary | None) -> Verdict:
    """Judge CPU seconds per GB against fio's libaio job."""
    text = f"{key}: CPU s/GB"
    ours, fio = _our_line(summary), summary.line(_CPU_BASELINE) if summary else None
    if ours is None or fio is None:
        return Verdict(text, "<= fio libaio's", None, None)
    goal = f"<= fio libaio's {fio.cpu_s_per_gb:.3f}"
    return Verdict(text, goal, ours.cpu_s_per_gb, ours.cpu_s_per_gb <= fio.cpu_s_per_gb)


def _small(small: RowResult | None, large: RowSummary | None) -> list[Verdict]:
    """Judge the batch against the same bytes in one request, and against the large read of another row."""
    line = _our_line(summarise(small)) if small else None
    measured = ratio_between(small, line.name, line.name + _ONE_LARGE) if small and line else None
    whole = large.line(line.name) if large and line else None
    across = line.gb_per_s / whole.gb_per_s if line and whole else None
    return [
        _at_least("small-read: speed against the same bytes as one request", measured, _SMALL_RATIO),
        _at_least("small-read: GB/s against read-pinned (not in the same rounds)", across, _SMALL_RATIO),
    ]
