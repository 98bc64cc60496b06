"""Save a model whose parameters are on disk as safetensors files, one shard in memory at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from deepnvme._checkpoint.save import NamedTensor, SaveOptions, checked_tensors, is_safetensors, plan_safetensors
from deepnvme._checkpoint.shards import save_shards
from deepnvme._utils.arguments import path_of
from deepnvme._utils.terminal import ProgressArgument, progress_callback
from deepnvme.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from deepnvme._deepnvme import _SavePlan


class ShardSaver:
    """Saves a state and copies its tensors one shard at a time.

    Args:
        state: names to tensors, some of which are on disk.
        copy: returns a tensor in memory with the values of one of these.
    """

    def __init__(self, state: Mapping[str, torch.Tensor], copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._state, self._copy = state, copy

    def save(
        self, path: str | os.PathLike[str], max_shard_bytes: int, options: SaveOptions, progress: ProgressArgument
    ) -> int:
        """Write all files. Return their total bytes."""
        if not is_safetensors(path):
            msg = f"{os.fspath(path)}: what is saved in pieces becomes safetensors files; end the name in .safetensors"
            raise InvalidArgumentError(msg)
        report = progress_callback(progress, "saving", path)

        def plan(shard: Path, part: list[NamedTensor]) -> _SavePlan:
            return plan_safetensors(shard, self._in_memory(part), options)

        return save_shards(path_of(path), checked_tensors(self._state), max_shard_bytes, plan, report)

    def _in_memory(self, part: list[NamedTensor]) -> list[NamedTensor]:
        # A tensor with two names is copied once.
        copies: dict[int, torch.Tensor] = {}
        for name, _ in part:
            tensor = self._state[name]
            if id(tensor) not in copies:
                copies[id(tensor)] = self._copy(tensor)
        return [(name, copies[id(self._state[name])]) for name, _ in part]
