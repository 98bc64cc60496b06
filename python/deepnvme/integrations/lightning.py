"""A ``CheckpointIO`` for ``lightning`` and ``pytorch_lightning``.

It writes Lightning's usual ``.ckpt`` files: durable, replaced atomically, and with checksums. Lightning and
``torch.load`` also read them without this plugin.

Example::

    from lightning.pytorch import Trainer
    from deepnvme.integrations.lightning import DeepnvmeCheckpointIO

    trainer = Trainer(plugins=[DeepnvmeCheckpointIO(async_=True)])
    trainer.fit(model, ckpt_path="last")
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint.save import SaveOptions, start_archive
from deepnvme._deepnvme import _make_folders
from deepnvme._utils.public import parse_bytes
from deepnvme.errors import InvalidArgumentError
from deepnvme.integrations._background_save import BackgroundFileSaver
from deepnvme.integrations._torch_load import load_as_torch

if TYPE_CHECKING:
    from typing import Literal

    from deepnvme._deepnvme import Engine
    from deepnvme.integrations._torch_load import _MapLocation

__all__ = ["DeepnvmeCheckpointIO"]


def __dir__() -> list[str]:
    return sorted(__all__)


# The library is installed under two names, each with its own class. A Trainer accepts only the class of its name.
_PACKAGES = ("lightning.fabric.plugins", "lightning_fabric.plugins")


def _bases() -> tuple[type, ...]:
    found = [name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
    if not found:
        msg = "deepnvme.integrations.lightning needs Lightning, which is not installed: pip install lightning"
        raise ImportError(msg, name="lightning")
    return tuple(importlib.import_module(name).CheckpointIO for name in found)


def _on_host(storage: Any, _location: str) -> Any:
    return storage


class DeepnvmeCheckpointIO(*_bases()):  # type: ignore[misc]
    """Save and load the checkpoints of a Trainer or of Fabric.

    With ``async_=True``, a save returns once the tensors are copied, and the file is written during training. The next
    save waits for it. The next call, or the end of the run, raises its error. If the Trainer removes an older
    checkpoint, it is removed once the new one is on disk.

    Args:
        engine: the engine that transfers the bytes. Default: the default engine.
        durability: as for ``deepnvme.save``. Default ``"full"``.
        async_: save in the background. Default False.
        memory: bytes of pinned memory for that, as for ``deepnvme.Checkpointer``.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.

    Example:
        >>> from deepnvme.integrations.lightning import DeepnvmeCheckpointIO
        >>> plugin = DeepnvmeCheckpointIO()  # for training: Trainer(plugins=[plugin])
        >>> plugin.save_checkpoint({"weight": torch.ones(3)}, "last.ckpt")
        >>> plugin.load_checkpoint("last.ckpt")
        {'weight': tensor([1., 1., 1.])}
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        durability: Literal["none", "data", "full"] = "full",
        async_: bool = False,
        memory: int | str | None = None,
    ) -> None:
        super().__init__()
        self._options = SaveOptions(engine, durability)
        self._is_async = async_
        self._memory = None if memory is None else parse_bytes(memory)
        # Created on first use: strategies that start processes pickle their plugins.
        self._background: BackgroundFileSaver | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write a checkpoint.

        Raises:
            TypeError: ``storage_options`` are given, which are for remote file systems.
            deepnvme.Error: this save failed, or the previous background save did.
        """
        if storage_options is not None:
            msg = (
                "storage_options are for remote file systems, and deepnvme writes to local disks; save without them, "
                "or without DeepnvmeCheckpointIO"
            )
            raise TypeError(msg)
        target = _local(path)
        _make_folders(target.parent)
        if not self._is_async:
            start_archive(checkpoint, target, self._options).wait(None, True)
            return
        if self._background is None:
            self._background = BackgroundFileSaver(self._options, self._memory)
        self._background.save(checkpoint, target)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: _MapLocation = _on_host,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint, into host memory unless ``map_location`` says otherwise, like Lightning.

        Code that you did not allow is refused: allow classes with ``torch.serialization.add_safe_globals``. With
        ``weights_only=False``, as in ``Trainer.fit(..., weights_only=False)``, the pickle of such a file may run.
        """
        if self._background is not None:
            self._background.wait()
        source = _local(path)
        if not source.exists():
            msg = f"Checkpoint file not found: {path}"
            raise FileNotFoundError(msg)
        location = "cpu" if map_location is _on_host else map_location
        is_restricted = weights_only is not False
        state: dict[str, Any] = load_as_torch(source, location, weights_only=is_restricted, engine=self._options.engine)
        return state

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint if it exists, after the current save is on disk."""
        target = _local(path)
        if self._background is None:
            _remove(target)
        else:
            self._background.after_save(lambda: _remove(target))

    def teardown(self) -> None:
        """Wait for the current save, and raise its error. After Ctrl-C the save goes on: call it again."""
        background = self._background
        if background is not None:
            background.wait_over()
            self._background = None
            background.close()


def _local(path: str | os.PathLike[str]) -> Path:
    name = os.fspath(path)
    for prefix in ("file://", "local://"):
        name = name.removeprefix(prefix)
    if "://" in name:
        msg = f"{name}: deepnvme writes to local disks; do not use DeepnvmeCheckpointIO for remote folders"
        raise InvalidArgumentError(msg)
    return Path(name)


def _remove(path: Path) -> None:
    # Other plugins save folders under such names.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
