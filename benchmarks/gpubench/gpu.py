"""The harness's interface to a GPU. Of the modules that run rows, only this one uses ``torch.cuda``."""

from __future__ import annotations

import subprocess
from typing import Any, Protocol

import torch

_PART_BYTES = 256 << 20


class Gpu(Protocol):
    """A GPU, or the fake driver."""

    #: Whether torch itself works there, so that libraries that use torch's CUDA can take part.
    is_real: bool
    #: Its name in torch.
    device: str
    #: The device on which torch computes: the GPU, or the CPU where torch sees no GPU.
    compute: str
    #: A note for the rows in which torch computes, or an empty text.
    compute_note: str

    def tensor(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to the GPU."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Return pinned host memory that the driver knows."""

    def fill(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """``target.copy_(host)``, and wait."""

    def drain(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """``host.copy_(source)``, and wait."""

    def overwrite(self, target: torch.Tensor) -> None:
        """Overwrite a tensor, so that what was there before cannot pass for what is read."""

    def same(self, tensor: torch.Tensor, host: torch.Tensor) -> bool:
        """Compare every byte of a tensor on the GPU with one of the host."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between the host and tensors on `compute`, and wait."""

    def wait(self) -> None:
        """Wait for all GPU work, so that the timing includes it."""

    def load(self, path: str, engine: Any) -> dict[str, torch.Tensor]:
        """``deepnvme.load`` to this GPU."""

    def facts(self) -> dict[str, object]:
        """Return its description for the record."""


class RealGpu:
    """The first GPU that torch reaches."""

    is_real = True
    device = "cuda:0"
    compute = device
    compute_note = ""

    def tensor(self, host: torch.Tensor) -> torch.Tensor:
        """See the protocol."""
        return host.to(self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """See the protocol."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def fill(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """See the protocol."""
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    def drain(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """See the protocol."""
        host.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def overwrite(self, target: torch.Tensor) -> None:
        """See the protocol."""
        target.view(torch.uint8).fill_(0xA5)
        torch.cuda.synchronize()

    def same(self, tensor: torch.Tensor, host: torch.Tensor) -> bool:
        """See the protocol: on the GPU, part by part."""
        ours, theirs = (one.contiguous().view(-1).view(torch.uint8) for one in (tensor, host))
        if ours.numel() != theirs.numel():
            return False
        parts = (slice(start, start + _PART_BYTES) for start in range(0, ours.numel(), _PART_BYTES))
        return all(torch.equal(ours[part], theirs[part].to(ours.device)) for part in parts)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See the protocol."""
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def wait(self) -> None:
        """See the protocol."""
        torch.cuda.synchronize()

    def load(self, path: str, engine: Any) -> dict[str, torch.Tensor]:
        """See the protocol."""
        import deepnvme  # noqa: PLC0415

        state: dict[str, torch.Tensor] = deepnvme.load(path, device=self.device, engine=engine, progress=False)
        return state

    def facts(self) -> dict[str, object]:
        """See the protocol."""
        known = torch.cuda.get_device_properties(0)
        return {
            "name": known.name,
            "memory_gib": round(known.total_memory / 2**30, 1),
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
            **_driver_facts(),
        }


def _driver_facts() -> dict[str, object]:
    """Return the facts that only nvidia-smi knows; none without it."""
    wanted = ("driver_version", "pcie.link.gen.max", "pcie.link.width.max")
    command = ["nvidia-smi", f"--query-gpu={','.join(wanted)}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return dict(zip(wanted, (word.strip() for word in said.strip().split(",")), strict=False))
