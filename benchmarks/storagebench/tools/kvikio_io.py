"""kvikio in compatibility mode: its thread pool over POSIX calls, direct where possible."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.sync import fsync
from storagebench.tools.base import OneCall, Tool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from common.measure import Action

THREADS = (2, 4, 8)


class KvikioIo(Tool):
    """`kvikio.CuFile` on host memory.

    Args:
        threads: size of kvikio's pool, the same for everything it does.
    """

    def __init__(self, threads: int) -> None:
        super().__init__("kvikio", "comparison")
        os.environ.setdefault("KVIKIO_COMPAT_MODE", "ON")
        _find_driver()
        import kvikio  # noqa: PLC0415
        import kvikio.defaults  # noqa: PLC0415

        self._open = kvikio.CuFile
        self.use(threads)
        self._set = kvikio.defaults.set({"auto_direct_io_read": True, "auto_direct_io_write": True})

    def use(self, threads: int) -> None:
        """Change the size of the pool; the sweep uses this."""
        import kvikio.defaults  # noqa: PLC0415

        kvikio.defaults.set({"num_threads": threads})
        self._threads = threads

    def settings(self) -> str:
        """See the base."""
        return f"num_threads={self._threads} auto_direct_io"

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self._write(source, path, "w")

    def overwrite(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return self._write(source, path, "r+")

    def _write(self, source: torch.Tensor, path: Path, mode: str) -> Action:
        array = source.numpy()

        def action() -> None:
            with self._open(path, mode) as file:
                _check(file.pwrite(array).get(), source.numel())
            fsync(path)

        return action

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        array = target.numpy()

        def action() -> None:
            with self._open(path, "r") as file:
                _check(file.pread(array).get(), target.numel())

        return action

    def write_many(self, sources: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        write = self._many(sources, offsets, path, "w", lambda file: file.pwrite)

        def action() -> None:
            write()
            fsync(path)

        return action

    def read_many(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        return self._many(targets, offsets, path, "r", lambda file: file.pread)

    def _many(
        self,
        tensors: Sequence[torch.Tensor],
        offsets: Sequence[int],
        path: Path,
        mode: str,
        transfer_of: Callable[[Any], Callable[..., Any]],
    ) -> Action:
        arrays = [tensor.numpy() for tensor in tensors]

        def action() -> None:
            with self._open(path, mode) as file:
                transfer = transfer_of(file)
                futures = [transfer(array, file_offset=at) for array, at in zip(arrays, offsets, strict=True)]
                for future in futures:
                    future.get()

        return action

    def call(self, target: torch.Tensor, path: Path) -> OneCall:
        """See the base."""
        return _Call(self._open(path, "r"), target)

    def in_flight(self, targets: Sequence[torch.Tensor], offsets: Sequence[int], path: Path) -> Action:
        """See the base."""
        return self.read_many(targets, offsets, path)


class _Call(OneCall):
    def __init__(self, file: object, target: torch.Tensor) -> None:
        self._file: object = file
        self._array = target.numpy()

    def read_at(self, offset: int) -> None:
        self._file.pread(self._array, file_offset=offset).get()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._file.close()  # type: ignore[attr-defined]


def _find_driver() -> None:
    """Load libcuda.so.1, or else the stand-in that the Makefile compiles.

    kvikio asks the driver about every pointer, so without any driver it cannot even read into host memory.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        stand_in = Path(sys.prefix) / "no-gpu" / "libcuda.so.1"
        if stand_in.exists():
            ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)


def _check(moved: int, wanted: int) -> None:
    if moved != wanted:
        raise RuntimeError(f"kvikio moved {moved} bytes instead of {wanted}")
