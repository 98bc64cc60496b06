"""The main job: move real model weights to disk and back at the speed of the disk.

Save a state dict (a real sentence-embedding model and generated tensors) in four ways in alternating rounds, read each
file back cold, and compare every bit. Then load the weights that were read into an empty model, check that it embeds
the same sentences identically, and print the times.

    make demo                    from a bare machine
    python demo/main.py          in an environment with deepnvme and demo/requirements.txt

DEMO_GB sets the amount (default 2, less if disk, memory or time is short). DEMO_DIR sets the folder (default
demo/scratch). Everything written there is removed at the end, also after Ctrl-C.
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
from embedding import SENTENCES, Embedder
from measure import Cost, evict, measure, remove, same_bits
from methods import Method, State, all_methods

ROUNDS = 3


def main() -> int:
    """Run the demo in a new scratch folder. Return 0 if every bit and every embedding is the same."""
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
    """Run all steps in order."""
    embedder = Embedder()
    before = embedder.embed()
    weights = embedder.weights()
    print(f"real model: {embedder.name}, {len(weights)} tensors, {workload.total_bytes(weights) / 1e6:.0f} MB")

    methods = all_methods()
    size, reasons = workload.choose_bytes(scratch, weights, len(methods), ROUNDS)
    for reason in reasons:
        print(reason)
    state = workload.state_dict(weights, size)
    total = workload.total_bytes(state)
    print(f"state dict: {len(state)} tensors, {total / 1e9:.2f} GB, written to {report.brief(scratch.parent)}\n")

    outcome = run_rounds(scratch, methods, state, set(weights))
    print(report.table(outcome.costs, total))
    print(report.footnotes(ROUNDS, sorted(outcome.ways_to_evict)))
    check_embeddings(embedder, before, outcome.weights)


@dataclass
class Outcome:
    """Results: costs of each write and read, how files were made cold, and deepnvme's copy of the weights."""

    costs: dict[str, list[tuple[Cost, Cost]]]
    ways_to_evict: set[str] = field(default_factory=set)
    weights: State = field(default_factory=dict)


def run_rounds(scratch: Path, methods: list[Method], state: State, keep: set[str]) -> Outcome:
    """Run every way in every round, starting with another one each time. `keep` names the tensors to return."""
    outcome = Outcome({method.name: [] for method in methods})
    progress = report.Progress(ROUNDS * len(methods) * 3)
    for number in range(ROUNDS):
        first = number % len(methods)
        for method in methods[first:] + methods[:first]:
            path, title = scratch / "state.bin", f"round {number + 1} of {ROUNDS}: {method.name}"
            progress.step(f"{title}: write")
            _, write = measure(method.save, state, path)
            outcome.ways_to_evict.add(evict(path))
            progress.step(f"{title}: read cold")
            back, read = measure(method.load, path)
            progress.step(f"{title}: verify")
            same_bits(state, back, method.name)
            remove(path)
            outcome.costs[method.name].append((write, read))
            if method is methods[-1]:
                outcome.weights = {name: back[name] for name in keep}
            del back
    progress.close()
    return outcome


def check_embeddings(embedder: Embedder, before: torch.Tensor, weights: State) -> None:
    """Check that an emptied model embeds differently, and with the weights from disk exactly as before."""
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
