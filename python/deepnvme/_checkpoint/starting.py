"""How a save of a ``Checkpointer`` begins: of one process, of several, or of a state that is in parts."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deepnvme._checkpoint import distributed_sharded as sharded
from deepnvme._checkpoint.background import Saving, staging_of
from deepnvme._checkpoint.names import tensors_of
from deepnvme._checkpoint.writing import SAFETENSORS, SaveOptions, described, start_archive, start_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from deepnvme._checkpoint.distributed import Team
    from deepnvme._checkpoint.distributed_layout import Layout
    from deepnvme._checkpoint.retention import Retained


class Starter:
    """Begins saves, and has the memory that they are copied into."""

    def __init__(
        self, team: Team, retained: Retained, layout: Layout, suffix: str, *, options: SaveOptions, memory: int | None
    ) -> None:
        self._team = team
        self._retained = retained
        self._layout = layout
        self._suffix = suffix
        self._options = options
        self._memory = memory
        # Not in the first save: a signal handler that saves during it would find modules that are half imported.
        for name in ("devices", "pickler"):
            importlib.import_module(f"deepnvme._checkpoint.{name}")

    def begin(self, step: int, state: Any, is_copied: bool, ready: Callable[[], None]) -> tuple[Saving, Path]:
        """Begin when ``ready`` returns; in several processes, what it raises in one is raised in all."""
        if self._team.is_alone and not sharded.is_sharded(state):
            ready()
            path = self._retained.begin(step, self._suffix)
            with self._or_give_back(path):
                return self._start(state, path, is_copied), path
        from deepnvme._checkpoint import distributed_save as shared  # noqa: PLC0415

        with self._team.together():
            apart, path = shared.agree_on(self._team, self._retained, step, state, self._suffix, self._layout, ready)
            with self._or_give_back(path):
                if apart is None:
                    own = sharded.own_nbytes(state)
                    return sharded.start(self._team, path, state, lambda: self._staged(own, is_copied)), path
                own = self._layout.own_nbytes(self._team, apart.nbytes)
                return shared.start(self._team, path, apart, self._layout, lambda: self._staged(own, is_copied)), path

    @contextmanager
    def _or_give_back(self, path: Path) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._retained.give_back(path)
            raise

    def free(self) -> None:
        """Free the memory."""
        self._options = replace(self._options, staging=None)

    def _start(self, state: Any, path: Path, is_copied: bool) -> Saving:
        options = self._staged(sum(tensor.nbytes for _, tensor in tensors_of(state)), is_copied)
        if self._suffix == SAFETENSORS:
            return start_tensors(path, described(state), options, is_private=True)
        return start_archive(state, path, options, is_private=True)

    def _staged(self, nbytes: int, is_copied: bool) -> SaveOptions:
        """Say how a file is written, with memory for so many bytes of tensors if they are copied first."""
        if not is_copied:
            return replace(self._options, staging=None)
        if self._options.staging is None:
            # Tensors that share memory count each: too much is no harm.
            neighbours = self._team.hosts.count(self._team.hosts[self._team.rank])
            self._options = replace(self._options, staging=staging_of(nbytes, self._memory, neighbours))
        return self._options
