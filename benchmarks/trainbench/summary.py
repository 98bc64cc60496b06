"""Medians, spread, ratios within the rounds, and targets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from trainbench.protocol import Reply
from trainbench.rounds import FIO, IN_MEMORY, OURS, Row

_FLOOR_SHARE, _TIMES_DEEPSPEED, _TIMES_TENSORNVME, _ROOFLINES = 0.9, 1.5, 1.0, 1.10
_BASELINES = {"DeepSpeed, pipelined": _TIMES_DEEPSPEED, "TensorNVMe": _TIMES_TENSORNVME}


@dataclass(frozen=True)
class Line:
    """One tool of a row of steps. A ratio is the median of the ratios within the rounds."""

    name: str
    step_s: float
    step_min_s: float
    step_max_s: float
    step_gb: float
    """Read and written, as the kernel counts it."""
    gb_per_s: float
    of_floor: float | None
    """The seconds in which fio moves as many bytes, divided by those of a step."""
    ours_ratio: float | None
    """The seconds of its step, divided by ours."""
    ours_ratio_for_bytes: float | None
    """The same for each byte that is moved."""
    cpu_s_per_gb: float
    is_equal: bool
    """Whether its parameters equal those of torch's optimizer to the last bit."""


def step_s(reply: Reply) -> float:
    """Return the seconds of a step."""
    return float(reply["took_s"]) / float(reply["steps"])


def _moved(reply: Reply) -> float:
    return float(reply["read_bytes"] + reply["write_bytes"]) / float(reply["steps"])


def lines(row: Row) -> list[Line]:
    """Sum a row of steps up, the quickest first, without those that were left out half way."""
    full = max(map(len, row.answers.values()), default=0)
    there = {name: found for name, found in row.answers.items() if len(found) == full and name not in row.left_out}
    found = [_line(row, name, answers, there.get(OURS, [])) for name, answers in there.items()]
    return sorted(found, key=lambda one: one.step_s)


def _line(row: Row, name: str, answers: list[Reply], ours: list[Reply]) -> Line:
    times = [step_s(one) for one in answers]
    floors = [_moved(one) / speed / step_s(one) for one, speed in zip(answers, row.fio, strict=False)]
    pairs = list(zip(answers, ours, strict=False))
    return Line(
        name=name,
        step_s=median(times),
        step_min_s=min(times),
        step_max_s=max(times),
        step_gb=median(_moved(one) for one in answers) / 1e9,
        gb_per_s=median(_moved(one) / step_s(one) for one in answers) / 1e9,
        of_floor=median(floors) if floors else None,
        ours_ratio=median(step_s(one) / step_s(mine) for one, mine in pairs) if pairs else None,
        ours_ratio_for_bytes=median(
            step_s(one) / _moved(one) / (step_s(mine) / _moved(mine)) for one, mine in pairs
        )
        if pairs
        else None,
        cpu_s_per_gb=median(one["cpu_s"] / one["steps"] / _moved(one) * 1e9 for one in answers),
        is_equal=all(one["is_equal"] for one in answers),
    )


def offload(row: Row) -> dict[str, float]:
    """Sum a row of offloaded parameters up."""
    ours, memory = row.answers[OURS], row.answers[IN_MEMORY]
    own = [_own(one) for one in ours]
    disk_s = [moved / speed for moved, speed in zip(own, row.fio, strict=True)]
    compute_s = [step_s(one) for one in memory]
    ratios = [step_s(one) / max(disk, compute) for one, disk, compute in zip(ours, disk_s, compute_s, strict=True)]
    times = [step_s(one) for one in ours]
    return {
        "step_s": median(times),
        "step_min_s": min(times),
        "step_max_s": max(times),
        "compute_s": median(compute_s),
        "disk_s": median(disk_s),
        "step_gb": median(own) / 1e9,
        "read_share": median(one["own"]["bytes_read"] / one["steps"] for one in ours) / median(own),
        "cpu_s": median(one["cpu_s"] / one["steps"] for one in ours),
        "compute_cpu_s": median(one["cpu_s"] / one["steps"] for one in memory),
        "rooflines": median(ratios),
        "rooflines_min": min(ratios),
        "rooflines_max": max(ratios),
    }


def _own(reply: Reply) -> float:
    return float(reply["own"]["bytes_read"] + reply["own"]["bytes_written"]) / float(reply["steps"])


def verdicts(row: Row) -> list[dict[str, Any]]:
    """Judge the targets."""
    if row.key.startswith("offload"):
        measured = offload(row)["rooflines"] if OURS in row.answers else None
        return [_verdict(row, "seconds of a step by those of the roofline", _ROOFLINES, measured, is_most=True)]
    found = {line.name: line for line in lines(row)}
    judged = [
        _verdict(row, f"share of fio's speed, {name}", _FLOOR_SHARE, found[name].of_floor)
        for name in (OURS, f"{OURS}, fused")
        if name in found
    ]
    for name, goal in _BASELINES.items():
        there = found.get(name)
        judged.append(
            _verdict(row, f"times as fast as {name}", goal, there.ours_ratio if there is not None else None)
        )
    return judged


def _verdict(row: Row, text: str, goal: float, measured: float | None, *, is_most: bool = False) -> dict[str, Any]:
    met = None if measured is None else measured <= goal if is_most else measured >= goal
    return {
        "row": row.key,
        "text": text,
        "goal": f"{'at most' if is_most else 'at least'} {goal:.2f}",
        "measured": measured,
        "met": met,
    }


def row_to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON-ready values."""
    is_offload = row.key.startswith("offload")
    setting = {key: value for key, value in row.setting.items() if key not in {"folder", "options"}}
    return {
        **asdict(row),
        "setting": setting,
        "lines": [] if is_offload else [asdict(line) for line in lines(row)],
        "offload": offload(row) if is_offload else {},
        "verdicts": verdicts(row),
    }


def table(row: Row) -> str:
    """Draw a row for people."""
    text = [f"\n{row.key}"]
    if row.fio:
        speeds = [one / 1e9 for one in row.fio]
        text.append(f"{FIO}: {median(speeds):.2f} GB/s ({min(speeds):.2f} to {max(speeds):.2f})")
    text += _offload_table(row) if row.key.startswith("offload") else _steps_table(row)
    return "\n".join([*text, *(f"left out: {name}: {why}" for name, why in row.left_out.items())])


def _steps_table(row: Row) -> list[str]:
    heads = f"{'':24} {'step s':>7} {'min - max':>17} {'GB/step':>8} {'GB/s':>6} {'of fio':>7} {'ours x':>7}"
    text = [f"{heads} {'by byte':>8} {'CPU s/GB':>9} {'bits of torch':>14}"]
    for line in lines(row):
        spread = f"{line.step_min_s:.3f} - {line.step_max_s:.3f}"
        floor, times, by_byte = (
            f"{one:.2f}" if one is not None else "-"
            for one in (line.of_floor, line.ours_ratio, line.ours_ratio_for_bytes)
        )
        text.append(
            f"{line.name:24} {line.step_s:7.3f} {spread:>17} {line.step_gb:8.2f} {line.gb_per_s:6.2f} {floor:>7} "
            f"{times:>7} {by_byte:>8} {line.cpu_s_per_gb:9.3f} {'yes' if line.is_equal else 'no':>14}",
        )
    return text


def _offload_table(row: Row) -> list[str]:
    one = offload(row)
    return [
        f"step {one['step_s']:.3f} s ({one['step_min_s']:.3f} to {one['step_max_s']:.3f}), CPU {one['cpu_s']:.1f}",
        f"computing alone {one['compute_s']:.3f} s, CPU {one['compute_cpu_s']:.1f}",
        f"disk alone {one['disk_s']:.3f} s for {one['step_gb']:.2f} GB, {one['read_share']:.0%} of it read",
        f"{one['rooflines']:.2f} rooflines ({one['rooflines_min']:.2f} to {one['rooflines_max']:.2f})",
    ]
