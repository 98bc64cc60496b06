"""A row: one piece of work that every tool does once in each round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from storagebench import data, formats

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from common.measure import Sample
    from storagebench.settings import Settings
    from storagebench.tools.base import Suffix, Tool

Unit = Literal["GB/s", "us", "reads/s"]


@dataclass
class Bench:
    """The parts that all rows share: the settings, the folder, and one large file in each tool's format."""

    settings: Settings
    scratch: Path
    source: torch.Tensor = field(init=False)
    _files: dict[Suffix, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.source = data.random_tensor(self.settings.large_bytes)

    def readable(self, suffix: Suffix) -> Path:
        """Return the file that holds `source` in this format, writing it when it is first asked for."""
        if suffix not in self._files:
            path = self.scratch / f"read{suffix}"
            formats.save(self.source, path, suffix)
            self._files[suffix] = path
        return self._files[suffix]

    def close(self) -> None:
        """Delete the files."""
        for path in self._files.values():
            path.unlink(missing_ok=True)
        self._files.clear()


class PinnedCopies:
    """Copies of a row's tensor, in the pinned memory of the tools that have such."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Tool, torch.Tensor]] = {}

    def of(self, tool: Tool, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tool's copy of `tensor`, or None if it has no such memory."""
        if tool.name not in self._copies:
            copy = tool.pinned_copy(tensor)
            if copy is None:
                return None
            self._copies[tool.name] = (tool, copy)
        return self._copies[tool.name][1]

    def free(self) -> None:
        """Free all copies."""
        for tool, copy in self._copies.values():
            tool.free_pinned(copy)
        self._copies.clear()


class Row(ABC):
    """One piece of work.

    Class attributes: ``key`` (for the command line and the record), ``group`` (``large``, ``small``, ``calls``),
    ``title`` (for people), ``unit`` of the main metric.
    """

    key: str
    group: str
    title: str
    unit: Unit = "GB/s"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    @abstractmethod
    def prepare(self) -> None:
        """Allocate memory and write files, once before the first round."""

    @abstractmethod
    def once(self, tool: Tool, *, every_byte: bool) -> Sample:
        """Measure one tool once and verify what it did: every byte, or 256 random pages.

        Raises:
            NotOffered: when the tool cannot do this.
            Mismatch: when it did not move the right bytes.
        """

    @abstractmethod
    def close(self) -> None:
        """Free memory and delete files."""

    def cost(self, sample: Sample) -> float:
        """Return the metric that ratios are made of, seconds for each byte; smaller is better."""
        return sample.wall_s / sample.bytes_moved

    def metric(self, sample: Sample) -> float:
        """Return the main metric in ``unit``."""
        return sample.gb_per_s
