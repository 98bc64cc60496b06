"""Run Python scripts in forks of a process that has imported what they need. Standard library only.

A new interpreter takes 2 to 6 s of CPU time to import torch or transformers; a fork already has them. Each script
gets its own process, folder, environment and output. A test of imports, or of variables that an import reads, needs a
new interpreter.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from forking_server import MESSAGE_BYTES_MAX

# The environment variables that imports read.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
SERVER = Path(__file__).with_name("forking_server.py")


class End(NamedTuple):
    """How a script ended: its status, its seconds of CPU time with its children's, and the time of day in seconds."""

    status: int
    cpu_s: float
    at_s: float


class ForkedPython:
    """A process that forks for each script.

    Args:
        *modules: to import. A module whose package is not installed is left out. A script's collections of garbage
            leave their objects alone.
        later: modules to import after those, whose objects are collected as usual.
        path: folders to import from, besides the usual ones. Scripts cannot import from them.
    """

    def __init__(self, *modules: str, later: tuple[str, ...] = (), path: tuple[Path, ...] = ()) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        imports = {"modules": modules, "later": later, "path": [str(folder) for folder in path]}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, SERVER, str(theirs.fileno()), json.dumps(imports)],
                env=os.environ | ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    @property
    def is_alive(self) -> bool:
        """Whether it can start scripts."""
        return self._process.poll() is None

    def start(
        self,
        script: Path | str,
        *arguments: str,
        folder: Path,
        environment: dict[str, str],
        stdout: Path | int,
        stderr: Path | int,
        seconds: int,
        ends_fully: bool = False,
    ) -> int:
        """Start a script, which is killed after some seconds. Returns its pid.

        Args:
            script: its file, or its code.
            *arguments: its arguments.
            folder: its current folder.
            environment: all its environment variables.
            stdout: a file that its output is appended to, or a descriptor.
            stderr: the same for its errors.
            seconds: its limit.
            ends_fully: whether the interpreter ends as usual. Otherwise it takes no modules apart, which is faster.
        """
        is_code = isinstance(script, str)
        request = {
            "arguments": ["-c" if isinstance(script, str) else str(script.absolute()), *arguments],
            "source": script if is_code else None,
            "folder": str(folder.absolute()),
            "environment": environment,
            "seconds": seconds,
            "ends_fully": ends_fully,
        }
        descriptors = [_opened(output) for output in (stdout, stderr)]
        try:
            return int(self._ask(request, descriptors))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def is_running(self, pid: int) -> bool:
        """Whether a script that nobody has waited for still runs."""
        return bool(self._ask({"is_running": pid}))

    def wait(self, pid: int) -> End:
        """Wait until a script ends."""
        return End(*self._ask({"wait": pid}))

    def close(self) -> None:
        """End the process. Scripts that still run go on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, request: dict[str, Any], descriptors: list[int] | None = None) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors or [])
        return json.loads(self._socket.recv(MESSAGE_BYTES_MAX))


def _opened(output: Path | int) -> int:
    if isinstance(output, int):
        return os.dup(output)
    return os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


_with_torch: list[ForkedPython] = []


def with_torch() -> ForkedPython:
    """Return the one process of this run that has imported torch and transformers. The first call starts it."""
    # `hang_watch` may have killed it with the scripts of a test that hung.
    if not _with_torch or not _with_torch[-1].is_alive:
        made = ForkedPython(
            "pytest",
            "torch.distributed.checkpoint.state_dict",
            # Optimizers of torch import it at their first step, which takes longer than torch itself.
            "torch._dynamo",
            "transformers.models.llama.modeling_llama",
        )
        _with_torch.append(made)
        atexit.register(made.close)
    return _with_torch[-1]
