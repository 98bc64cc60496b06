"""The ranks that write a checkpoint, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepnvme._checkpoint.checkpoint import PARTS_LIST
from deepnvme._deepnvme import _shard_ranges

if TYPE_CHECKING:
    from deepnvme._checkpoint.distributed.process_group import RankGroup


@dataclass(frozen=True)
class Writers:
    """The ranks that write, in the order of their byte ranges, into one file or into one file each."""

    layout: Literal["file", "parts"]
    ranks: list[int]

    def suffix(self, suffix: str) -> str:
        """Return the suffix of a checkpoint's name."""
        return suffix + PARTS_LIST if self.layout == "parts" else suffix

    def local_nbytes(self, group: RankGroup, nbytes: int) -> int:
        """Return about how many bytes of a state this process writes."""
        shards = _shard_ranges(nbytes, len(self.ranks))
        is_writer = group.rank in self.ranks[: len(shards)]
        return shards[0][1] if is_writer else 0


def choose_writers(group: RankGroup, layout: Literal["file", "parts"], per_node: int | None) -> Writers:
    """Choose the writers, up to ``per_node`` on each machine."""
    return Writers(layout, writer_ranks(group.hosts, per_node))


def writer_ranks(hosts: list[str], per_node: int | None) -> list[int]:
    """Alternate between machines, so that even a few writers are on many machines."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    chosen = [ranks[:per_node] for ranks in by_host.values()]
    turns = range(max(len(ranks) for ranks in chosen))
    return [ranks[turn] for turn in turns for ranks in chosen if turn < len(ranks)]
