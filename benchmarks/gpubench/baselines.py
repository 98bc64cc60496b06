"""Other tools for tensors on a GPU, each with its best settings of a short trial."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from common import cache, fio, handle_setting
from common.not_offered import NotOffered
from common.sync import sync
from gpubench.tool import Group, Setup, Tool, Where, needs_torch_cuda
from gpubench.trial import best

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from common.measure import Action

_CHUNK_BYTES = 16 << 20


class PythonCopy(Tool):
    """``readinto`` a pinned tensor, and ``tensor.copy_``; plain Python, through the page cache."""

    name = "Python to pinned, then copy_"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._pinned = setup.gpu.pinned(setup.nbytes)
        self._view: memoryview = memoryview(self._pinned.numpy())  # type: ignore[arg-type] # it has the protocol

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        # The bytes of the round before must not pass for those of this one.
        self._pinned.fill_(0xA5)

        def action() -> None:
            at = 0
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(self._view[at : at + _CHUNK_BYTES]):
                    at += count
            _check(at, len(self._view), self.name)
            self.setup.gpu.fill(target, self._pinned)

        return action

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""

        def action() -> None:
            self.setup.gpu.drain(self._pinned, source)
            at = 0
            with path.open("wb", buffering=0) as file:
                while at < len(self._view):
                    at += file.write(self._view[at : at + _CHUNK_BYTES])
            sync(path)

        return action


class _Tuned(Tool, ABC):
    """A tool that uses the best of several settings."""

    _candidates: Sequence[Any]

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._best: dict[str, Any] = {}

    def settings(self) -> str:
        """See the base."""
        return "; ".join(f"{verb}: {setting}" for verb, setting in self._best.items())

    def prepare_read(self, target: Any, path: Path, make_cold: Callable[[], None]) -> None:
        """See the base."""
        self._best["read"] = best(self._candidates, lambda one: self._read(one, target, path), make_cold)

    def prepare_write(self, source: Any, path: Path) -> None:
        """See the base."""

        def remove_file() -> None:
            path.unlink(missing_ok=True)
            cache.wait_for_writeback()

        self._best["write"] = best(self._candidates, lambda one: self._write(one, source, path), remove_file)

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

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        needs_torch_cuda(setup, self.name)
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

    def prepare_read(self, target: Any, path: Path, make_cold: Callable[[], None]) -> None:
        """See the base."""
        super().prepare_read(target, path, make_cold)
        self._close_unused()

    def prepare_write(self, source: Any, path: Path) -> None:
        """See the base."""
        super().prepare_write(source, path)
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the handles, with their threads, of the settings that lost."""
        self._handles = {one: handle for one, handle in self._handles.items() if one in self._best.values()}

    def close(self) -> None:
        """See the base."""
        self._handles.clear()


class Kvikio(_Tuned):
    """``kvikio.CuFile`` with a tensor on the GPU: GPUDirect Storage where it finds it, else its own buffers."""

    name = "kvikio"
    _candidates = (4, 8, 16)

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        needs_torch_cuda(setup, self.name)
        _load_libkvikio()
        import kvikio  # noqa: PLC0415
        import kvikio.defaults  # noqa: PLC0415

        self._file_type: Any = kvikio.CuFile
        self._defaults: Any = kvikio.defaults

    def settings(self) -> str:
        """See the base."""
        mode = self._defaults.get("compat_mode")
        return f"compat_mode={mode} " + "; ".join(f"{verb}: num_threads={one}" for verb, one in self._best.items())

    def _read(self, threads: int, target: torch.Tensor, path: Path) -> Action:
        self._use(threads)

        def action() -> None:
            with self._file_type(path, "r") as file:
                _check(file.pread(target).get(), target.nbytes, "kvikio")

        return action

    def _write(self, threads: int, source: torch.Tensor, path: Path) -> Action:
        self._use(threads)

        def action() -> None:
            with self._file_type(path, "w") as file:
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


class Fio(_Tuned):
    """fio from and to at most 64 MiB of its own host memory: the disk's own limit."""

    name = "fio, host memory"
    group: Group = "fio"
    where: Where = "none"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if fio.version() is None:
            raise NotOffered("fio is not installed")
        engines: tuple[fio.Engine, ...] = ("io_uring", "libaio")
        sizes = ((512 << 10, 32), (1 << 20, 64))
        self._candidates = [fio.FioSetting(engine, *size, huge=False) for engine in engines for size in sizes]

    def prepare_read(self, target: Any, path: Path, make_cold: Callable[[], None]) -> None:
        """See the base. fio's own times count, and it reads directly."""
        self._best["read"] = self._fastest("read", path)

    def prepare_write(self, source: Any, path: Path) -> None:
        """See the base. fio's own times count."""
        self._best["write"] = self._fastest("write", path)

    def _fastest(self, verb: Literal["read", "write"], path: Path) -> fio.FioSetting:
        def speed(one: fio.FioSetting) -> float:
            return fio.transfer(one, verb, path, self.setup.nbytes).gb_per_s

        speeds: dict[fio.FioSetting, float] = fio.measure_settings(self._candidates, speed)
        return fio.fastest(speeds)

    def _read(self, one: fio.FioSetting, target: Any, path: Path) -> Action:
        return lambda: fio.transfer(one, "read", path, self.setup.nbytes)

    def _write(self, one: fio.FioSetting, source: Any, path: Path) -> Action:
        return lambda: fio.transfer(one, "write", path, self.setup.nbytes)


def _check(moved: int, wanted: int, who: str) -> None:
    if moved != wanted:
        raise RuntimeError(f"{who} returned {moved} instead of {wanted}")
