"""Run the test binaries of mem and io under valgrind's memcheck. Standard library only.

    python scripts/valgrind.py [BINARY ...]

Both crates have unsafe code that runs without a GPU and without Python. Every invalid access, use of uninitialised
memory and definite leak fails the run.

Valgrind runs one thread at a time, and version 3.19 does not know that io_uring_enter can block. A thread that waits in
it for another thread waits forever. So all tests run with io_uring refused, as on a hardened kernel. Those tests of its
backend that wait only for the disk run once more with io_uring, one at a time.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ["deepnvme-mem", "deepnvme-io"]
MEMCHECK = [
    "--quiet",
    # Without it a polling thread can starve the one it waits for.
    "--fair-sched=try",
    "--error-exitcode=9",
    "--leak-check=full",
    "--show-leak-kinds=definite",
    "--errors-for-leak-kinds=definite",
]
# Excluded tests (parts of their names), each with a reason.
LEFT_OUT = {
    "a_thousand_opens": "it measures the memory of the process, which is mostly valgrind's own here",
    "more_than_the_ram": "valgrind has fewer addresses than that",
    "a_forked_child_is_": "the child ends at once, with what is its parent's",
    "a_child_drops_nothing_of_its_parent": "the child ends at once, with what is its parent's",
    "a_batch_that_is_never_reported": "it has the engine give memory up on purpose",
}
# Binary -> its tests that run with io_uring.
WITH_IO_URING = {"backend_smoke": ["transfers::", "lifetime::", "queue::a_full_queue", "queue::reap_waits"]}
# Fewer cases: valgrind is about forty times slower, and looks at memory, which all cases use alike.
ENVIRONMENT = {"PROPTEST_CASES": "4", "DEEPNVME_TEST_CASES_DIVISOR": "5"}
LIMIT_S = 600  # for one binary
# Not worth reporting: valgrind passes unknown requests on anyway, and we refuse io_uring ourselves.
HARMLESS = re.compile(
    r"--\d+-- Warning: unhandled io_(submit|getevents) opcode: 5\n|^(skipped|left out): .*io_uring.*\n", re.MULTILINE
)

IO_URING_SETUP = 425
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
EPERM = 1


def main(names: list[str]) -> int:
    """Build, run each binary, and list excluded tests. Exit status 1 if valgrind found something, or a test failed."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("skipped: valgrind is not installed; the memory check of mem and io did not run")
        return 0
    binaries = {name: path for name, path in test_binaries().items() if not names or name in names}
    skips = [word for part in LEFT_OUT for word in ("--skip", part)]
    checks = []
    for name, path in binaries.items():
        checks.append(Check(name, [valgrind, *MEMCHECK, path, "--test-threads=2", *skips], io_uring=False))
        tests = WITH_IO_URING.get(name)
        if tests:
            checks.append(Check(name, [valgrind, *MEMCHECK, path, "--test-threads=1", *tests], io_uring=True))
    failed = run(checks)
    for part, reason in LEFT_OUT.items():
        print(f"left out under valgrind: {part}: {reason}")
    if failed:
        print(f"valgrind found errors in: {', '.join(failed)}")
    return 1 if failed else 0


class Check:
    """One binary under valgrind, with or without io_uring."""

    def __init__(self, name: str, command: list[str], *, io_uring: bool) -> None:
        self.name = f"{name} {'with' if io_uring else 'without'} io_uring"
        self.command, self.io_uring = command, io_uring

    def start(self) -> None:
        """Start it, and collect its output until it ends."""
        self.output = tempfile.TemporaryFile()  # noqa: SIM115
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            self.command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=self.output,
            stderr=subprocess.STDOUT,
            preexec_fn=None if self.io_uring else refuse_io_uring,  # noqa: PLW1509 - safe: there is one thread here
        )

    def has_ended(self) -> bool:
        """Whether it has ended. A check that takes longer than LIMIT_S is killed."""
        if self.process.poll() is None and time.monotonic() - self.begin > LIMIT_S:
            self.process.kill()
            self.process.wait()
            self.output.write(f"\n{self.name} did not end within {LIMIT_S} s\n".encode())
        return self.process.poll() is not None

    def show(self) -> bool:
        """Show its output without harmless warnings.

        Return whether valgrind found nothing, and the tests passed in time.
        """
        self.output.seek(0)
        said = HARMLESS.sub("", self.output.read().decode(errors="replace")).strip()
        print(f"valgrind {self.name}\n{said}\n[{time.monotonic() - self.begin:.0f} s]\n", flush=True)
        return self.process.returncode == 0


def run(checks: list[Check]) -> list[str]:
    """Run all, one per CPU, since each runs one thread at a time. Return the names of those with findings."""
    waiting = [*checks]
    running: list[Check] = []
    failed: list[str] = []
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(waiting.pop(0))
            running[-1].start()
        time.sleep(0.05)
        for one in [one for one in running if one.has_ended()]:
            running.remove(one)
            if not one.show():
                failed.append(one.name)
    return failed


def refuse_io_uring() -> None:
    """Make io_uring_setup fail with EPERM in this process and its children, by a seccomp filter."""
    instructions = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, IO_URING_SETUP),  # if it is this one,
        (0x06, 0, 0, 0x0005_0000 | EPERM),  # return the error;
        (0x06, 0, 0, 0x7FFF_0000),  # else go on
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in instructions))
    program = ctypes.create_string_buffer(struct.pack("HL", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl refused the seccomp filter")


def test_binaries() -> dict[str, str]:
    """Return names and paths of the test binaries, and build them if necessary.

    The whole workspace is named: with other features of shared dependencies, cargo would build all of them again.
    """
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if built.returncode != 0:
        sys.exit(built.returncode)
    found = {}
    for message in map(json.loads, built.stdout.splitlines()):
        if message["reason"] != "compiler-artifact" or Path(message["manifest_path"]).parent.name not in PACKAGES:
            continue
        if message["profile"]["test"] and message["executable"]:
            found[message["target"]["name"]] = message["executable"]
    assert found, "cargo built no test binary"
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
