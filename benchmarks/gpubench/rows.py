"""The rows: reads, writes and loads, in alternating rounds, each verified."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepnvme
import torch

from gpubench.data import Mismatch, compare_file, compare_state, random_bytes, random_model, size_text
from gpubench.tool import Loader, Place, Tool, reason
from storagebench import cache
from storagebench.measure import Sample, timed
from storagebench.rounds import order


@dataclass
class Row:
    """All samples of one kind of work, and the skipped tools."""

    key: str
    title: str
    left_out: dict[str, str]
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    groups: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def drop(self, name: str, why: str) -> None:
        """Skip a tool, and drop its samples."""
        print(f"{self.key}: left out: {name}: {why}", file=sys.stderr)
        self.left_out[name] = why
        self.samples.pop(name, None)

    def note(self, text: str) -> None:
        """Say something about the row, once."""
        if text not in self.notes:
            self.notes.append(text)


@dataclass(frozen=True)
class Pace:
    """How many rounds are counted, and after how many seconds a row begins no other one."""

    rounds: int
    seconds: float


def run_rounds(row: Row, line: Sequence[Any], pace: Pace, once: Callable[[Any, bool], Sample]) -> Row:
    """Run every tool once in each round; the first round is not counted."""
    end = time.monotonic() + pace.seconds
    for index in range(pace.rounds + 1):
        if index > 1 and time.monotonic() > end:
            row.note(f"{index - 1} of {pace.rounds} rounds: the time was over")
            break
        for one in order([one for one in line if one.name not in row.left_out], index):
            try:
                sample = once(one, index == 0)
            except Exception as error:  # noqa: BLE001 - whatever a baseline throws must not end the others' run
                row.drop(one.name, reason(error))
                continue
            row.settings[one.name] = one.settings()
            if index > 0:
                row.samples.setdefault(one.name, []).append(sample)
                print(f"{row.key:6} round {index}  {one.name:34} {sample.gb_per_s:7.2f} GB/s", file=sys.stderr)
    for one in line:
        one.close()
    return row


class Transfers:
    """Reads and writes of one tensor of random bytes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.host = random_bytes(place.nbytes)

    def read(self, line: Sequence[Tool], left_out: dict[str, str], pace: Pace) -> Row:
        """Fill a tensor from a cold file."""
        row = Row("read", f"cold read of {size_text(self.place.nbytes)} into a tensor on the GPU", left_out)
        path = self.place.scratch / "read.bin"
        deepnvme.write(self.host, path, durability="data")
        targets = {
            "gpu": self.place.gpu.tensor(self.host),
            "host": self.place.gpu.pinned(self.place.nbytes),
            "none": None,
        }

        def once(one: Tool, is_first: bool) -> Sample:  # noqa: FBT001 - one of two rounds
            target: Any = targets[one.where]
            if is_first:
                one.prepare_read(target, path)
            self._spoil(one, target)
            action = one.read(target, path)
            make_cold(path, row)
            sample = self._timed(action)
            self._verify_read(one, target)
            return sample

        try:
            return run_rounds(row, line, pace, once)
        finally:
            path.unlink(missing_ok=True)

    def write(self, line: Sequence[Tool], left_out: dict[str, str], pace: Pace) -> Row:
        """Write a tensor to a new file, durably."""
        row = Row("write", f"durable write of {size_text(self.place.nbytes)} from a tensor on the GPU", left_out)
        path = self.place.scratch / "write.bin"
        pinned = self.place.gpu.pinned(self.place.nbytes)
        pinned.copy_(self.host)
        sources = {"gpu": self.place.gpu.tensor(self.host), "host": pinned, "none": None}

        def once(one: Tool, is_first: bool) -> Sample:  # noqa: FBT001 - one of two rounds
            source: Any = sources[one.where]
            path.unlink(missing_ok=True)
            if is_first:
                one.prepare_write(source, path)
                path.unlink(missing_ok=True)
            action = one.write(source, path)
            cache.settle()
            sample = self._timed(action)
            if one.where != "none":
                compare_file(path, self.host, whole=is_first)
            return sample

        try:
            return run_rounds(row, line, pace, once)
        finally:
            path.unlink(missing_ok=True)

    def _timed(self, action: Callable[[], object]) -> Sample:
        def whole() -> object:
            value = action()
            self.place.gpu.wait()
            return value

        return timed(whole, self.place.nbytes)[0]

    def _spoil(self, one: Tool, target: Any) -> None:
        if one.where == "gpu":
            self.place.gpu.spoil(target)
        elif one.where == "host":
            target.fill_(0xA5)

    def _verify_read(self, one: Tool, target: Any) -> None:
        if one.where == "none":
            return
        is_right = self.place.gpu.same(target, self.host) if one.where == "gpu" else torch.equal(target, self.host)
        if not is_right:
            raise Mismatch(f"{one.name} read other bytes than the file has")


def load(place: Place, line: Sequence[Loader], left_out: dict[str, str], pace: Pace) -> Row:
    """Load a safetensors file to the GPU."""
    row = Row("load", f"cold load of a safetensors file of {size_text(place.nbytes)} to the GPU", left_out)
    path = place.scratch / "model.safetensors"
    model = random_model(place.nbytes)
    deepnvme.save(model, path, progress=False)
    nbytes = path.stat().st_size

    def once(one: Loader, is_first: bool) -> Sample:  # noqa: FBT001 - one of two rounds
        make_cold(path, row)

        def action() -> dict[str, torch.Tensor]:
            state = one.load(path)
            place.gpu.wait()
            return state

        sample, state = timed(action, nbytes)
        compare_state(place, state, model, whole=is_first)
        del state
        one.let_go()
        gc.collect()
        return sample

    try:
        return run_rounds(row, line, pace, once)
    finally:
        path.unlink(missing_ok=True)


def make_cold(path: Path, row: Row) -> None:
    """Drop the file from the page cache; where that cannot be done, the row says so."""
    try:
        cache.make_cold(path)
    except (OSError, RuntimeError) as error:
        row.note(f"reads may be warm: {reason(error)}")
