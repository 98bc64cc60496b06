"""Fast transfers of tensors between NVMe drives and memory.

``read`` and ``write`` transfer a whole tensor and wait. ``start_read`` and ``start_write`` return a :class:`Transfer`
at once. A tensor is a torch tensor, a numpy array, or any object with the buffer protocol or DLPack. A path is
``str``, ``bytes``, ``os.PathLike``, an open file descriptor or a :class:`StripeSet`. ``deepnvme.open`` returns a file
object. Failures raise :class:`Error`; :mod:`deepnvme.errors` lists its subclasses.

``save`` and ``load`` store whole states as torch archives or safetensors files. They replace files atomically and keep
checksums. ``load`` refuses code that you did not allow. A :class:`Checkpointer` saves in the background and keeps the
last checkpoints of a training run. A :class:`Swapper` keeps tensors on disk while they are not in use.

Example:
    >>> import deepnvme, torch
    >>> tensor = torch.randn(1024, 1024)
    >>> deepnvme.write(tensor, "weights.bin")
    4194304
    >>> deepnvme.read(torch.empty_like(tensor), "weights.bin")
    4194304

    >>> model = torch.nn.Linear(4, 2)
    >>> size = deepnvme.save(model.state_dict(), "model.pt")
    >>> missing = model.load_state_dict(deepnvme.load("model.pt"))

    >>> with deepnvme.Checkpointer("run", keep=3, async_=True) as checkpointer:
    ...     for step in range(10):
    ...         saved = checkpointer.save(step, {"model": model.state_dict(), "step": step})
    >>> deepnvme.Checkpointer("run").restore()["step"]
    9
"""

import importlib
from types import BuiltinFunctionType
from typing import TYPE_CHECKING

from deepnvme import errors
from deepnvme._deepnvme import (
    BackendProbe,
    Engine,
    Probe,
    Progress,
    Stats,
    StripeSet,
    Trace,
    Transfer,
    __version__,
    default_engine,
    probe,
    read,
    read_batch,
    span,
    start_read,
    start_read_batch,
    start_write,
    start_write_batch,
    stats,
    trace,
    write,
    write_batch,
)
from deepnvme._file import Reader, Writer, open  # noqa: A004 (it is one, as gzip.open is)

# Imported here and not by the first transfer: a child forked while another thread imports a module can never import it.
from deepnvme._utils import held_storages as _held_storages  # noqa: F401
from deepnvme._utils.tensors import as_bytes, pinned_empty, require_torch
from deepnvme.errors import EndOfFileError, Error

if TYPE_CHECKING:
    from deepnvme import deepspeed as deepspeed
    from deepnvme import integrations as integrations
    from deepnvme import nn as nn
    from deepnvme import optim
    from deepnvme._checkpoint.checkpoint import Checkpoint
    from deepnvme._checkpoint.checkpointer import Checkpointer
    from deepnvme._checkpoint.load import load
    from deepnvme._checkpoint.save import save
    from deepnvme._checkpoint.save_start import CheckpointerStats
    from deepnvme._commands import CommandResult, bench, convert, inspect, pack, report, tune, verify
    from deepnvme._offload import (
        ActivationOffload,
        ActivationStats,
        OffloadPlan,
        ParameterOffload,
        PartPlan,
        Spilled,
        offload,
        offload_activations,
        offload_parameters,
        spill,
    )
    from deepnvme._rows import Gather, RowStats, RowStore
    from deepnvme._stream import Streaming, StreamStats, stream
    from deepnvme._swap import Borrowed, Swapper, SwapStats

__all__ = [
    "ActivationOffload",
    "ActivationStats",
    "BackendProbe",
    "Borrowed",
    "Checkpoint",
    "Checkpointer",
    "CheckpointerStats",
    "CommandResult",
    "EndOfFileError",
    "Engine",
    "Error",
    "Gather",
    "OffloadPlan",
    "ParameterOffload",
    "PartPlan",
    "Probe",
    "Progress",
    "Reader",
    "RowStats",
    "RowStore",
    "Spilled",
    "Stats",
    "StreamStats",
    "Streaming",
    "StripeSet",
    "SwapStats",
    "Swapper",
    "Trace",
    "Transfer",
    "Writer",
    "__version__",
    "as_bytes",
    "bench",
    "convert",
    "default_engine",
    "errors",
    "inspect",
    "load",
    "offload",
    "offload_activations",
    "offload_parameters",
    "open",
    "optim",
    "pack",
    "pinned_empty",
    "probe",
    "read",
    "read_batch",
    "report",
    "save",
    "span",
    "spill",
    "start_read",
    "start_read_batch",
    "start_write",
    "start_write_batch",
    "stats",
    "stream",
    "trace",
    "tune",
    "verify",
    "write",
    "write_batch",
]

# Imported on first use, so that a program that only reads and writes tensors does not wait for them.
_MODULES = ("deepspeed", "errors", "integrations", "nn", "optim")
_LAZY = {
    "ActivationOffload": "_offload",
    "ActivationStats": "_offload",
    "Checkpoint": "_checkpoint.checkpoint",
    "Checkpointer": "_checkpoint.checkpointer",
    "CheckpointerStats": "_checkpoint.save_start",
    "CommandResult": "_commands",
    "Borrowed": "_swap",
    "Gather": "_rows",
    "OffloadPlan": "_offload",
    "ParameterOffload": "_offload",
    "PartPlan": "_offload",
    "RowStats": "_rows",
    "RowStore": "_rows",
    "Spilled": "_offload",
    "StreamStats": "_stream",
    "Streaming": "_stream",
    "SwapStats": "_swap",
    "Swapper": "_swap",
    "bench": "_commands",
    "convert": "_commands",
    "inspect": "_commands",
    "load": "_checkpoint.load",
    "offload": "_offload",
    "offload_activations": "_offload",
    "offload_parameters": "_offload",
    "pack": "_commands",
    "report": "_commands",
    "save": "_checkpoint.save",
    "spill": "_offload",
    "stream": "_stream",
    "tune": "_commands",
    "verify": "_commands",
}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(f"deepnvme.{name}")
    if name in _LAZY:
        try:
            module = importlib.import_module(f"deepnvme.{_LAZY[name]}")
        except ModuleNotFoundError as error:
            if error.name == "torch":
                require_torch(name)
            raise
        value = globals()[name] = getattr(module, name)
        return value
    msg = f"module 'deepnvme' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})


# The extension's functions belong to the package. Python's own get this name from `public`.
for _name in __all__:
    if isinstance(globals().get(_name), BuiltinFunctionType):
        globals()[_name].__module__ = "deepnvme"
