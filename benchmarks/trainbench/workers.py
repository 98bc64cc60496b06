"""``python -m trainbench.workers KIND NAME``: run one tool in its own process.

A request prepares a setting, makes steps (only these are measured), or releases all tensors.
"""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common.child import Child, serve
from trainbench.protocol import TOOK, Reply, Served, took

# Steps that create the state, its files and its access order.
_FIRST_STEPS = 2
# A process with more memory has not released its tensors.
_IDLE_BYTES_MAX = 1_300_000_000


class Trainer:
    """A handle of a process that trains.

    Args:
        kind: which sort of tool, ``steps`` or ``offloaded``.
        name: of the tool.
        log: the file for its standard error.
    """

    def __init__(self, kind: str, name: str, log: Path) -> None:
        self._child = Child("trainbench.workers", kind, name, log=log)

    def open(self, setting: dict[str, Any]) -> Reply:
        """Have it prepare a setting. Returns its reply.

        Raises:
            NotOffered: the tool cannot, and why.
            RuntimeError: it failed.
        """
        return self._ask({"open": setting})

    def turn(self, steps: int) -> Reply:
        """Have it make steps.

        Raises:
            RuntimeError: it failed.
        """
        return self._ask({"turn": steps})

    def let_go(self) -> bool:
        """Have it release its tensors. Returns whether it did; otherwise its process should end."""
        try:
            return bool(self._ask({"close": None})["resident_bytes"] < _IDLE_BYTES_MAX)
        except RuntimeError:
            return False

    def _ask(self, request: dict[str, Any]) -> Reply:
        answer: Reply = self._child.ask(request)
        return answer

    def close(self) -> None:
        """End the process. Its files go with it, or with its folder."""
        self._child.kill()


class _Steps:
    """A stepper with its tensors, and torch's optimizer over some of their elements."""

    def __init__(self, name: str) -> None:
        from trainbench import tools  # noqa: PLC0415

        self._kind = tools.ALL[name]

    def open(self, setting: dict[str, Any]) -> Reply:
        """Prepare a setting."""
        from trainbench.steppers import Setting  # noqa: PLC0415
        from trainbench.tensors import Reference  # noqa: PLC0415

        self._made = 0
        one = self._one = self._kind(Setting(**setting))
        one.open()
        self._reference = Reference(one.parameters(), one.gradients(), one.setting.elements)
        self._make(_FIRST_STEPS)
        one.settle()
        return {"settings": one.settings()}

    def _make(self, steps: int) -> None:
        from trainbench.tensors import rate  # noqa: PLC0415

        for _ in range(steps):
            self._one.step(rate(self._made))
            self._made += 1

    def turn(self, steps: int) -> Reply:
        """Make steps."""
        from zerobench.child import spent  # noqa: PLC0415

        one, counted = self._one, self._one.counted()
        sums: dict[str, float] = dict.fromkeys(TOOK, 0)
        gc.collect()
        gc.disable()
        # A tool that reads through the page cache rests between steps, so that they are cold.
        for count in [1] * steps if one.is_cached else [steps]:
            one.rest()
            before = spent()
            self._make(count)
            one.settle()
            for name, value in took(before, spent()).items():
                sums[name] += value
        gc.enable()
        own = {name: value - counted[name] for name, value in one.counted().items()}
        verdict = asdict(self._reference.compare(one.parameters(), self._made))
        return {**sums, "steps": steps, "own": own, "settings": one.settings(), **verdict}

    def close(self) -> Reply:
        """Release all tensors."""
        self._one.close()
        del self._one, self._reference
        return {"resident_bytes": _resident_bytes()}


def _resident_bytes() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _served(kind: str, name: str) -> Served:
    if kind == "steps":
        return _Steps(name)
    from trainbench.offloaded import Trained  # noqa: PLC0415

    return Trained()


def _answer(served: Served, request: dict[str, Any]) -> Reply:
    ((verb, what),) = request.items()
    if verb == "open":
        return served.open(what)
    return served.turn(what) if verb == "turn" else served.close()


def main() -> None:
    """Serve requests until there are none."""
    serve(lambda: partial(_answer, _served(sys.argv[1], sys.argv[2])))


if __name__ == "__main__":
    main()
