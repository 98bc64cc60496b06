"""What all tests of the Python face share."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest

# Before torch is imported, and for all processes that tests start: threads that wait for work by spinning take the
# CPUs from whatever else is running, and tests then last many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if sys.dont_write_bytecode and sys.prefix != sys.base_prefix:
    # The installers write none, and torch and transformers are thousands of files: compiling them is half of an import.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(sys.prefix) / "pycache")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import deepnvme
from hang_watch import pytest_configure, pytest_runtest_protocol, pytest_unconfigure

if TYPE_CHECKING:
    from forked_python import ForkedPython

__all__ = ["pytest_configure", "pytest_runtest_protocol", "pytest_unconfigure"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs deaf to Ctrl-C, and they pass that on to their children; the tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Limit of a test's child processes and threads.
CHILD_S = 200


def in_forked_child() -> None:
    """Let no child outlive its test, nor wait for threads of OpenMP, which do not survive a fork."""
    signal.alarm(CHILD_S)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=in_forked_child)


def pytest_collection_finish() -> None:
    """Let collections of garbage leave alone the modules that tests have imported, which takes each 0.3 s less."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Remove Hypothesis's clock of the collector: an interrupt that arrives in it is lost, and fails the test."""
    gc.callbacks[:] = [call for call in gc.callbacks if not getattr(call, "__module__", "").startswith("hypothesis")]


BACKENDS = ("io_uring", "aio", "threads")


@pytest.fixture
def random_bytes() -> Callable[[int], bytes]:
    """Bytes that differ at every call and are the same in every run."""
    generator = np.random.default_rng(20260917)

    def make(count: int) -> bytes:
        return generator.bytes(count)

    return make


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[deepnvme.Engine]:
    """An engine of each backend, small enough that tests cross its blocks and its pool."""
    try:
        engine = deepnvme.Engine(backend=request.param, workers=2, queue_depth=4, block_bytes=16384)
    except deepnvme.errors.UnsupportedError as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    with engine:
        yield engine


@pytest.fixture
def unmount() -> Callable[[Path], None]:
    """Unmount a test's own file system: the kernel lets go of a cancelled request's file after it reported its end."""

    def call(folder: Path) -> None:
        for _ in range(200):
            if subprocess.run(["umount", folder], capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.02)
        # Under load, that moment has lasted for seconds; each user of the folder keeps it to itself.
        subprocess.run(["umount", "--lazy", folder], check=True)

    return call


class FileSystems:
    """Makes small file systems of a test's own on loop devices, or in memory; the test is skipped where it cannot."""

    def __init__(self, folder: Path, unmount: Callable[[Path], None]) -> None:
        self._base, self._unmount = folder, unmount
        self._mounted: list[Path] = []

    @property
    def image(self) -> Path:
        """The file that the last one lies in."""
        return self._base / f"image-{len(self._mounted)}"

    def mount(self, kind: str, mib: int) -> Path:
        """Make one of that kind and size, and give the folder where it is."""
        if os.geteuid() != 0:
            pytest.skip("mounting a file system takes root")
        folder = self._base / f"disk-{len(self._mounted) + 1}"
        folder.mkdir()
        self._mounted.append(folder)
        if kind == "tmpfs":
            _run("mount", "-t", "tmpfs", "-o", f"size={mib}m", "none", folder)
            return folder
        with self.image.open("wb") as file:
            file.truncate(mib << 20)
        _run(f"mkfs.{kind}", "-q", self.image)
        _run("mount", "-o", "loop", self.image, folder)
        return folder

    def close(self) -> None:
        """Take all away."""
        for folder in self._mounted:
            if folder.is_mount():
                self._unmount(folder)


def _run(*command: str | Path) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    if ended.returncode:
        pytest.skip(f"no file system of our own: {command[0]}: {ended.stderr.strip()}")


@pytest.fixture
def file_systems(tmp_path: Path, unmount: Callable[[Path], None]) -> Iterator[FileSystems]:
    """Make file systems that are gone after the test."""
    made = FileSystems(tmp_path, unmount)
    yield made
    made.close()


@pytest.fixture(scope="session")
def threads() -> Callable[[int], AbstractContextManager[None]]:
    """Give what has torch compute with so many threads for a ``with`` block."""

    @contextmanager
    def limit(count: int) -> Iterator[None]:
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(count)
        yield
        torch.set_num_threads(before)

    return limit


@pytest.fixture
def in_threads() -> Callable[[Callable[[int], object], int], None]:
    """Run work in several threads at once, which get 0, 1, 2 and so on. Raises the first failure."""

    def run(work: Callable[[int], object], count: int) -> None:
        failures: list[BaseException] = []

        def attempt(number: int) -> None:
            try:
                work(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=attempt, args=(number,), daemon=True) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(CHILD_S)
            assert not thread.is_alive(), "threads wait for each other"
        if failures:
            raise failures[0]

    return run


@pytest.fixture
def slow_engine() -> Iterator[deepnvme.Engine]:
    """An engine that needs a system call for every 4 KiB, one after the other: some MiB are seconds of work."""
    with deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096) as engine:
        yield engine


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run a program in a process of its own, in an empty folder; it must end by itself, and in time."""

    def run(program: str, *, status: int = 0, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, *options, "-c", textwrap.dedent(program)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=CHILD_S, check=False)
        assert ended.returncode == status, f"status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended

    return run


@pytest.fixture
def forked() -> "ForkedPython":
    """Run scripts in forks of a process that has imported torch and transformers."""
    from forked_python import with_torch

    return with_torch()


@pytest.fixture
def python_fork(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, forked: "ForkedPython"
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run a program as ``python`` does, for two seconds less, in a fork of a process that has imported torch.

    Not for tests of imports, or of the end of an interpreter, which is shorter here.
    """

    def run(
        program: str, *arguments: object, status: int = 0, environment: dict[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        files = tmp_path_factory.mktemp("fork")
        script, stdout, stderr = files / "script.py", files / "stdout", files / "stderr"
        script.write_text(textwrap.dedent(program))
        pid = forked.start(
            script,
            *map(str, arguments),
            folder=tmp_path,
            environment=os.environ | (environment or {}),
            stdout=stdout,
            stderr=stderr,
            seconds=CHILD_S,
        )
        ended = forked.wait(pid).status
        said, errors = stdout.read_text(), stderr.read_text()
        # A summary of failures shows the first line of the message.
        assert ended == status, f"status {ended}: {(errors.splitlines() or [''])[-1]}\n{said}\n{errors}"
        return subprocess.CompletedProcess([str(script)], ended, said, errors)

    return run


class Points:
    """How many points of a block were passed."""

    count = 0


@pytest.fixture
def interrupted() -> Callable[..., AbstractContextManager[Points]]:
    """Raise ``KeyboardInterrupt`` at the point of that number in the package's own code; at none, only count them.

    CPython looks for signals where a function begins and where a call into native code has ended. Those are the points,
    and the moments before native calls, except those that undo something: in a ``finally`` no signal comes before them.
    """
    undo = ("release", "_release", "_set_grad_enabled", "__exit__")
    ours = (str(Path(deepnvme.__file__).parent), contextlib.__file__)

    @contextmanager
    def call(at: int = 0) -> Iterator[Points]:
        points = Points()

        def look(frame: FrameType, event: str, argument: object) -> None:
            if event == "c_call" and getattr(argument, "__name__", "") in undo:
                return
            if event in ("call", "c_call", "c_return") and frame.f_code.co_filename.startswith(ours):
                points.count += 1
                if points.count == at:
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(look)
        try:
            yield points
        finally:
            sys.setprofile(before)

    return call
