"""The tests' fake driver behind the harness's interface to a GPU: it runs the whole benchmark without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepnvme
import torch

_MODULE = Path(__file__).resolve().parents[2] / "python" / "tests" / "gpu" / "fake_driver.py"


class FakeGpu:
    """A GPU of the fake driver. torch does not see it, and computes on the CPU.

    Args:
        gpu: the GPU of the tests, of which this class makes tensors.
    """

    is_real = False
    device = "cuda:0"
    compute = "cpu"
    compute_note = "torch sees no GPU here, and computes on the CPU; all tensors of this row are in host memory"

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def tensor(self, host: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        tensor: torch.Tensor = self._gpu.tensor(host)
        return tensor

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See the protocol."""
        pinned: torch.Tensor = deepnvme.pinned_empty(nbytes, dtype=torch.uint8)
        return pinned

    def fill(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """See the protocol."""
        self._gpu.driver.poke(target.data_ptr(), host.numpy().tobytes())

    def drain(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """See the protocol."""
        host.copy_(self._gpu.to_host(source))

    def overwrite(self, target: torch.Tensor) -> None:
        """See the protocol."""
        self._gpu.driver.poke(target.data_ptr(), b"\xa5" * target.nbytes)

    def same(self, tensor: torch.Tensor, host: torch.Tensor) -> bool:
        """See the protocol."""
        ours, theirs = (one.contiguous().view(-1).view(torch.uint8) for one in (self._gpu.to_host(tensor), host))
        return torch.equal(ours, theirs)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See the protocol."""
        target.copy_(source)

    def wait(self) -> None:
        """See the protocol."""

    def load(self, path: str, engine: Any) -> dict[str, torch.Tensor]:
        """See the protocol: without the parts of a load that ask torch for a GPU."""
        if path.endswith(".pt"):
            # torch itself would have to make its storages.
            shapes = deepnvme.load(path, device="meta", progress=False)
            into = {name: self.tensor(torch.zeros(one.shape, dtype=one.dtype)) for name, one in shapes.items()}
            filled: dict[str, torch.Tensor] = deepnvme.load(path, into=into, engine=engine, progress=False)
            return filled
        from deepnvme._checkpoint import load_memory  # noqa: PLC0415
        from deepnvme._utils import devices  # noqa: PLC0415

        def make(nbytes: int, _: torch.device) -> torch.Tensor:
            return self.tensor(torch.zeros(nbytes, dtype=torch.uint8))

        with (
            mock.patch.object(load_memory, "allocate_on_gpu", make),
            mock.patch.object(torch.Tensor, "to", lambda tensor, _: tensor),
            mock.patch.object(devices, "_check_cuda", return_value=None),
        ):
            state: dict[str, torch.Tensor] = deepnvme.load(path, device=self.device, engine=engine, progress=False)
        return state

    def facts(self) -> dict[str, object]:
        """See the protocol."""
        return {"name": "fake driver"}


def fake_gpu() -> FakeGpu:
    """Load the fake driver into this process.

    Raises:
        FileNotFoundError: it has not been built.
    """
    spec = importlib.util.spec_from_file_location("fake_driver", _MODULE)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(_MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path = module.library()
    if path is None:
        raise FileNotFoundError("the fake driver has not been built: cargo build -p deepnvme-fake-driver")
    return FakeGpu(module.FakeGpu(module.FakeDriver(path), SimpleNamespace(setattr=setattr)))
