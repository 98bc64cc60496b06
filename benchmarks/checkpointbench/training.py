"""``python -m checkpointbench.training``: measure the cost of saving at every step of a training loop.

A transformer is trained with AdamW in blocks of steps: without saving, with an asynchronous save of model and
optimizer at every step, and with the save that overlaps without a copy. The blocks alternate; the metric is the
median of the ratios within the rounds. The disk is fast enough to write several states in a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import deepnvme
import torch

from common import command

WIDTH, HEADS, LAYERS, WORDS = 512, 8, 4, 8000
BATCH, LENGTH = 16, 128
STEPS, ROUNDS = 6, 7


class Loop:
    """A model in training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(WORDS, WIDTH),
            torch.nn.TransformerEncoder(layer, LAYERS),
            torch.nn.Linear(WIDTH, WORDS),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.number = 0

    def step(self) -> None:
        """Train on one batch."""
        words = torch.randint(0, WORDS, (BATCH, LENGTH))
        self.optimizer.zero_grad()
        predicted = self.model(words[:, :-1])
        loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.number += 1

    def state(self) -> dict[str, object]:
        """Return the contents of a checkpoint."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.number}


def block(loop: Loop, way: str, checkpointer: deepnvme.Checkpointer) -> float:
    """Take some steps. Returns the mean seconds of a step, including the end of its saves."""
    began = time.perf_counter()
    with ExitStack() as stack:
        if way == "overlapped":
            stack.enter_context(checkpointer.overlap(loop.optimizer))
        for _ in range(STEPS):
            loop.step()
            if way != "not saved":
                checkpointer.save(loop.number, loop.state())
    # Saves in the background count until the last file is complete.
    checkpointer.wait()
    return (time.perf_counter() - began) / STEPS


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="checkpointbench.training", description=__doc__)
    parser.add_argument("--scratch", type=Path, default=Path("scratch"))
    arguments = parser.parse_args()
    with command.scratch_folder(arguments.scratch, "training") as folder:
        measure(folder)
    return 0


def measure(folder: Path) -> None:
    """Measure in a folder, and print a table."""
    loop = Loop()
    ways: dict[str, Callable[[], deepnvme.Checkpointer]] = {
        "not saved": lambda: deepnvme.Checkpointer(folder / "none"),
        "asynchronous": lambda: deepnvme.Checkpointer(folder / "asynchronous", keep=2, async_=True),
        "overlapped": lambda: deepnvme.Checkpointer(folder / "overlapped", keep=2),
    }
    with ExitStack() as stack:
        checkpointers = {way: stack.enter_context(make()) for way, make in ways.items()}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for way in list(ways) if number % 2 else reversed(list(ways)):
                taken = block(loop, way, checkpointers[way])
                if number > 0:
                    seconds[way].append(taken)
        size = sum(checkpoint.nbytes for checkpoint in checkpointers["asynchronous"].checkpoints[:1])
    print(f"{size / 1e6:.0f} MB saved at every step; {ROUNDS} rounds of {STEPS} steps")
    for way, values in seconds.items():
        ratios = [mine / base for mine, base in zip(values, seconds["not saved"], strict=True)]
        print(
            f"{way:14} {statistics.median(values):.3f} s a step ({min(values):.3f} - {max(values):.3f}), "
            f"{(statistics.median(ratios) - 1) * 100:+.1f}%"
        )


if __name__ == "__main__":
    sys.exit(main())
