"""``python -m trainbench.workers KIND NAME``: run one tool in its own process.

The protocol is JSON: one request per line of standard input, one reply per line of standard output. A request
prepares a setting, makes steps (only these are measured), or releases all tensors.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.not_offered import NotOffered
from trainbench.protocol import TOOK, Reply, Served, took

# Steps that create the state, its files and its access order.
_FIRST_STEPS = 2
# A process with more memory has not released its tensors.
_IDLE_BYTES_MAX = 1_300_000_000


class Child:
    """A handle of a process that trains.

    Args:
        kind: which sort of tool, ``steps`` or ``offloaded``.
        name: of the tool.
        log: the file for its standard error.
    """

    def __init__(self, kind: str, name: str, log: Path) -> None:
        command = [sys.executable, "-m", "trainbench.workers", kind, name]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._log = log

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
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline() if self._process.stdout else ""
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"its process has ended: {self._log.read_text()[-500:]}")
        answer: Reply = json.loads(line)
        if "not_offered" in answer:
            raise NotOffered(answer["not_offered"])
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def close(self) -> None:
        """End the process. Its files go with it, or with its folder."""
        self._process.kill()
        self._process.wait()


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


def _serve(kind: str, name: str) -> Served:
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
    # Output that a library prints must not mix with the replies.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    served = _serve(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        try:
            answer = _answer(served, json.loads(line))
        except NotOffered as reason:
            answer = {"not_offered": str(reason)}
        except Exception as error:  # noqa: BLE001 - whatever a baseline throws is an answer
            sys.excepthook(type(error), error, error.__traceback__)
            answer = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=answers, flush=True)
    # Threads of baselines have been seen to hang at the end of a process that has nothing to lose.
    os._exit(0)


if __name__ == "__main__":
    main()
