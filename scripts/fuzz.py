"""Run each fuzz target for some time: ``make fuzz``, or ``python scripts/fuzz.py [TARGET ...]``.

``FUZZ_SECONDS`` is the time for each target (default 60). The stable toolchain instruments the code; cargo-fuzz and a
nightly compiler are not needed. A finding ends its target, and the others still run. The exit status is then 1, and the
input stays in ``fuzz/artifacts``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
# Instrumentation that libFuzzer reads (edges taken, and operands compared), and checks of assertions and overflows.
FLAGS = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
    "-Coverflow-checks",
]


def build() -> Path:
    """Build all targets. Return their folder."""
    host = subprocess.run(["rustc", "-vV"], capture_output=True, text=True, check=True).stdout
    triple: str = re.findall(r"host: (\S+)", host)[0]
    environment = {**os.environ, "RUSTFLAGS": " ".join(FLAGS), "CARGO_TARGET_DIR": str(FUZZ / "target")}
    # With an explicit target triple, build scripts and macros are not instrumented.
    command = ["cargo", "build", "--quiet", "--release", "--bins", "--target", triple]
    subprocess.run(command, cwd=FUZZ, env=environment, check=True)
    return FUZZ / "target" / triple / "release"


def run(binary: Path, seconds: int) -> tuple[int, str]:
    """Run a target. Return its exit status and a summary."""
    target = binary.name
    corpus, artifacts = FUZZ / "corpus" / target, FUZZ / "artifacts" / target
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    limits = ["-max_len=65536", "-rss_limit_mb=1024", "-malloc_limit_mb=512", "-timeout=10"]
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={artifacts}/"]
    command = [binary, corpus, FUZZ / "seeds" / target, *limits, *options]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", check=False)
    figures = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stderr))
    coverage = re.findall(r"cov: (\d+)", done.stderr)
    executions, peak = figures.get("number_of_executed_units", "?"), figures.get("peak_rss_mb", "?")
    text = f"{executions} executions, coverage {coverage[-1] if coverage else '?'}, peak {peak} MB"
    if done.returncode:
        text += "\n" + "\n".join(done.stderr.splitlines()[-40:])
    return done.returncode, text


def main() -> int:
    """Run the named targets, or all."""
    seconds = int(os.environ.get("FUZZ_SECONDS", "60"))
    targets = re.findall(r'\[\[bin\]\]\nname = "(\w+)"', (FUZZ / "Cargo.toml").read_text())
    wanted = sys.argv[1:] or targets
    unknown = sorted(set(wanted) - set(targets))
    if unknown:
        print(f"no such target: {', '.join(unknown)}; use {', '.join(targets)}", file=sys.stderr)
        return 2
    folder = build()
    failed = []
    for target in wanted:
        status, text = run(folder / target, seconds)
        print(f"{target}: {text}", flush=True)
        if status:
            failed.append(target)
    if failed:
        print(f"findings: {', '.join(failed)}; the inputs are in fuzz/artifacts", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
