"""Run each fuzz target for some time: ``make fuzz``, or ``python scripts/fuzz.py [TARGET ...]``.

``FUZZ_SECONDS`` is the time for each target (default 60). The stable toolchain instruments the code; cargo-fuzz and a
nightly compiler are not needed. The targets in Python run with the package that this interpreter has, under atheris,
which is installed into ``fuzz/target`` for that. A finding ends its target, and the others still run. The exit status
is then 1, and the input stays in ``fuzz/artifacts``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FUZZ = ROOT / "fuzz"
ATHERIS = "atheris==3.0.0"
# Targets in Python also have torch in memory, which the limit of 1 GiB leaves out.
TORCH_MB = 1024
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


def install() -> Path | None:
    """Install atheris for the targets in Python. Return its folder; ``None`` if there is no wheel for this Python."""
    folder = FUZZ / "target" / f"{ATHERIS}-{sys.implementation.cache_tag}"
    if not folder.is_dir():
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--target", str(folder)]
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, ATHERIS], check=False)
        if done.returncode:
            return None
    return folder


def run(target: str, command: list[str], environment: dict[str, str], rss_mb: int, seconds: int) -> tuple[int, str]:
    """Run a target. Return its exit status and a summary."""
    corpus, artifacts = FUZZ / "corpus" / target, FUZZ / "artifacts" / target
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    limits = ["-max_len=65536", f"-rss_limit_mb={rss_mb}", "-malloc_limit_mb=512", "-timeout=10"]
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-artifact_prefix={artifacts}/"]
    command = [*command, str(corpus), str(FUZZ / "seeds" / target), *limits, *options]
    # A target that works on files leaves them here. In memory, it tries many more inputs.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 (a folder of its own in it)
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False,
            env={**os.environ, "TMPDIR": scratch, **environment},
        )  # fmt: skip
    figures = dict(re.findall(r"stat::(\w+):\s+(\d+)", done.stderr))
    coverage = re.findall(r"cov: (\d+)", done.stderr)
    executions, peak = figures.get("number_of_executed_units", "?"), figures.get("peak_rss_mb", "?")
    text = f"{executions} executions, coverage {coverage[-1] if coverage else '?'}, peak {peak} MB"
    if done.returncode:
        # Atheris prints the traceback of an error to the standard output.
        text += "\n" + "\n".join([*done.stdout.splitlines()[-40:], *done.stderr.splitlines()[-40:]])
    return done.returncode, text


def main() -> int:
    """Run the named targets, or all."""
    seconds = int(os.environ.get("FUZZ_SECONDS", "60"))
    of_rust = re.findall(r'\[\[bin\]\]\nname = "(\w+)"', (FUZZ / "Cargo.toml").read_text())
    bodies = (ROOT / "python" / "tests" / "fuzz" / "targets.py").read_text()
    of_python = re.findall(r'^    "(\w+)": \w+,$', bodies[bodies.index("TARGETS:") :], re.MULTILINE)
    targets = of_rust + of_python
    wanted = sys.argv[1:] or targets
    unknown = sorted(set(wanted) - set(targets))
    if unknown:
        print(f"no such target: {', '.join(unknown)}; use {', '.join(targets)}", file=sys.stderr)
        return 2
    folder = build() if set(wanted) & set(of_rust) else FUZZ
    atheris = install() if set(wanted) & set(of_python) else None
    failed = []
    for target in wanted:
        if target in of_rust:
            status, text = run(target, [str(folder / target)], {}, 1024, seconds)
        elif atheris is None:
            status, text = 0, f"skipped: {ATHERIS} cannot be installed for this interpreter"
        else:
            command = [sys.executable, str(ROOT / "scripts" / "fuzz_python.py"), target]
            paths = os.pathsep.join(filter(None, [str(atheris), os.environ.get("PYTHONPATH")]))
            environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            status, text = run(target, command, environment, 1024 + TORCH_MB, seconds)
        print(f"{target}: {text}", flush=True)
        if status:
            failed.append(target)
    if failed:
        print(f"findings: {', '.join(failed)}; the inputs are in fuzz/artifacts", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
