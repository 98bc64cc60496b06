"""Checkpoint engines for `"checkpoint": {"writer": {...}}` in DeepSpeed's config, which `deepspeed.install` puts there.

DeepSpeed's own writers move one buffer at a time, need a GPU, and split files into parts that it cannot load. Here each
file is written whole, under its usual name, with all CPUs and a full queue. Of the config only
`show_statistics`, the type `mock` and decoupling apply; buffer sizes and numbers of writers have no meaning here.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.io import MockFileWriter

import deepnvme._file as file
from deepnvme.integrations._background_save import BackgroundFileSaver
from deepnvme.integrations.deepspeed import DeepnvmeCheckpointEngine

_MOCK = "MOCK"


class WriterCheckpointEngine(DeepnvmeCheckpointEngine):
    """Replaces DeepSpeed's `FastCheckpointEngine`: a save returns once the file is on disk."""

    def __init__(self, config_params: Any, _dp_writer_config: object, _optimize_dp_state: bool) -> None:
        super().__init__()
        self.name = type(self).__name__
        writer = config_params.checkpoint_config["writer"]
        self._is_mock = writer["type"] == _MOCK
        self._is_reporting = writer["show_statistics"]

    def save(self, state_dict: Any, path: str) -> None:  # type: ignore[override]
        """Write one file of the checkpoint, or an empty one for type `mock`."""
        began = time.perf_counter()
        if self._is_mock:
            writer = MockFileWriter(path)
            torch.save(state_dict, writer)
            writer.close()
        else:
            super().save(state_dict, path)
        self._report(path, began)

    def _report(self, path: str, began: float) -> None:
        if self._is_reporting:
            seconds, nbytes = time.perf_counter() - began, Path(path).stat().st_size
            speed = nbytes / seconds / (1 << 30)
            stats = {"path": path, "bytes": nbytes, "write_secs": seconds, "write_GB/s": speed, "writer": "deepnvme"}
            print(f"{stats = }")  # noqa: T201 - as DeepSpeed's writers do


class DecoupledCheckpointEngine(WriterCheckpointEngine):
    """Replaces DeepSpeed's `DecoupledCheckpointEngine`: files are written while the next batch is computed.

    A save returns once the tensors are copied to pinned memory. DeepSpeed commits before the next optimizer step:
    it waits for the files, raises their errors, and names the checkpoint in `latest`.
    """

    def __init__(self, config_params: Any, dp_writer_config: object, optimize_dp_state: bool) -> None:
        super().__init__(config_params, dp_writer_config, optimize_dp_state)
        self._files = BackgroundFileSaver(self._options)
        self._uncommitted: Any = None

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        self._commit_pending()
        self._uncommitted = info

    def save(self, state_dict: Any, path: str) -> None:  # type: ignore[override]
        """Copy the tensors, and write one file of the checkpoint in the background."""
        if self._is_mock:
            super().save(state_dict, path)
            return
        began = time.perf_counter()
        try:
            self._files.save(state_dict, path)
        except BaseException:
            # A checkpoint that lacks a file is never committed. `latest` keeps the previous one.
            self._uncommitted = None
            raise
        self._files.after_save(lambda: self._report(path, began))

    def load(self, path: str, map_location: Any = None) -> Any:  # type: ignore[override]
        """Read one file of a checkpoint, possibly the one that is being written."""
        self._wait_for_files()
        return super().load(path, map_location)

    def commit(self, info: Any) -> bool:
        """Wait for the files of the checkpoint. A checkpoint is refused if one of its files could not be saved.

        After Ctrl-C the saves go on, and the checkpoint can still be committed.
        """
        self._wait_for_files()
        if self._uncommitted is None:
            msg = f"checkpoint {getattr(info, 'tag', info)!r} is not committed: a file of it was not saved"
            raise RuntimeError(msg)
        self._uncommitted = None
        return True

    def is_decoupled(self) -> bool:
        """Return true: saving continues after `save_checkpoint`."""
        return True

    def get_commit_info(self) -> Any:
        """Return the checkpoint that waits for its commit."""
        return self._uncommitted

    def cleanup(self) -> None:
        """Finish all saves. After Ctrl-C they go on: call it again."""
        # Outside of the `try`: after Ctrl-C, `close` would wait for the same files.
        self._files.wait_over()
        try:
            self._commit_pending()
        finally:
            self._files.close()

    def _wait_for_files(self) -> None:
        self._files.wait_over()
        try:
            self._files.raise_failure()
        except Exception:
            # As for an error of `save`.
            self._uncommitted = None
            raise

    def _commit_pending(self) -> None:
        """Commit a checkpoint that no optimizer step has followed. Otherwise DeepSpeed would not name it."""
        info = self._uncommitted
        if info is None:
            return
        self.commit(info)
        comm.barrier()
        if info.save_latest and comm.get_rank() == 0:
            name_latest(Path(info.save_dir), info.tag)


def name_latest(folder: Path, tag: str) -> None:
    """Name a checkpoint in `latest`, as DeepSpeed does, but immediately and durably."""
    with file.open(folder / "latest", "wb") as latest:
        latest.write(tag.encode())
