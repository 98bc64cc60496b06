"""Where addresses end just behind the stack of a thread, there is an error, and the process goes on."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

import deepnvme
from forked_child import status_of_child

HERE = Path(__file__).parent
KIB = 1024
# A stack, and what the C library puts around it: a thread fits, and nothing else does.
STEPS = [around + more for around in range(2048, 20000, 2200) for more in range(0, 600, 60)]
WORKERS = 8


def attempt(path: Path, backend: str, room: int) -> int:
    data = bytes(1 << 16)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + room, resource.RLIM_INFINITY))
    try:
        with deepnvme.Engine(workers=WORKERS, backend=backend) as engine:  # type: ignore[arg-type]
            engine.write(data, path)
    except deepnvme.Error as error:
        assert any(word in str(error) for word in ("ulimit", "memory")), error
        return 1
    return 0


def check(path: Path, backend: str) -> None:
    outcomes = set()
    for step in STEPS:
        outcomes.add(status_of_child(functools.partial(attempt, path, backend, step * KIB)))
        assert outcomes <= {0, 1}, step
    assert 1 in outcomes


@pytest.mark.parametrize("backend", ["auto", "threads"])
def test_no_thread_is_an_error(tmp_path: Path, python: Callable[..., object], backend: str) -> None:
    # In a small process: a fork of this one takes a tenth of a second.
    python(f"""
        import pathlib, sys
        sys.path[:0] = {[str(HERE), str(HERE / "shared")]!r}
        import test_few_addresses as base
        base.check(pathlib.Path({str(tmp_path)!r}) / "file", {backend!r})
    """)
