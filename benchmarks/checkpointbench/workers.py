"""``python -m checkpointbench.workers``: load in a new process each time.

A training or serving process loads its model once, into fresh memory. A benchmark that loads repeatedly reuses warm
memory, especially with libraries that keep their buffers. So every load runs in a child of this process, which has
only imported modules. The child first loads and touches a small file, so that imports, thread starts and page
faults of code are not measured, and then the large one.

A virtual machine may return free memory to its host. Memory that was free for some seconds is then several times as
expensive to fill, except just after another process has exited. So another child touches as much memory before each
load and exits.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from checkpointbench.tools import all_tools
from common.child import Child, attempt, serve
from common.measure import Sample, timed
from common.memory import PAGE_BYTES, touch


def sums(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the CRC-32 of each tensor's bytes."""
    return {name: zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data) for name, tensor in state.items()}


@dataclass(frozen=True)
class Job:
    """The work of a child."""

    name: str
    """The name of the tool; empty to only touch memory."""
    path: str
    """The file to load."""
    small: str
    """The small file to load before that."""
    size: int
    """Bytes of the tensors."""
    expected: dict[str, int] | None = None
    """The CRC-32 of each tensor, where they are to be compared."""
    environment: dict[str, str] = field(default_factory=dict)
    """Its environment variables, in addition to those of its parent."""


class Workers:
    """A handle of the process whose children load."""

    def __init__(self) -> None:
        self._child = Child("checkpointbench.workers")

    def touch_memory(self, size: int) -> None:
        """Have a child touch so much memory, and end."""
        self._child.ask(asdict(Job("", "", "", size)))

    def load(self, job: Job) -> Sample:
        """Have a tool load a file in a process of its own.

        Raises:
            NotOffered: the tool cannot.
            RuntimeError: it failed, or it loaded other bytes than were saved.
        """
        answer = self._child.ask(asdict(job))
        return Sample(answer["wall_s"], answer["cpu_s"], job.size)

    def close(self) -> None:
        """End it."""
        self._child.close()


def _touch_memory(size: int) -> dict[str, Any]:
    """Have the kernel give this process so many bytes of huge pages."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for start in range(0, size, PAGE_BYTES):
        memory[start] = 1
    return {}


def _load(job: Job) -> dict[str, Any]:
    os.environ.update(job.environment)
    (one,) = [one for one in all_tools() if one.name == job.name]
    # The code that touches is on the disk as well.
    touch(one.load(Path(job.small)).values())
    one.close()
    loaded: dict[str, torch.Tensor] = {}

    def run() -> None:
        loaded.update(one.load(Path(job.path)))
        touch(loaded.values())

    sample, _ = timed(run, job.size)
    if job.expected is not None and sums(loaded) != job.expected:
        return {"failed": "what was loaded is not what was saved"}
    return {"wall_s": sample.wall_s, "cpu_s": sample.cpu_s}


def _in_a_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do the work in a forked child. Returns its answer, or how it ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(attempt(work, prints=False)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    answer: dict[str, Any] = json.loads(text) if text else {"failed": f"the child ended with status {status}"}
    return answer


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    job = Job(**request)
    answer = _in_a_fork(partial(_touch_memory, job.size))
    return _in_a_fork(partial(_load, job)) if job.name else answer


def main() -> None:
    """Serve requests until there are none."""
    serve(lambda: _answer)


if __name__ == "__main__":
    main()
