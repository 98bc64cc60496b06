"""A checkpoint engine for DeepSpeed.

``engine.save_checkpoint`` writes its usual files as standard torch archives: durable, replaced atomically, and with
checksums. DeepSpeed loads them with or without deepnvme.

Example::

    import deepspeed
    from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine

    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.checkpoint_engine = DeepnvmeCheckpointEngine()
    engine.save_checkpoint("checkpoints", tag="step_100")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from deepnvme._checkpoint.save import SaveOptions, start_archive
from deepnvme.integrations._torch_load import load_as_torch

if TYPE_CHECKING:
    import os
    from typing import Literal

    from deepnvme._deepnvme import Engine

__all__ = ["DeepnvmeCheckpointEngine"]


def __dir__() -> list[str]:
    return sorted(__all__)


# Classes of DeepSpeed in the files of ZeRO. They contain only numbers.
_DEEPSPEED_CLASSES = {
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
}


class DeepnvmeCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Save and load the files of a DeepSpeed checkpoint.

    Args:
        engine: the engine that transfers the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        trusted: run the pickles of files that ask for classes not known to be safe, as DeepSpeed does for every file.
            Default False: files may contain DeepSpeed's own classes and those that
            ``torch.serialization.add_safe_globals`` allows. Others raise an error that names them.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.

    Example:
        >>> from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine
        >>> checkpoint_engine = DeepnvmeCheckpointEngine()  # of a training: engine.checkpoint_engine
        >>> checkpoint_engine.save({"weight": torch.ones(3)}, "model_states.pt")
        >>> checkpoint_engine.load("model_states.pt")
        {'weight': tensor([1., 1., 1.])}
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
        self._options = SaveOptions(engine, durability)
        self._trusted = trusted

    def create(self, info: Any) -> None:
        """Do nothing: each file is created when it is saved."""

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Write one file of the checkpoint. It is on disk when this returns.

        Raises:
            deepnvme.Error: the disk or the file system failed.
        """
        start_archive(state_dict, path, self._options).wait(None, True)

    def load(self, path: str | os.PathLike[str], map_location: Any = None) -> Any:
        """Read one file of the checkpoint.

        Raises:
            deepnvme.errors.UnsafeFileError: the file asks for a class that is not known to be safe.
            deepnvme.Error: the file is damaged, or the disk failed.
        """
        device = map_location if isinstance(map_location, str | torch.device) else "cpu"
        with torch.serialization.safe_globals(_deepspeed_classes()):
            return load_as_torch(path, device, weights_only=not self._trusted, engine=self._options.engine)

    def commit(self, info: Any) -> bool:
        """Return True: the files are on disk already."""
        del info
        return True


def _deepspeed_classes() -> list[Any]:
    modules = [(importlib.import_module(module), names) for module, names in _DEEPSPEED_CLASSES.items()]
    return [getattr(module, name) for module, names in modules for name in names if hasattr(module, name)]
