"""The Run:ai streamer, with some of its settings."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Its environment variables for direct I/O.
DIRECT = {"RUNAI_STREAMER_DIRECT_BLOCK": "4096", "RUNAI_STREAMER_FS_QUEUE_DEPTH": "32"}


def load(path: Path, settings: dict[str, str]) -> dict[str, Any]:
    """Load a safetensors file with these environment variables. The tensors are views of the streamer's buffer."""
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415

    with _environment(settings), SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return dict(streamer.get_tensors())


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
