"""Medians, spread, ratios within the rounds, and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from streambench.turn import Turn
from streambench.workers import Answer, Job

OURS = "deepnvme"
_ROOFLINE_SHARE, _TIMES_ACCELERATE, _TIMES_DEEPSPEED = 0.95, 3.0, 1.0


@dataclass
class Row:
    """All answers of one kind of generation: for each tool, one in each counted round."""

    key: str
    job: Job
    groups: dict[str, str]
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def turns(self, name: str) -> list[Turn]:
        """Return the measurements of a tool that took part in every round."""
        counted = max(map(len, self.answers.values()), default=0)
        answers = self.answers.get(name, [])
        return [one.turn for one in answers] if len(answers) == counted else []

    def names(self) -> list[str]:
        """Return the tools that completed every round, the quickest step first."""
        there = [name for name in self.answers if self.turns(name)]
        return sorted(there, key=lambda name: median(one.step_s for one in self.turns(name)))

    def roofline_s(self) -> list[float]:
        """Return the longer time of disk alone and computing alone, round by round."""
        return [max(one["disk_s"], one["compute_s"]) for one in self._rooflines()]

    def roofline(self, key: str) -> float | None:
        """Return the median of a metric of the roofline."""
        found = [one[key] for one in self._rooflines()]
        return median(found) if found else None

    def _rooflines(self) -> list[dict[str, float]]:
        return [one.roofline for one in self.answers.get(OURS, []) if one.roofline]


@dataclass(frozen=True)
class Line:
    """One tool of a row. A ratio is the median of the ratios within the rounds."""

    name: str
    group: str
    step_s: float
    step_min_s: float
    step_max_s: float
    prompt_s: float
    decode_tokens_per_s: float
    tokens_per_s: float
    step_gb: float
    cpu_s_per_token: float
    peak_mb: float
    grown_mb: float
    """Of that, the part that came after the model was opened."""
    of_roofline: float | None
    """The roofline's seconds, divided by those of a step."""
    ours_ratio: float | None
    """Our tokens per second of a step, divided by this tool's."""
    ours_ratio_in_all: float | None
    """The same over all steps, with the prompt's."""


def lines(row: Row) -> list[Line]:
    """Summarise a row, the quickest step first."""
    return [_line(row, name) for name in row.names()]


def _line(row: Row, name: str) -> Line:
    turns, ours, roofline = row.turns(name), row.turns(OURS), row.roofline_s()

    def middle(of: Callable[[Turn], float]) -> float:
        return median(of(one) for one in turns)

    near = [limit / one.step_s for limit, one in zip(roofline, turns, strict=False)]
    pairs = list(zip(ours, turns, strict=False))
    return Line(
        name=name,
        group=row.groups[name],
        step_s=middle(lambda one: one.step_s),
        step_min_s=min(one.step_s for one in turns),
        step_max_s=max(one.step_s for one in turns),
        prompt_s=middle(lambda one: one.prompt_s),
        decode_tokens_per_s=middle(lambda one: one.decode_tokens_per_s),
        tokens_per_s=middle(lambda one: one.tokens_per_s),
        step_gb=middle(lambda one: one.step_bytes) / 1e9,
        cpu_s_per_token=middle(lambda one: one.cpu_s_per_token),
        peak_mb=max(one.peak_bytes for one in turns) / 1e6,
        grown_mb=max(one.peak_bytes - one.start_bytes for one in turns) / 1e6,
        of_roofline=median(near) if near else None,
        ours_ratio=median(theirs.step_s / mine.step_s for mine, theirs in pairs) if pairs else None,
        ours_ratio_in_all=median(mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in pairs)
        if pairs
        else None,
    )


def verdicts(row: Row) -> list[dict[str, Any]]:
    """Judge the targets, for each baseline that reads from disk."""
    found = lines(row)
    mine = [line for line in found if line.name == OURS]
    if not mine:
        return [{"row": row.key, "text": "deepnvme took no part", "goal": "", "measured": None, "met": False}]
    judged = [_verdict(row, "share of the roofline", _ROOFLINE_SHARE, mine[0].of_roofline)]
    for line in found:
        goal = {"accelerate": _TIMES_ACCELERATE, "DeepSpeed": _TIMES_DEEPSPEED}.get(line.group)
        if goal is not None:
            judged.append(_verdict(row, f"times the tokens/s of {line.name}", goal, line.ours_ratio))
            for packed in (one for one in found if one.group == "packed"):
                text = f"{packed.name}: times the tokens/s of {line.name}"
                judged.append(_verdict(row, text, goal, _times(row, packed, line)))
    return judged


def _times(row: Row, mine: Line, theirs: Line) -> float:
    pairs = zip(row.turns(mine.name), row.turns(theirs.name), strict=True)
    return median(other.step_s / one.step_s for one, other in pairs)


def _verdict(row: Row, text: str, goal: float, measured: float | None) -> dict[str, Any]:
    met = None if measured is None else measured >= goal
    return {"row": row.key, "text": text, "goal": goal, "measured": measured, "met": met}


def row_to_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON-ready values."""
    return {
        "key": row.key,
        "job": asdict(row.job),
        "roofline": {key: row.roofline(key) for key in ("disk_s", "compute_s", "bytes")},
        "lines": [asdict(line) for line in lines(row)],
        "verdicts": verdicts(row),
        "samples": {
            name: [{**one.turn.to_json(), "roofline": one.roofline} for one in answers]
            for name, answers in row.answers.items()
        },
        "settings": {name: answers[0].settings for name, answers in row.answers.items() if answers},
        "left_out": row.left_out,
    }


def table(row: Row) -> str:
    """Draw a row for people."""
    limits = [row.roofline(key) for key in ("disk_s", "compute_s", "bytes")]
    text = [f"\n{row.key}"]
    if None not in limits:
        disk, compute, read = (float(one or 0) for one in limits)
        text.append(f"roofline: disk alone {disk:.3f} s for {read / 1e9:.2f} GB, computing alone {compute:.3f} s")
    text.append(
        f"{'':28} {'step s':>7} {'min - max':>15} {'tokens/s':>9} {'in all':>8} {'prompt s':>9} {'GB/step':>8} "
        f"{'CPU s/token':>11} {'peak MB':>8} {'grown':>7} {'of roof':>8} {'ours x':>7} {'in all':>7}",
    )
    for line in lines(row):
        spread = f"{line.step_min_s:.3f} - {line.step_max_s:.3f}"
        ratios = [
            f"{one:.2f}" if one is not None else "-"
            for one in (line.of_roofline, line.ours_ratio, line.ours_ratio_in_all)
        ]
        text.append(
            f"{line.name:28} {line.step_s:7.3f} {spread:>15} {line.decode_tokens_per_s:9.2f} "
            f"{line.tokens_per_s:8.2f} {line.prompt_s:9.2f} {line.step_gb:8.2f} {line.cpu_s_per_token:11.3f} "
            f"{line.peak_mb:8.0f} {line.grown_mb:7.0f} {ratios[0]:>8} {ratios[1]:>7} {ratios[2]:>7}",
        )
    return "\n".join([*text, *(f"left out: {name}: {why}" for name, why in row.left_out.items())])
