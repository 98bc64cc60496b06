"""Tensors between NVMe and memory, at the speed of the disk.

``read`` and ``write`` move a whole tensor and wait; ``start_read`` and ``start_write`` return a :class:`Pending` at
once. A tensor is a torch tensor in host memory, a numpy array, or anything with the buffer protocol or DLPack. A path
is ``str``, ``bytes``, ``os.PathLike``, an open file descriptor or a :class:`StripeSet`. ``deepnvme.open`` is a file for
code that wants one. What goes wrong is an exception: :class:`Error`, see :mod:`deepnvme.errors`.

Example::

    import deepnvme, torch

    tensor = torch.randn(1024, 1024)
    deepnvme.write(tensor, "weights.bin")
    deepnvme.read(torch.empty_like(tensor), "weights.bin")

    with deepnvme.open("model.pt", "wb") as file:
        torch.save({"weight": tensor}, file)
"""

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
    __version__,
    default_engine,
    probe,
    read,
    read_batch,
    start_read,
    start_read_batch,
    start_write,
    start_write_batch,
    stats,
    write,
    write_batch,
)
from deepnvme._file import Reader, Writer, open  # noqa: A004 (it is one, as gzip.open is)
from deepnvme._tools import Answer, bench, report, tune
from deepnvme._torch import as_bytes, pinned_empty
from deepnvme.errors import EndOfFileError, Error

if TYPE_CHECKING:
    from deepnvme._checkpoint import Checkpoint, Checkpointer, CheckpointerStats, load, save

__all__ = [
    "Answer",
    "BackendProbe",
    "Checkpoint",
    "Checkpointer",
    "CheckpointerStats",
    "EndOfFileError",
    "Engine",
    "Error",
    "Pending",
    "Probe",
    "Progress",
    "Reader",
    "Stats",
    "StripeSet",
    "Writer",
    "__version__",
    "as_bytes",
    "bench",
    "default_engine",
    "errors",
    "load",
    "open",
    "pinned_empty",
    "probe",
    "read",
    "read_batch",
    "report",
    "save",
    "start_read",
    "start_read_batch",
    "start_write",
    "start_write_batch",
    "stats",
    "tune",
    "write",
    "write_batch",
]

# Imported with the first of them: who only reads and writes tensors need not wait for it.
_CHECKPOINT = ("Checkpoint", "Checkpointer", "CheckpointerStats", "load", "save")


def __getattr__(name: str) -> object:
    if name not in _CHECKPOINT:
        msg = f"module 'deepnvme' has no attribute {name!r}"
        raise AttributeError(msg)
    from deepnvme import _checkpoint  # noqa: PLC0415

    globals().update({known: getattr(_checkpoint, known) for known in _CHECKPOINT})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
