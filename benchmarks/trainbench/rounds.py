"""Alternating rounds. Only one tool at a time has parameters and gradients in memory."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from common.disk_idle import DiskIdleProbe
from common.not_offered import NotOffered
from common.round_order import order
from swapbench.fio_mixed import MixedJob
from trainbench.offloaded import Size
from trainbench.protocol import Reply
from trainbench.steppers import Setting, Stepper
from trainbench.workers import Trainer

OURS, IN_MEMORY, FIO = "deepnvme", "in memory", "fio"
# Claims to be bit for bit torch's optimizer in its default form.
_BITWISE = (OURS,)
_CHECKED_ELEMENTS, _TRIED_ELEMENTS = 1 << 20, 150_000_000
# Every group of this many elements is read and written by itself, in the check.
_CHECKED_GROUP = 1 << 18
# How far the kernel's count of bytes may be from our own.
_COUNT_SHARE = 0.05
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass
class Row:
    """All that was measured of one kind of step: for each tool one answer, in each counted round."""

    key: str
    setting: dict[str, Any]
    answers: dict[str, list[Reply]] = field(default_factory=dict)
    fio: list[float] = field(default_factory=list)
    """Bytes per second, in each round."""
    left_out: dict[str, str] = field(default_factory=dict)
    trials: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    checks: dict[str, Reply] = field(default_factory=dict)
    loads: list[float] = field(default_factory=list)


@dataclass
class Bench:
    """The disk, its idle probe, and the number of rounds.

    Args:
        scratch: a folder.
        disk: waits until the disk is idle.
        fio: the best setting.
        rounds: that count.
        steps: of each turn.
        tools: tools by name.
        is_quick: no settings are tried, and the disk is not waited for.
    """

    scratch: Path
    disk: DiskIdleProbe
    fio: MixedJob
    rounds: int
    steps: int
    tools: dict[str, type[Stepper]]
    is_quick: bool
    chosen: dict[str, dict[str, int]] = field(default_factory=dict)
    children: dict[str, Trainer] = field(default_factory=dict)
    """The processes. Only the one whose turn it is has tensors."""

    @property
    def file(self) -> Path:
        """The file that fio reads and writes."""
        return self.scratch / "mixed"

    def close(self) -> None:
        """End all processes."""
        for child in self.children.values():
            child.close()

    def steps_row(self, key: str, elements: int, *, is_16_bit: bool) -> Row:
        """Measure steps of an optimizer."""
        setting = self._setting(elements, is_16_bit=is_16_bit)
        row = Row(key, {**asdict(setting), "state_bytes": setting.state_bytes})
        for name in self.tools:
            self._guarded(row, name, self._check)
            self._guarded(row, name, self._try)
        # fio's block is one MiB.
        moved = 2 * setting.state_bytes // _MIB * _MIB
        for index in range(self.rounds):
            row.loads.append(os.getloadavg()[0])
            for name in order([*self.tools, FIO], index):
                if name == FIO:
                    self._fio(row, moved)
                else:
                    self._guarded(row, name, self._counted)
        return row

    def _setting(self, elements: int, *, is_16_bit: bool) -> Setting:
        """Return the setting with 1 GiB of memory, or a third of the state if that is less."""
        setting = Setting("", elements, 0, is_16_bit)
        return replace(setting, memory=min(_GIB, setting.state_bytes // 3))

    def _guarded(self, row: Row, name: str, act: Any) -> None:
        if name in row.left_out:
            return
        try:
            act(row, name)
        except (NotOffered, RuntimeError) as error:
            row.left_out[name] = str(error)
            tell(row, name, f"left out: {error}")

    def _check(self, row: Row, name: str) -> None:
        """Compare every element of a small set of parameters."""
        setting = self._setting(_CHECKED_ELEMENTS, is_16_bit=row.setting["is_16_bit"])
        answer = self._turn(name, replace(setting, options={"sub_group": _CHECKED_GROUP}), is_timed=False)
        row.checks[name] = {key: answer[key] for key in ("is_equal", "difference", "probes")}
        tell(row, name, f"checked: {row.checks[name]}")

    def _try(self, row: Row, name: str) -> None:
        """Choose settings for the tools that have some."""
        trials = self.tools[name].trials
        if self.is_quick or not trials or name in self.chosen:
            return
        elements = min(_TRIED_ELEMENTS, row.setting["elements"])
        setting = self._setting(elements, is_16_bit=row.setting["is_16_bit"])
        tried = row.trials[name] = []
        for options in trials:
            answer = self._turn(name, replace(setting, options=options))
            tried.append({"options": options, "step_s": answer["took_s"] / answer["steps"]})
            tell(row, name, f"tried: {tried[-1]}")
        self.chosen[name] = min(tried, key=lambda one: float(one["step_s"]))["options"]

    def _counted(self, row: Row, name: str) -> None:
        setting = self._setting(row.setting["elements"], is_16_bit=row.setting["is_16_bit"])
        answer = self._turn(name, replace(setting, options=self.chosen.get(name, {})))
        row.answers.setdefault(name, []).append(answer)
        moved = (answer["read_bytes"] + answer["write_bytes"]) / answer["steps"]
        tell(row, name, f"step {answer['took_s'] / answer['steps']:.3f} s, {moved / 1e9:.2f} GB")

    def _turn(self, name: str, setting: Setting, *, is_timed: bool = True) -> Reply:
        folder = self.scratch / "tool"
        folder.mkdir()
        if name not in self.children:
            self.children[name] = Trainer("steps", name, self._log(name))
        child = self.children[name]
        try:
            child.open(asdict(replace(setting, folder=str(folder))))
            if is_timed:
                # Let the disk finish writing the state.
                self._wait()
            answer = child.turn(self.steps)
        finally:
            if not child.let_go():
                self.children.pop(name).close()
            shutil.rmtree(folder)
        if not answer["is_close"] or (name in _BITWISE and not answer["is_equal"]):
            raise RuntimeError(f"its parameters are not those of torch: they differ by {answer['difference']}")
        _compare_counts(answer)
        return answer

    def _fio(self, row: Row, moved: int, read_percent: int = 50) -> None:
        self._wait()
        row.fio.append(self.fio.run(self.file, moved, read_percent=read_percent))
        tell(row, FIO, f"{row.fio[-1] / 1e9:.2f} GB/s")

    def _wait(self) -> None:
        if not self.is_quick:
            self.disk.wait()

    def _log(self, name: str) -> Path:
        return self.scratch / f"{name.replace(' ', '-').replace(',', '')}.log"

    def offload_row(self, key: str, size: Size, batch: int, *, in_backward: bool) -> Row:
        """Measure steps of a model with its parameters on disk, and the same in memory.

        Raises:
            RuntimeError: their losses differ, or one of them ended.
        """
        memory = size.parameter_bytes // 4
        row = Row(key, {**asdict(size), "batch": batch, "memory": memory, "in_backward": in_backward})
        children: dict[str, Trainer] = {}
        ready: dict[str, Reply] = {}
        folder = self.scratch / "tool"
        folder.mkdir()
        try:
            for name, bound in ((OURS, memory), (IN_MEMORY, 0)):
                asked = {**row.setting, "memory": bound, "folder": str(folder)}
                children[name] = Trainer("offloaded", name, self._log(name))
                ready[name] = children[name].open(asked)
            _same(ready)
            self._offload_rounds(row, children)
        finally:
            for child in children.values():
                child.close()
            shutil.rmtree(folder)
        return row

    def _offload_rounds(self, row: Row, children: dict[str, Trainer]) -> None:
        # The first does not count: it tells how many bytes are moved.
        for index in range(self.rounds + 1):
            row.loads.append(os.getloadavg()[0])
            found: dict[str, Reply] = {}
            for name in order([*children, FIO] if index else [*children], index):
                if name == FIO:
                    read, written = (row.setting["traffic"][side] for side in ("read", "written"))
                    moved = max(_MIB, int(read + written) // _MIB * _MIB)
                    self._fio(row, moved, round(100 * read / (read + written)))
                    continue
                self._wait()
                found[name] = children[name].turn(self.steps)
                note = "" if index else " (not counted)"
                tell(row, name, f"step {found[name]['took_s'] / self.steps:.3f} s{note}")
            _same(found)
            _compare_counts(found[OURS])
            if index:
                for name, answer in found.items():
                    row.answers.setdefault(name, []).append(answer)
            own = found[OURS]["own"]
            row.setting["traffic"] = {
                "read": own["bytes_read"] / self.steps,
                "written": own["bytes_written"] / self.steps,
            }


def _same(found: dict[str, Reply]) -> None:
    losses = [answer["losses"] for answer in found.values()]
    if any(one != losses[0] for one in losses):
        raise RuntimeError(f"the losses differ: {losses}")


def _compare_counts(answer: Reply) -> None:
    """Compare the bytes that deepnvme counts with those that the kernel counts."""
    own = answer["own"]
    if not own:
        return
    for ours, kernel in (("bytes_read", "read_bytes"), ("bytes_written", "write_bytes")):
        if abs(own[ours] - answer[kernel]) > max(_COUNT_SHARE * own[ours], 16 * _MIB):
            raise RuntimeError(f"{ours} is {own[ours]:,.0f}, and the kernel has counted {answer[kernel]:,}")


def tell(row: Row, name: str, text: str) -> None:
    """Print the progress."""
    print(f"{row.key:16} {name:24} {text}", file=sys.stderr, flush=True)
