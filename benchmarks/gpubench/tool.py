"""The interfaces of tools and loaders."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import deepnvme

from common.not_offered import NotOffered

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from common.measure import Action
    from gpubench.gpu import Gpu

#: Where the tensor of a tool is; ``none`` for one that brings memory of its own.
Where = Literal["gpu", "host", "none"]
#: ``deepnvme``: its ways to and from a GPU. ``host``: deepnvme, from and to memory of the host. ``ceiling``: the
#: same work without the disk. ``baseline``: other tools that do the same work. ``fio``: the disk without a GPU.
Group = Literal["deepnvme", "host", "ceiling", "baseline", "fio"]


@dataclass(frozen=True)
class Setup:
    """The GPU, the folder and the sizes that tools work with."""

    gpu: Gpu
    scratch: Path
    nbytes: int
    #: Size of the model that is streamed.
    model_nbytes: int = 1 << 30


class ToolBase:
    """The parts that tools of all kinds share."""

    name = ""
    group: Group = "baseline"

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def settings(self) -> str:
        """Return the settings in use, for the record."""
        return ""

    def close(self) -> None:
        """Release threads, handles and memory."""


class OwnEngine(ToolBase):
    """A tool that has its own engine of deepnvme."""

    group: Group = "deepnvme"
    options: ClassVar[dict[str, str]] = {}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.engine = deepnvme.Engine(**self.options)

    def close(self) -> None:
        """See the base."""
        self.engine.close()


class Tool(ToolBase):
    """One way to move a tensor between a file and a GPU. Only the actions that it returns are timed."""

    where: Where = "gpu"

    def prepare_read(self, target: Any, path: Path, make_cold: Callable[[], None]) -> None:
        """Choose settings by trial, or raise `NotOffered`; not timed."""

    def prepare_write(self, source: Any, path: Path) -> None:
        """Choose settings by trial, or raise `NotOffered`; not timed."""

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """Return an action that fills the tensor from the start of the file."""
        raise NotOffered(f"{self.name} only writes")

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """Return an action that writes the tensor to a new file, and flushes it to the disk."""
        raise NotOffered(f"{self.name} only reads")


class Loader(ToolBase, ABC):
    """One way to load a file of weights into tensors on a GPU."""

    suffix = ".safetensors"

    @abstractmethod
    def load(self, path: Path) -> dict[str, torch.Tensor]:
        """Return all tensors by name."""

    def free_last_load(self) -> None:
        """Release the memory of the last load, except its tensors; not timed."""


def reason(error: BaseException) -> str:
    """Return why a tool cannot run, in one line. For an unexpected error, it names the benchmark's call."""
    if isinstance(error, NotOffered):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"not installed ({error})"
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame for frame in frames if Path(frame.filename).parent == Path(__file__).parent]
    call = f", in {Path(calls[-1].filename).name}: {calls[-1].line}" if calls else ""
    return f"{type(error).__name__}: {text[:300]}{call}"


def needs_torch_cuda(setup: Setup, name: str) -> None:
    """Raise `NotOffered` if torch reaches no GPU: only deepnvme knows the fake driver."""
    if not setup.gpu.is_real:
        raise NotOffered(f"{name} uses torch's CUDA, which reaches no GPU here")
