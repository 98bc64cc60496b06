"""Tensors between NVMe and memory, at the speed of the disk.

``read`` and ``write`` move a whole tensor and wait; ``start_read`` and ``start_write`` return a :class:`Pending` at
once. A tensor is a torch tensor in host memory, a numpy array, or anything with the buffer protocol or DLPack. A path
is ``str``, ``bytes``, ``os.PathLike``, an open file descriptor or a :class:`StripeSet`. ``deepnvme.open`` is a file for
code that wants one. What goes wrong is an exception: :class:`Error`, see :mod:`deepnvme.errors`.

``save`` and ``load`` are for whole states, in the files of torch and safetensors: replaced at once, with checksums, and
never running code. A :class:`Checkpointer` keeps the last ones of a training run, and saves them in the background.
A :class:`Swapper` has tensors that stay on disk while nobody uses them.

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
from typing import TYPE_CHECKING

from deepnvme import errors
from deepnvme._deepnvme import (
    BackendProbe,
    Engine,
    Pending,
    Probe,
    Progress,
    Stats,
    StripeSet,
    Trace,
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
from deepnvme._tools import CommandResult, bench, report, tune

# Now, and not in the first transfer of a tensor: a child that is forked while another thread imports a module can never
# import it.
from deepnvme._utils import held_storages as _held_storages  # noqa: F401
from deepnvme._utils.tensors import as_bytes, pinned_empty
from deepnvme.errors import EndOfFileError, Error

if TYPE_CHECKING:
    from deepnvme import optim
    from deepnvme._checkpoint import Checkpoint, Checkpointer, CheckpointerStats, load, save
    from deepnvme._stream import Streaming, StreamStats, stream
    from deepnvme._swap import Lend, Swapper, SwapStats
    from deepnvme._swap.parameters import Offloaded, offload_parameters

__all__ = [
    "BackendProbe",
    "Checkpoint",
    "Checkpointer",
    "CheckpointerStats",
    "CommandResult",
    "EndOfFileError",
    "Engine",
    "Error",
    "Lend",
    "Offloaded",
    "Pending",
    "Probe",
    "Progress",
    "Reader",
    "Stats",
    "StreamStats",
    "Streaming",
    "StripeSet",
    "SwapStats",
    "Swapper",
    "Trace",
    "Writer",
    "__version__",
    "as_bytes",
    "bench",
    "default_engine",
    "errors",
    "load",
    "offload_parameters",
    "open",
    "optim",
    "pinned_empty",
    "probe",
    "read",
    "read_batch",
    "report",
    "save",
    "span",
    "start_read",
    "start_read_batch",
    "start_write",
    "start_write_batch",
    "stats",
    "stream",
    "trace",
    "tune",
    "write",
    "write_batch",
]

# Imported with the first of them: who only reads and writes tensors need not wait for it.
_LATER = {
    "_checkpoint": ("Checkpoint", "Checkpointer", "CheckpointerStats", "load", "save"),
    "_stream": ("StreamStats", "Streaming", "stream"),
    "_swap": ("Lend", "SwapStats", "Swapper"),
    "_swap.parameters": ("Offloaded", "offload_parameters"),
}


def __getattr__(name: str) -> object:
    if name == "optim":
        return importlib.import_module("deepnvme.optim")
    for package, names in _LATER.items():
        if name in names:
            module = importlib.import_module(f"deepnvme.{package}")
            globals().update({known: getattr(module, known) for known in names})
            return globals()[name]
    msg = f"module 'deepnvme' has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
