"""DeepSpeed's checkpoints on deepnvme: a checkpoint engine for a DeepSpeed engine.

``engine.save_checkpoint`` then writes the files that it always writes, as standard torch archives: durable, replaced at
once, with checksums, and loaded by DeepSpeed with or without this engine.

Example::

    import deepspeed
    from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.checkpoint_engine = DeepnvmeCheckpointEngine()
    engine.save_checkpoint("checkpoints", tag="step_100")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

import deepnvme._file as file
from deepnvme._checkpoint import load, save
from deepnvme.errors import UnsafeFileError

if TYPE_CHECKING:
    import os
    from typing import Literal

    from deepnvme._deepnvme import Engine


class DeepnvmeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Saves and loads the files of a DeepSpeed checkpoint.

    Args:
        engine: which engine moves the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        trusted: load files that ask for classes which are not known to be harmless, by running their pickles, as
            DeepSpeed itself does with every file. Default False: such a file is refused, and the message names the
            class.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        durability: Literal["none", "data", "full"] = "full",
        trusted: bool = False,
    ) -> None:
        super().__init__()
        self.name = "DeepnvmeCheckpointEngine"
        self._engine = engine
        self._durability: Literal["none", "data", "full"] = durability
        self._trusted = trusted

    def create(self, info: Any) -> None:
        """Do nothing: each file is made when it is saved."""

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Write one file of the checkpoint; it is on the disk when this returns."""
        save(state_dict, path, engine=self._engine, durability=self._durability, progress=False)

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """Read one file of the checkpoint."""
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        try:
            return load(path, engine=self._engine, device=device, progress=False)
        except UnsafeFileError:
            if not self._trusted:
                raise
            with file.open(path, engine=self._engine) as source:
                return torch.load(source, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """Say that the files are there, which they are."""
        del info
        return True
