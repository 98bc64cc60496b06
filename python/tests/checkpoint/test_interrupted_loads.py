"""Ctrl-C ends every way of loading within a second. One process continues after each."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import deepnvme
from deepnvme._utils.interrupts import is_of_handler

from .states import manifest_of_missing
from .test_costs import MODULUS, as_dict
from .test_hostile import archive

# Each way runs in a loop for a while, so that the signal arrives in the middle of it.
CHILD = """
import os, pathlib, signal, sys, threading, time, torch, deepnvme, contextlib
from deepnvme._deepnvme import _run_command
from deepnvme.integrations.dcp import DeepnvmeReader

costly, folder, dcp, listed, out = (pathlib.Path(name) for name in sys.argv[1:6])
deepnvme.save({"a": torch.ones(2)}, out / "warm.pt"); deepnvme.load(out / "warm.pt", lazy=True)["a"].sum()
checkpointer = deepnvme.Checkpointer(folder)

def command(*arguments):
    # A command reports the interrupt itself, and returns.
    _run_command(list(map(str, arguments)))
    if sent:
        raise KeyboardInterrupt

ways = {
    "restore": lambda: checkpointer.restore(),
    "open": lambda: deepnvme.Checkpointer(listed),
    "reader": lambda: DeepnvmeReader(dcp).read_metadata(),
    "inspect": lambda: command("inspect", costly),
    "verify": lambda: command("verify", costly),
    "folder": lambda: command("verify", listed),
    "convert": lambda: command("convert", costly, out / "new.safetensors"),
}
sys.stdout.flush(); quiet = os.open(os.devnull, os.O_WRONLY); os.dup2(quiet, 1)
for name, way in ways.items():
    began, sent, over = time.process_time(), [], threading.Event()
    def interrupt():
        # Count the work, not the time: another process may have the CPU.
        while time.process_time() - began < 0.5 and not over.wait(0.01):
            pass
        while not over.is_set():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
            # Python loses an interrupt that arrives in a callback, such as a finalizer of a dropped object.
            over.wait(2)
    watcher = threading.Thread(target=interrupt)
    try:
        watcher.start()
        while True:
            way()
    except KeyboardInterrupt:
        took, worked = time.monotonic() - sent[0], time.process_time() - began
    over.set(); watcher.join()
    print(name, took, file=sys.stderr, flush=True)
print(sorted(path.name for path in out.iterdir()), file=sys.stderr)
"""


def test_ctrl_c_ends_every_way_of_loading(
    tmp_path: Path, python_fork: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    few = as_dict([MODULUS * index for index in range(1, 600)])[2:-1]
    data = b"\x80\x04](" + few + b"](" + b"]" * 4_000_000 + b"ee."
    costly = archive(tmp_path / "x.pt", data)
    folder, out = tmp_path / "steps", tmp_path / "out"
    out.mkdir()
    with deepnvme.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, {"a": torch.ones(2), "lists": [[] for _ in range(1_000_000)]})
    dcp = tmp_path / "dcp"
    dcp.mkdir()
    entries = ", ".join(
        f'"{index}": {{"bytes": ["shard-00000-{"0" * 32}.safetensors", "a"]}}' for index in range(100_000)
    )
    (dcp / "deepnvme.json").write_text(f'{{"version": 1, "entries": {{{entries}}}, "planner_data": null}}')
    listed = tmp_path / "listed"
    listed.mkdir()
    (listed / "manifest.json").write_text(manifest_of_missing(50_000))
    done = python_fork(CHILD, costly, folder, dcp, listed, out)
    lines = done.stderr.strip().splitlines()
    took = {name: float(seconds) for name, _, seconds in (line.partition(" ") for line in lines[:-1]) if name.isalpha()}
    assert list(took) == ["restore", "open", "reader", "inspect", "verify", "folder", "convert"], done.stderr
    # A second, with slack for a busy machine.
    assert max(took.values()) < 5, took
    # The file that was complete before, and no remains of a new one.
    assert lines[-1] in ("['warm.pt']", "['new.safetensors', 'warm.pt']"), lines[-1]


def interrupted_by_alarm(way: Callable[[], object], seconds: float) -> str:
    """Return the name of the error that came out."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            way()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Exception as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("kind", [TimeoutError, ValueError, RuntimeError])
def test_an_error_of_a_handler_comes_out_of_a_load(tmp_path: Path, kind: type[Exception]) -> None:
    """It is not mistaken for damage of the file, which would make a program go back to an older checkpoint."""
    state = {"values": [{"a": index, "b": (1, "x")} for index in range(3000)], "w": torch.ones(3)}
    checkpointer, path = deepnvme.Checkpointer(tmp_path / "run"), tmp_path / "x.pt"
    checkpointer.save(1, state)
    deepnvme.save(state, path)

    def handler(*_: object) -> None:
        raise kind("alarm")

    ways: list[Callable[[], object]] = [
        lambda: deepnvme.load(path),
        lambda: torch.sum(deepnvme.load(path, lazy=True)["w"]),
        checkpointer.restore,
    ]
    chooser, seen = random.Random(6), Counter[str]()
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for way in ways:
            began = time.perf_counter()
            way()
            took = time.perf_counter() - began
            for _ in range(60):
                seen[interrupted_by_alarm(way, 1e-4 + chooser.random() * took)] += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen.keys() == {kind.__name__, ""}
    assert seen[kind.__name__] > 30


class Handlers:
    def method(self, *_: object) -> None:
        raise LookupError

    def __call__(self, *_: object) -> None:
        self.method()


@pytest.mark.parametrize("handler", [Handlers.method, Handlers().method, partial(Handlers().method), Handlers()])
def test_errors_of_all_kinds_of_handlers_are_known(handler: Callable[..., None]) -> None:
    def caught() -> Exception:
        with pytest.raises(LookupError) as found:
            handler(None, None)
        return found.value

    assert not is_of_handler(caught())
    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert is_of_handler(caught())
        with pytest.raises(LookupError) as other:
            raise LookupError
        assert not is_of_handler(other.value)
    finally:
        signal.signal(signal.SIGALRM, before)
