"""The main job: real model weights go to disk and back at the speed of the disk.

Save a state dict (a real sentence-embedding model and generated tensors beside it) in four ways in alternating
rounds, read each file back cold, compare every bit, load the weights that came back into an empty model, check that
it embeds the same sentences identically, and print what each way took.

    make demo                    from a bare machine
    python demo/main.py          in an environment that has deepnvme and demo/requirements.txt

DEMO_GB sets how much is written (2 by default, less where disk, memory or patience is short); DEMO_DIR the folder,
demo/scratch by default. Everything written there is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

import deepnvme
import report
import workload
from contestants import Contestant, State, contestants
from embedding import SENTENCES, Embedder
from measure import Cost, evict, measure, remove, same_bits

ROUNDS = 3


def main() -> int:
    """Run the demo in a scratch folder of its own; 0 when every bit and every embedding came back."""
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(os.environ.get("DEMO_DIR", Path(__file__).parent / "scratch"))
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="demo-", dir=folder))
    try:
        run(scratch)
        print(report.machine(deepnvme.report(scratch)))
    except KeyboardInterrupt:
        print("\ninterrupted; nothing is left behind", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.farewell(time.monotonic() - begin))
    return 0


def run(scratch: Path) -> None:
    """The story, in order."""
    embedder = Embedder()
    before = embedder.embed()
    weights = embedder.weights()
    print(f"real model: {embedder.name}, {len(weights)} tensors, {workload.total_bytes(weights) / 1e6:.0f} MB")

    runners = contestants()
    size, reasons = workload.choose_bytes(scratch, weights, len(runners), ROUNDS)
    for reason in reasons:
        print(reason)
    state = workload.state_dict(weights, size)
    total = workload.total_bytes(state)
    print(f"state dict: {len(state)} tensors, {total / 1e9:.2f} GB, written to {report.brief(scratch.parent)}\n")

    outcome = race(scratch, runners, state, set(weights))
    print(report.table(outcome.costs, total))
    print(report.footnotes(ROUNDS, sorted(outcome.ways_to_evict)))
    check_embeddings(embedder, before, outcome.weights)


@dataclass
class Outcome:
    """What the race brought: costs of each write and read, how files were made cold, our copy of the weights."""

    costs: dict[str, list[tuple[Cost, Cost]]]
    ways_to_evict: set[str] = field(default_factory=set)
    weights: State = field(default_factory=dict)


def race(scratch: Path, runners: list[Contestant], state: State, keep: set[str]) -> Outcome:
    """Every contestant in every round, each round another one first; `keep` names the tensors to bring home."""
    outcome = Outcome({runner.name: [] for runner in runners})
    progress = report.Progress(ROUNDS * len(runners) * 3)
    for number in range(ROUNDS):
        first = number % len(runners)
        for runner in runners[first:] + runners[:first]:
            path, title = scratch / "state.bin", f"round {number + 1} of {ROUNDS}: {runner.name}"
            progress.step(f"{title}: write")
            _, write = measure(runner.save, state, path)
            outcome.ways_to_evict.add(evict(path))
            progress.step(f"{title}: read cold")
            back, read = measure(runner.load, path)
            progress.step(f"{title}: verify")
            same_bits(state, back, runner.name)
            remove(path)
            outcome.costs[runner.name].append((write, read))
            if runner is runners[-1]:
                outcome.weights = {name: back[name] for name in keep}
            del back
    progress.close()
    return outcome


def check_embeddings(embedder: Embedder, before: torch.Tensor, weights: State) -> None:
    """An emptied model must embed differently, and with the weights from disk exactly as before."""
    embedder.empty()
    if torch.equal(before, embedder.embed()):
        raise SystemExit("FAILED: the emptied model embeds as before: this check would prove nothing")
    embedder.load(weights)
    after = embedder.embed()
    if not torch.equal(before, after):
        raise SystemExit("FAILED: the reloaded model embeds differently from the original")
    likeness = torch.nn.functional.cosine_similarity(after[:1], after[1:])
    print(f"the reloaded model embeds {len(SENTENCES)} sentences identically, for example:")
    print(f"  {SENTENCES[0]!r} is {likeness[0]:.2f} like {SENTENCES[1]!r} and {likeness[1]:.2f} like {SENTENCES[2]!r}")


if __name__ == "__main__":
    sys.exit(main())
