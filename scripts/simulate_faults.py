"""Reintroduce past faults one at a time, and count the seeds that the simulation needs to find each.

    python scripts/simulate_faults.py [NAME ...]

Each fault is a patch in crates/deepnvme-simulation/faults. It is applied to a copy of all files that git does not
ignore. Three numbers are printed: the seeds until the fault's own scenario fails, the seeds until any scenario fails,
and how many of a thousand seeds fail. They are the seeds that `make test` runs: a fault that none of them finds is a
failure. Standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "crates" / "deepnvme-simulation" / "faults"
TARGET = ROOT / "target" / "simulated-faults"
# Not the folder of `make simulate`: cargo confuses two trees of the same workspace.
BUILD = TARGET / "build"
SEEDS = 1000
FOUND = re.compile(r"^seed (\d+) failed \((\w+), .*\):$", re.MULTILINE)


def why_not(patch: Path) -> str:
    """Return why the patch does not apply to the current tree; nothing if it does."""
    check = ["git", "apply", "--check", str(patch)]
    answer = subprocess.run(check, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return answer.stdout if answer.returncode else ""


def copy_tree(copy: Path) -> None:
    """Update the copy to the current tree. Unchanged files keep their time, so that little is rebuilt."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    names = {name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()}
    for name in names:
        source, target = ROOT / name, copy / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    for stale in copy.rglob("*"):
        place = stale.relative_to(copy)
        if stale.is_file() and str(place) not in names and "target" not in place.parts:
            stale.unlink()


def scenario_of(patch: Path) -> str:
    """Return the scenario that should find the fault. The patch's name begins with it."""
    return patch.stem.split("-")[0]


def build_with(patch: Path, copy: Path) -> None:
    """Build the simulation with the fault."""
    subprocess.run(["git", "apply", "--unsafe-paths", f"--directory={copy}", str(patch)], cwd="/", check=True)
    environment = {"RUSTFLAGS": "--cfg simulated", "CARGO_TARGET_DIR": str(BUILD)}
    build = ["cargo", "build", "--quiet", "--package", "deepnvme-simulation", "--bin", "simulate"]
    built = subprocess.run(
        build, cwd=copy, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True, check=False
    )
    if built.returncode != 0:
        raise SystemExit(f"{patch.name} does not compile:\n{built.stderr}")


def failing(*options: str) -> list[int]:
    """Run the thousand seeds, or until the first failure without `--keep-going`. Return those that failed."""
    run = [str(BUILD / "debug" / "simulate"), "--seeds", str(SEEDS), *options]
    answer = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return sorted(int(seed) for seed, _ in FOUND.findall(answer.stdout))


def main(chosen: list[str]) -> int:
    """Try each fault. Exit status 1 if one was not found."""
    patches = [patch for patch in sorted(FAULTS.glob("*.patch")) if not chosen or patch.stem in chosen]
    copy, missed = TARGET / "tree", 0
    for patch in patches:
        copy_tree(copy)
        began = time.monotonic()
        build_with(patch, copy)
        own, mixed = failing("--only", scenario_of(patch), "--jobs", "1"), failing("--keep-going")
        missed += not mixed
        first_own, first = (str(seeds[0] + 1) if seeds else "NOT FOUND" for seeds in (own, mixed))
        seeds = f"{first_own:>9} of its scenario, {first:>9} of all, {len(mixed):>4} of {SEEDS} fail"
        print(f"{patch.stem:<44} {seeds}  [{time.monotonic() - began:.0f} s]", flush=True)
    return 1 if missed or not patches else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
