"""Run programs with blocking calls, in forks of a process that has already imported the packages they need."""

from __future__ import annotations

import os
from pathlib import Path

from forked_python import ForkedPython

# The default engine makes one system call at a time, for 4 KiB each, so that some MiB take seconds.
SLOW_SETTINGS = '[engine]\nbackend = "threads"\nworkers = 1\nqueue_depth = 1\nblock_bytes = 4096\n'
# A program that hangs ends.
SECONDS_MAX = 60

TORCH = ("torch", "torch._dynamo")
OURS = ("deepnvme._checkpoint.checkpointer", "deepnvme._offload", "deepnvme._stream", "deepnvme.optim")
NAMES = """
import asyncio, gc, json, mmap, os, signal, sys, threading, time, warnings
import deepnvme
from deepnvme import errors
from blocking.exit_times import *
from blocking.in_programs import *
warnings.simplefilter("ignore")
"""
NAMES_WITH_TORCH = """
import torch
from deepnvme import optim
from torch import nn
torch.set_num_threads(1)
"""


class ForkServer:
    """A process that runs each program in a fork of itself. The fork ends as an interpreter ends.

    Args:
        folder: the folder for its settings.
        has_torch: whether programs use torch.
    """

    def __init__(self, folder: Path, *, has_torch: bool) -> None:
        settings = folder / "slow.toml"
        settings.write_text(SLOW_SETTINGS)
        self._environment = os.environ | {"DEEPNVME_CONFIG": str(settings)}
        self._names = NAMES + NAMES_WITH_TORCH * has_torch
        # At the exit of a program, a collection of garbage would visit all objects of torch, which takes a second. It
        # has to visit ours.
        self._forked = ForkedPython(
            "blocking.exit_times",
            *TORCH * has_torch,
            later=("blocking.in_programs", *OURS * has_torch),
            path=(Path(__file__).parents[1],),
        )

    def run(self, folder: Path, program: str) -> tuple[int, float]:
        """Run a program. Return its exit status, and the time at which it had ended."""
        output = folder / "output"
        end = self._forked.wait(
            self._forked.start(
                self._names + program,
                folder=folder,
                environment=self._environment,
                stdout=output,
                stderr=output,
                seconds=SECONDS_MAX,
                ends_fully=True,
            )
        )
        return end.status, end.at_s

    def close(self) -> None:
        """End the process."""
        self._forked.close()
