"""deepnvme: with bounce buffers, with cuFile, and to host memory as the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from gpubench.tool import Group, OwnEngine, Setup, Tool, Where

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from common.measure import Action

BOUNCE = "deepnvme"
GDS = "deepnvme, cuFile"
HOST = "deepnvme, pinned host memory"
THEN_COPY = "deepnvme to pinned, then copy_"


class Bounce(OwnEngine, Tool):
    """``Engine.read`` and ``Engine.write`` of a tensor on the GPU, with all settings at their defaults."""

    name = BOUNCE

    def settings(self) -> str:
        """See the base."""
        engine = self.engine
        return (
            f"{engine.backend} workers={engine.workers} queue_depth={engine.queue_depth} "
            f"block_bytes={engine.block_bytes} gds={engine.gds}"
        )

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return lambda: self.engine.read(target, path)

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""
        return lambda: self.engine.write(source, path, durability="full")


class Gds(Bounce):
    """The same without host memory in between. If cuFile cannot do that, it is left out with cuFile's reason."""

    name = GDS
    options: ClassVar[dict[str, str]] = {"gds": "required"}


class HostMemory(Bounce):
    """The same from and to pinned memory of the host: the speed of the disk with this engine."""

    name = HOST
    group: Group = "host"
    where: Where = "host"


class ThenCopy(Bounce):
    """Reads the whole tensor into pinned memory, then copies it once. A pipeline has to be faster."""

    name = THEN_COPY
    group: Group = "baseline"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._pinned = setup.gpu.pinned(setup.nbytes)

    def read(self, target: torch.Tensor, path: Path) -> Action:
        """See the base."""
        # The bytes of the round before must not pass for those of this one.
        self._pinned.fill_(0xA5)

        def action() -> None:
            self.engine.read(self._pinned, path)
            self.setup.gpu.fill(target, self._pinned)

        return action

    def write(self, source: torch.Tensor, path: Path) -> Action:
        """See the base."""

        def action() -> None:
            self.setup.gpu.drain(self._pinned, source)
            self.engine.write(self._pinned, path, durability="full")

        return action
