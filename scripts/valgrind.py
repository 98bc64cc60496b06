"""Run the test binaries of mem and io under valgrind's memcheck. Standard library only.

    python scripts/valgrind.py

The crates with unsafe code are the ones worth it. Every invalid access, use of uninitialised memory, and definite
leak fails the run. Left out, by name, is what valgrind cannot see through or what would take hours at its speed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["deepnvme-mem", "deepnvme-io"]
MEMCHECK = [
    "--quiet",
    "--error-exitcode=9",
    "--leak-check=full",
    "--show-leak-kinds=definite",
    "--errors-for-leak-kinds=definite",
    f"--suppressions={ROOT / 'scripts' / 'valgrind.supp'}",
]
# Test names (parts of them) that do not run here, each with its reason.
LEFT_OUT: dict[str, str] = {}
# Fewer cases of the property tests: valgrind is some forty times slower.
ENVIRONMENT = {"PROPTEST_CASES": "8"}


def main() -> int:
    """Build, run each binary, say what was left out; 1 when valgrind found something."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("skipped: valgrind is not installed; the memory check of mem and io did not run")
        return 0
    failed = []
    for name, binary in test_binaries():
        skips = [word for part in LEFT_OUT for word in ("--skip", part)]
        command = [valgrind, *MEMCHECK, str(binary), "--test-threads=2", *skips]
        print(f"valgrind {name}", flush=True)
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **ENVIRONMENT}, check=False).returncode != 0:
            failed.append(name)
    for part, reason in LEFT_OUT.items():
        print(f"left out under valgrind: {part}: {reason}")
    if failed:
        print(f"valgrind found errors in: {', '.join(failed)}")
    return 1 if failed else 0


def test_binaries() -> list[tuple[str, Path]]:
    """Build the test binaries as `cargo test` does and return their names and paths."""
    packages = [word for package in PACKAGES for word in ("--package", package)]
    command = ["cargo", "test", "--no-run", "--message-format=json-render-diagnostics", *packages]
    messages = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = []
    for line in messages.splitlines():
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["profile"]["test"] and message["executable"]:
            found.append((message["target"]["name"], Path(message["executable"])))
    assert found, "cargo built no test binary"
    return found


if __name__ == "__main__":
    sys.exit(main())
