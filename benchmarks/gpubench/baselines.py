"""Other tools for tensors on a GPU, each with its best settings of a short trial."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import fio, handle_setting
from common.not_offered import NotOffered
from common.sync import sync
from gpubench.tool import Group, Place, Tool, Where, needs_torch_cuda
from gpubench.trial import best

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from common.measure import Action

_CHUNK_BYTES = 16 << 20


class PythonCopy(Tool):
    """``readinto`` a pinned tensor, and ``tensor.copy_``; plain Python, through the page cache."""

    name = "Python to pinned, then copy_"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._pinned = place.gpu.pinned(place.nbytes)
        self._view: memoryview = memoryview(self._pinned.numpy())  # type: ignore[arg-type] # it has the protocol

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""

        def action() -> None:
            at = 0
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(self._view[at : at + _CHUNK_BYTES]):
                    at += count
            self.place.gpu.fill(target, self._pinned)

        return action

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""

        def action() -> None:
            self.place.gpu.drain(self._pinned, source)
            at = 0
            with path.open("wb", buffering=0) as file:
                while at < len(self._view):
                    at += file.write(self._view[at : at + _CHUNK_BYTES])
            sync(path)

        return action


class _Tuned(Tool, ABC):
    """A tool that uses the best of several settings."""

    _candidates: Sequence[Any]

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        needs_torch_cuda(place, self.name)
        self._best: dict[str, Any] = {}

    def settings(self) -> str:
        """See the base."""
        return "; ".join(f"{verb}: {setting}" for verb, setting in self._best.items())

    def prepare_read(self, target: torch.Tensor, path: Path) -> None:
        """See the base."""
        self._best["read"] = best(self._candidates, lambda one: self._read(one, target, path), path, cold=True)

    def prepare_write(self, source: torch.Tensor, path: Path) -> None:
        """See the base."""
        self._best["write"] = best(self._candidates, lambda one: self._write(one, source, path), path, cold=False)

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self._read(self._best["read"], target, path)

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self._write(self._best["write"], source, path)

    @abstractmethod
    def _read(self, one: Any, target: torch.Tensor, path: Path) -> Action:
        """Return the read of a file with a candidate's settings."""

    @abstractmethod
    def _write(self, one: Any, source: torch.Tensor, path: Path) -> Action:
        """Return the write of a file with a candidate's settings."""


class DeepSpeed(_Tuned):
    """DeepSpeed's own ``aio_handle``, given tensors on the GPU."""

    name = "DeepSpeed aio_handle"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        os.environ.setdefault("DS_ACCELERATOR", "cuda")
        from common import deepspeed_op  # noqa: PLC0415

        self._module = deepspeed_op.load()
        self._candidates = handle_setting.CANDIDATES
        self._handles: dict[Any, Any] = {}

    def _handle(self, one: Any) -> Any:
        if one not in self._handles:
            self._handles[one] = self._module.aio_handle(
                one.block_bytes, one.queue_depth, one.single_submit, one.overlap_events, one.parallelism
            )
        return self._handles[one]

    def _read(self, one: Any, target: torch.Tensor, path: Path) -> Action:
        handle = self._handle(one)
        return lambda: _check(handle.sync_pread(target, str(path)), 1, "aio_handle")

    def _write(self, one: Any, source: torch.Tensor, path: Path) -> Action:
        handle = self._handle(one)

        def action() -> None:
            _check(handle.sync_pwrite(source, str(path)), 1, "aio_handle")
            sync(path)

        return action

    def close(self) -> None:
        """See the base."""
        self._handles.clear()


class Kvikio(_Tuned):
    """``kvikio.CuFile`` with a tensor on the GPU: GPUDirect Storage where it finds it, else its own buffers."""

    name = "kvikio"
    _candidates = (4, 8, 16)

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        _load_libkvikio()
        import kvikio  # noqa: PLC0415
        import kvikio.defaults  # noqa: PLC0415

        self._open: Any = kvikio.CuFile
        self._defaults: Any = kvikio.defaults

    def settings(self) -> str:
        """See the base."""
        mode = self._defaults.get("compat_mode")
        return f"compat_mode={mode} " + "; ".join(f"{verb}: num_threads={one}" for verb, one in self._best.items())

    def _read(self, threads: int, target: torch.Tensor, path: Path) -> Action:
        self._use(threads)

        def action() -> None:
            with self._open(path, "r") as file:
                _check(file.pread(target).get(), target.nbytes, "kvikio")

        return action

    def _write(self, threads: int, source: torch.Tensor, path: Path) -> Action:
        self._use(threads)

        def action() -> None:
            with self._open(path, "w") as file:
                _check(file.pwrite(source).get(), source.nbytes, "kvikio")
            sync(path)

        return action

    def _use(self, threads: int) -> None:
        self._defaults.set({"num_threads": threads})


def _load_libkvikio() -> None:
    """Load libkvikio and the logger that it needs, so that an error names the library that is missing.

    kvikio does the same and ignores all errors. It also skips the logger if the package cuda-pathfinder is missing.
    """
    try:
        import libkvikio  # noqa: PLC0415
    except ModuleNotFoundError:
        return  # the library belongs to the system
    try:
        import rapids_logger  # noqa: PLC0415
    except ModuleNotFoundError:
        pass
    else:
        rapids_logger.load_library()
    bundled = Path(libkvikio.__file__).parent / "lib64" / "libkvikio.so"
    if bundled.is_file():
        ctypes.CDLL(str(bundled))


class Fio(Tool):
    """fio from and to at most 64 MiB of its own host memory: the disk's own limit."""

    name = "fio, host memory"
    group: Group = "fio"
    where: Where = "none"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        if fio.version() is None:
            raise NotOffered("fio is not installed")
        engines: tuple[fio.Engine, ...] = ("io_uring", "libaio")
        sizes = ((512 << 10, 32), (1 << 20, 64))
        self._candidates = [fio.FioSetting(engine, *size, huge=False) for engine in engines for size in sizes]
        self._best: dict[str, fio.FioSetting] = {}

    def settings(self) -> str:
        """See the base."""
        return "; ".join(f"{verb}: {setting}" for verb, setting in self._best.items())

    def prepare_read(self, target: Any, path: Path) -> None:
        """See the base."""
        self._choose("read", path)

    def prepare_write(self, source: Any, path: Path) -> None:
        """See the base."""
        self._choose("write", path)

    def _choose(self, verb: Any, path: Path) -> None:
        speeds: dict[fio.FioSetting, float] = {}
        failure: Exception | None = None
        for one in self._candidates:
            try:
                speeds[one] = fio.transfer(one, verb, path, self.place.nbytes).gb_per_s
            except fio.FioFailed as error:
                # An engine that containers forbid.
                failure = error
        if not speeds:
            raise failure or NotOffered("fio has no setting to try")
        self._best[verb] = max(speeds, key=lambda one: speeds[one])

    def read(self, target: Any, path: Path) -> Action:
        """See the base."""
        return lambda: fio.transfer(self._best["read"], "read", path, self.place.nbytes)

    def write(self, source: Any, path: Path) -> Action:
        """See the base."""
        return lambda: fio.transfer(self._best["write"], "write", path, self.place.nbytes)


def _check(moved: int, wanted: int, who: str) -> None:
    if moved != wanted:
        raise RuntimeError(f"{who} returned {moved} instead of {wanted}")
