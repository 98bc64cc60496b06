"""A writer for ``torch.distributed.checkpoint`` that says when the tensors of its process may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepnvme.integrations.dcp import DeepnvmeWriter

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult
    from torch.futures import Future

    from deepnvme._checkpoint.background import Gate
    from deepnvme._checkpoint.writing import SaveOptions
    from deepnvme._deepnvme import _Saving


class TellingWriter(DeepnvmeWriter):
    """Sets ``filled`` when what this process has is copied, or on the disk."""

    def __init__(self, path: Path, options: SaveOptions, filled: Gate) -> None:
        super().__init__(path)
        self._options = options
        self._filled = filled

    def _finish_shard(self, saving: _Saving) -> None:
        saving.wait_filled()
        self._filled.open()
        saving.wait(None, False)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this process has, if it has something."""
        try:
            return super().write_data(plan, planner)
        finally:
            self._filled.open()
