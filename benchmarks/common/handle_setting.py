"""The settings of DeepSpeed's `aio_handle`, and those that a search tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HandleSetting:
    """The five arguments of `aio_handle`."""

    queue_depth: int
    parallelism: int
    block_bytes: int = 1 << 20
    single_submit: bool = False
    overlap_events: bool = True

    def __str__(self) -> str:
        return (
            f"block={self.block_bytes >> 10}k queue_depth={self.queue_depth} "
            f"intra_op_parallelism={self.parallelism} overlap_events={self.overlap_events} "
            f"single_submit={self.single_submit}"
        )


CANDIDATES = [HandleSetting(depth, parallelism) for depth in (32, 128) for parallelism in (1, 2)]
# Used where no sweep has found the best one.
DEFAULT_SETTING = HandleSetting(128, 1)
