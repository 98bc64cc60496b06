"""The installed tools. Sweeps before the rounds find the best settings of each baseline."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from common import cache, fio, handle_setting, memory
from common.measure import timed
from storagebench import data
from storagebench.settings import PAGE_BYTES
from storagebench.sweep import Choice, best_setting
from storagebench.tools import aio_handle, deepnvme_engine, fio_job, kvikio_io
from storagebench.tools.numpy_io import NumpyIo
from storagebench.tools.python_io import PythonIo
from storagebench.tools.torch_io import TorchIo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from common.measure import Action
    from storagebench.rows.base import Bench
    from storagebench.tools.base import Tool

_SMALL_BYTES = 32 << 10


@dataclass
class Registry:
    """The tools of each group of rows, their sweeps, and the missing tools."""

    tools: list[Tool] = field(default_factory=list)
    # The group of rows of each tool that has only one.
    group_of_tool: dict[str, str] = field(default_factory=dict)
    sweeps: dict[str, dict[str, object]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, tool: Tool, only: str = "") -> None:
        """Add a tool; `only` limits it to one group of rows."""
        self.tools.append(tool)
        if only:
            self.group_of_tool[tool.name] = only

    def of(self, group: str) -> list[Tool]:
        """Return the tools for a group of rows."""
        return [one for one in self.tools if self.group_of_tool.get(one.name, group) == group]

    def add_missing(self, name: str, reason: str) -> None:
        """Record a missing tool and the reason."""
        self.missing[name] = reason
        print(f"skipped: {name}: {reason}", file=sys.stderr)

    def close(self) -> None:
        """Close all tools."""
        for one in self.tools:
            one.close()


def assemble(bench: Bench) -> Registry:
    """Return all tools that run here."""
    registry = Registry()
    _add_fio(registry, bench)
    chosen = _add_deepspeed(registry, bench)
    _add_deepnvme(registry, chosen)
    for for_comparison in (PythonIo, NumpyIo, TorchIo):
        registry.add(for_comparison())
    _add_kvikio(registry, bench)
    return registry


def _add_deepnvme(registry: Registry, chosen: aio_handle.Chosen) -> None:
    try:
        import deepnvme.deepspeed  # noqa: PLC0415
    except ImportError as error:
        registry.add_missing("deepnvme", str(error))
        return
    for backend in deepnvme_engine.BACKENDS:
        try:
            registry.add(deepnvme_engine.DeepnvmeEngine(backend))
        except OSError as error:
            registry.add_missing(f"deepnvme {backend}", str(error))
            continue
        registry.add(deepnvme_engine.DeepnvmeDescriptor(backend), only="calls")
        registry.add(deepnvme_engine.DeepnvmeOneLarge(backend), only="small")
    # The default: the first backend, with small transfers made by the calling thread.
    registry.add(deepnvme_engine.DeepnvmeEngine("auto"), only="calls")
    registry.add(deepnvme_engine.DeepnvmeDescriptor("auto"), only="calls")
    registry.add(aio_handle.AioHandle("deepnvme aio_handle", "deepnvme", deepnvme.deepspeed, chosen, pinned=True))


def _add_fio(registry: Registry, bench: Bench) -> None:
    if fio.version() is None:
        registry.add_missing("fio", "not installed (the system package fio)")
        return
    engines: tuple[fio.Engine, ...] = ("libaio", "io_uring", "io_uring-fixed")
    for engine in engines:
        _log(f"sweeping fio {engine}")
        try:
            sweeps = fio_job.sweep(engine, bench.settings, bench.scratch, bench.readable(".raw"))
        except fio.FioFailed as error:
            registry.add_missing(f"fio {engine}", str(error))
            continue
        registry.add(fio_job.FioJob(engine, sweeps))
        if engine == "libaio":
            registry.add(fio_job.FioAsMuchMemory(sweeps), only="large")
        registry.sweeps[f"fio {engine} read"] = sweeps.read.to_json()
        registry.sweeps[f"fio {engine} write"] = sweeps.write.to_json()


def _add_deepspeed(registry: Registry, bench: Bench) -> aio_handle.Chosen:
    default = handle_setting.DEFAULT_SETTING
    unswept = aio_handle.Chosen(default, default, default, default)
    if not memory.can_lock(bench.settings.large_bytes):
        # The handle aborts the process when mlock fails.
        registry.add_missing(
            "DeepSpeed", "RLIMIT_MEMLOCK is below the size of the large tensor; its handle would abort"
        )
        return unswept
    try:
        from common import deepspeed_op  # noqa: PLC0415

        op = deepspeed_op.load()
    except Exception as error:  # noqa: BLE001 - a compiler's failure has many types
        registry.add_missing("DeepSpeed", f"its op cannot be loaded: {error}")
        return unswept
    _log("sweeping DeepSpeed's handle")
    chosen = _sweep_handle(registry, bench, op, unswept)
    registry.add(aio_handle.AioHandle("DeepSpeed", "DeepSpeed", op, chosen, pinned=True))
    registry.add(
        aio_handle.AioHandle("DeepSpeed, ordinary tensors", "DeepSpeed", op, chosen, pinned=False), only="small"
    )
    return chosen


def _sweep_handle(registry: Registry, bench: Bench, op: Any, unswept: aio_handle.Chosen) -> aio_handle.Chosen:  # noqa: ANN401
    """Choose the handle's settings for large reads and writes, small tensors and single blocks."""
    settings = bench.settings
    handle = aio_handle.AioHandle("sweep", "DeepSpeed", op, unswept, pinned=True)
    readable, written = bench.readable(".raw"), bench.scratch / "sweep.raw"
    tensor = handle.pinned_copy(bench.source[: settings.sweep_bytes])
    if tensor is None:
        raise RuntimeError("DeepSpeed's handle gave no pinned memory")

    def blocks(size: int, count: int) -> tuple[list[Any], list[int]]:
        count = min(count, settings.sweep_bytes // size)
        return list(tensor[: count * size].view(count, size).unbind()), [index * size for index in range(count)]

    small, single = blocks(_SMALL_BYTES, settings.small_count), blocks(PAGE_BYTES, settings.in_flight_count)
    works: dict[str, Callable[[handle_setting.HandleSetting], Action]] = {
        "read": lambda setting: handle.read_with(setting, tensor, readable),
        "write": lambda setting: handle.write_with(setting, tensor, written),
        "small": lambda setting: handle.reads_with(setting, *small, readable),
        "in_flight": lambda setting: handle.reads_with(setting, *single, readable),
    }
    choices: dict[str, Choice[handle_setting.HandleSetting]] = {}
    for name, work in works.items():
        written.unlink(missing_ok=True)
        choices[name] = best_setting(
            handle_setting.CANDIDATES,
            lambda setting, work=work: _trial(work(setting), written),  # type: ignore[misc]
            finalists=settings.finalists,
            final_trials=settings.final_trials,
        )
        registry.sweeps[f"DeepSpeed {name}"] = choices[name].to_json()
    written.unlink(missing_ok=True)
    handle.free_pinned(tensor)
    handle.close()
    return aio_handle.Chosen(**{name: choice.best for name, choice in choices.items()})


def _add_kvikio(registry: Registry, bench: Bench) -> None:
    _log("sweeping kvikio")
    try:
        tool = kvikio_io.KvikioIo(kvikio_io.THREADS[0])
        choice = _sweep_kvikio(tool, bench)
    except (ImportError, RuntimeError) as error:
        registry.add_missing("kvikio", str(error))
        return
    tool.use(choice.best)
    registry.sweeps["kvikio threads"] = choice.to_json()
    registry.add(tool)


def _sweep_kvikio(tool: kvikio_io.KvikioIo, bench: Bench) -> Choice[int]:
    """Choose the size of kvikio's pool by cold reads."""
    size, path = bench.settings.sweep_bytes, bench.readable(".raw")
    target = data.fill(memory.pinned(size), bench.source[:size])

    def trial(threads: int) -> float:
        tool.use(threads)
        action = tool.read(target, path)
        cache.make_cold(path)
        return timed(action, size)[0].wall_s

    settings = bench.settings
    return best_setting(
        kvikio_io.THREADS,
        trial,
        finalists=settings.finalists,
        final_trials=settings.final_trials,
    )


def _trial(action: Action, written: Path) -> float:
    written.unlink(missing_ok=True)
    cache.wait_for_writeback()
    return timed(action, 0)[0].wall_s


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
