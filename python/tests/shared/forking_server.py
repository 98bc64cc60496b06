"""The process that `forked_python` starts: it imports modules, and forks for each script. Standard library only."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

# A request carries a script's environment, and its code if it has no file.
MESSAGE_BYTES_MAX = 1 << 20


def import_all(names: list[str]) -> None:
    """Import modules, except those of packages that are not installed."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def serve(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Answer requests. Returns in forks only: the request, and descriptors for stdout and stderr."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES_MAX, 2)
        if not message:
            os._exit(0)
        request = json.loads(message)
        answer: Any
        if "wait" in request:
            _, status, usage = os.wait4(request["wait"], 0)
            answer = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, time.time()]
        elif "is_running" in request:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            answer = os.waitid(os.P_PID, request["is_running"], options) is None
        else:
            answer = os.fork()
            if answer == 0:
                client.close()
                return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        client.send(json.dumps(answer).encode())


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Give this process what a new interpreter would have."""
    signal.alarm(request["seconds"])  # one that hangs ends
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    # The alarm says where it hangs, and then ends the process as before.
    faulthandler.register(signal.SIGALRM, file=2, all_threads=True, chain=True)
    sys.stdin = open(0)  # noqa: SIM115
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]  # the folder that it has found before
    sys.argv[:] = request["arguments"]
    sys.path[0] = os.path.dirname(sys.argv[0])  # noqa: PTH120


def run(*, source: str | None, ends_fully: bool) -> None:
    """Run a script as the module ``__main__``. Only a new module is taken apart at the end, since it is not frozen."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    names = vars(main)
    if source is None:
        names["__file__"] = sys.argv[0]
        code = compile(Path(sys.argv[0]).read_bytes(), sys.argv[0], "exec", dont_inherit=True)
    else:
        code = compile(source, "<string>", "exec", dont_inherit=True)
    if ends_fully:
        exec(code, names)
        return
    status: Any = 0
    try:
        exec(code, names)
    except SystemExit as error:
        status = error.code or 0
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    # As an interpreter ends, but without taking all modules apart, which takes one or two seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    number, imports = int(sys.argv[1]), json.loads(sys.argv[2])
    usual = [*sys.path]
    sys.path += imports["path"]
    import_all(imports["modules"])
    gc.collect()
    gc.freeze()  # collections of a fork leave these objects alone
    import_all(imports["later"])
    sys.path[:] = usual
    request, descriptors = serve(socket.socket(fileno=number))
    become(request, descriptors)
    run(source=request["source"], ends_fully=request["ends_fully"])
