"""Who of several processes writes, and into what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepnvme._checkpoint.history import PARTS_LIST
from deepnvme._deepnvme import _shares

if TYPE_CHECKING:
    from deepnvme._checkpoint.distributed.process_group import Team


@dataclass(frozen=True)
class Layout:
    """One file, or one of each writer; the writers by their ranks, in the order of their stretches."""

    kind: Literal["file", "parts"]
    writers: list[int]

    def suffix(self, suffix: str) -> str:
        """Say what the name of a checkpoint ends with."""
        return suffix + PARTS_LIST if self.kind == "parts" else suffix

    def own_nbytes(self, team: Team, nbytes: int) -> int:
        """Say how many of a state's bytes this process writes, about."""
        shares = _shares(nbytes, len(self.writers))
        is_writer = team.rank in self.writers[: len(shares)]
        return shares[0][1] if is_writer else 0


def layout_of(team: Team, kind: Literal["file", "parts"], per_node: int | None) -> Layout:
    """Choose the writers, so many of each machine."""
    return Layout(kind, writers_of(team.hosts, per_node))


def writers_of(hosts: list[str], per_node: int | None) -> list[int]:
    """Take turns among machines: also a file that few write is written from many machines."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    chosen = [ranks[:per_node] for ranks in by_host.values()]
    turns = range(max(len(ranks) for ranks in chosen))
    return [ranks[turn] for turn in turns for ranks in chosen if turn < len(ranks)]
