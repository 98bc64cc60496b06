"""The end of the interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


def test_exit_finishes_requests_in_flight(python: Run, tmp_path: Path) -> None:
    python("""
        import deepnvme
        engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
        kept = engine.start_write(b"k" * (16 << 20), "kept")
        engine.start_write(b"d" * (8 << 20), "dropped")
        del engine
        deepnvme.start_write(b"e" * (8 << 20), "default")
    """)
    for name, byte, size in (("kept", b"k", 16 << 20), ("dropped", b"d", 8 << 20), ("default", b"e", 8 << 20)):
        content = (tmp_path / name).read_bytes()
        # A comparison of the contents would print them.
        assert (len(content), content.count(byte)) == (size, size), name


def test_exit_warns_of_unseen_failures(python: Run) -> None:
    ended = python(
        """
        import deepnvme
        deepnvme.write(b"12345", "file")
        deepnvme.start_read(bytearray(10), "file")
        kept = deepnvme.start_read(bytearray(11), "file")
        """,
        options=("-W", "always"),
    )
    assert ended.stderr.count("the error of a dropped request was never retrieved") == 2, ended.stderr


def test_exit_with_daemon_threads_at_work(python: Run) -> None:
    for _ in range(5):
        python("""
            import threading
            import deepnvme
            deepnvme.write(bytes(1 << 20), "file")
            working = threading.Semaphore(0)

            def work(start):
                target = bytearray(1 << 20)
                while True:
                    start(target, "file")
                    working.release()

            for start in (deepnvme.read, lambda *arguments: deepnvme.start_read(*arguments).result()) * 2:
                threading.Thread(target=work, args=(start,), daemon=True).start()
            for _ in range(20):
                working.acquire()
        """)


def test_exit_discards_unfinished_files(python: Run, tmp_path: Path) -> None:
    ended = python(
        """
        import deepnvme
        file = deepnvme.open("file", "wb")
        file.write(bytes(20_000_000))
        cycle = [deepnvme.open("other", "wb")]
        cycle.append(cycle)
        cycle[0].write(b"x")
        del cycle
        """,
        options=("-W", "always"),
    )
    assert list(tmp_path.iterdir()) == []
    assert ended.stderr.count("discarded") == 2, ended.stderr


@pytest.mark.parametrize(("end", "status"), [("SystemExit(3)", 3), ("KeyError", 1)])
def test_exit_after_sys_exit_and_exceptions(python: Run, tmp_path: Path, end: str, status: int) -> None:
    python(f"import deepnvme\ndeepnvme.start_write(b'x' * (1 << 20), 'file')\nraise {end}", status=status)
    content = (tmp_path / "file").read_bytes()
    assert (len(content), content.count(b"x")) == (1 << 20, 1 << 20)


def test_calls_in_other_exit_functions(python: Run, tmp_path: Path) -> None:
    # An error in an exit function does not change the status.
    ended = python("""
        import atexit
        def late():
            assert deepnvme.write(b"12345", "late") == 5
            with deepnvme.open("later", "wb") as file:
                file.write(b"12345")
        atexit.register(late)
        import deepnvme
        deepnvme.write(b"x", "file")
    """)
    assert ended.stderr == ""
    for name in ("late", "later"):
        assert (tmp_path / name).read_bytes() == b"12345", name


def test_a_finalizer_after_the_end_of_imports_gets_a_clear_error(python: Run, tmp_path: Path) -> None:
    # The last reference to it is a global, which Python drops when nothing can be imported any more.
    pytest.importorskip("torch")
    done = python("""
        import sys, torch, deepnvme
        from deepnvme import optim

        parameter = torch.nn.Parameter(torch.ones(10))
        optimizer = optim.AdamW([parameter], swap_dir=".", memory="4MiB")
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
        state = {"a": torch.ones(10)}
        deepnvme.save(state, "first.pt")
        deepnvme.load("first.pt")
        checkpointer = deepnvme.Checkpointer("run")
        checkpointer.save(1, state)
        calls = {
            "save": lambda: deepnvme.save(state, "new.pt"),
            "save safetensors": lambda: deepnvme.save(state, "new.safetensors"),
            "load": lambda: deepnvme.load("first.pt"),
            "save of a Checkpointer": lambda: checkpointer.save(2, state),
            "restore": lambda: checkpointer.restore(),
            "save_state": lambda: optimizer.save_state("new"),
            "read": lambda: deepnvme.read(state["a"], "first.pt"),
        }

        class Last:
            def __init__(self):
                self.names = sys, calls
            def __del__(self):
                sys, calls = self.names
                assert sys.meta_path is None
                for name, call in calls.items():
                    try:
                        call()
                        result = "no error"
                    except Exception as error:
                        result = f"{type(error).__name__}: {error}"
                    sys.stdout.write(f"{name}: {result}\\n")

        last = Last()
    """)
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done
    # It needs no module.
    assert lines.pop() == "read: no error"
    assert [line for line in lines if "ClosedError: " not in line] == []
    assert sum("the interpreter is ending" in line for line in lines) == 5, lines
    assert not list(tmp_path.glob("new*"))
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001.pt"]
