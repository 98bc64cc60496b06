"""Run Python scripts in forks of a process that has imported what they need. Standard library only.

A new interpreter takes 2 to 6 s of CPU time to import torch or transformers; a fork already has them. Each script
gets its own process, folder, environment and output. A test of imports, of variables that an import reads, or of the
end of a process needs a new interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

# The environment variables that imports read.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

SERVER = """
import gc, importlib, json, os, signal, sys

def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status, usage = os.wait4(request["wait"], 0)
            answer = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
        else:
            answer = os.fork()
            if answer == 0:
                return request
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)

def become(request):
    signal.alarm(request["seconds"])  # one that hangs ends
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    answers.close()
    for number, path in enumerate((os.devnull, request["stdout"], request["stderr"])):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0)
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # the folder that it has found before
    sys.argv[:] = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])

def run():
    # Names of this module are gone once it is the script's.
    import atexit, os, sys, threading, traceback
    with open(sys.argv[0], "rb") as file:
        code = compile(file.read(), sys.argv[0], "exec")
    of_a_script = {"__name__": "__main__", "__file__": sys.argv[0], "__builtins__": __builtins__, "__spec__": None}
    names = globals()
    names.clear()
    names.update(of_a_script)
    status = 0
    try:
        exec(code, names)
    except SystemExit as error:
        status = error.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    # As an interpreter ends, but without taking all modules apart, which takes one or two seconds.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for name in sys.argv[1:]:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # collections of a fork leave these objects alone
answers = os.fdopen(os.dup(1), "w")
become(serve())
run()
"""


class ForkedPython:
    """A process that forks for each script.

    Args:
        modules: to import. A module whose package is not installed is left out.
    """

    def __init__(self, *modules: str) -> None:
        found = [name for name in modules if importlib.util.find_spec(name.partition(".")[0]) is not None]
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, *found],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        script: Path,
        *arguments: str,
        folder: Path,
        environment: dict[str, str],
        stdout: Path,
        stderr: Path,
        seconds: int,
    ) -> int:
        """Start a script, which is killed after some seconds. Its output is appended to files. Returns its pid."""
        paths = {"folder": folder, "stdout": stdout, "stderr": stderr}
        request: dict[str, Any] = {name: str(path.absolute()) for name, path in paths.items()}
        request |= {"arguments": [str(script.absolute()), *arguments], "environment": environment, "seconds": seconds}
        return int(self._ask(request))

    def wait(self, process: int) -> tuple[int, float]:
        """Wait until a script ends. Returns its status and the seconds of CPU time, its children's included."""
        status, seconds = self._ask({"wait": process})
        return status, seconds

    def close(self) -> None:
        """End the process. Scripts that still run go on."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())
