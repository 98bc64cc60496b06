"""Parts of rows and casts pass through bounded buffers, piece by piece."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from deepnvme._checkpoint.dcp import shard
from deepnvme._checkpoint.dcp.shard import pieces
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
from process_memory import PROCESS_MEMORY

if TYPE_CHECKING:
    from collections.abc import Sequence

Box = tuple[list[int], list[int], list[int]]


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(st.lists(st.integers(1, 7), max_size=4))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, starts, [draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True)]


@given(box=boxes(), elements_max=st.integers(1, 400))
def test_the_pieces_of_a_box_are_all_of_it(box: Box, elements_max: int) -> None:
    shape, starts, lengths = box
    stored = torch.arange(math.prod(shape)).reshape(shape)
    target = torch.full(lengths, -1)
    for piece in pieces(shape, starts, lengths, elements_max):
        assert piece.elements <= max(elements_max, 1)
        source = stored.flatten()[piece.start : piece.start + piece.elements].reshape(piece.shape)
        part = piece.of_target(target)
        assert (part == -1).all(), "no element is in two pieces"
        part.copy_(piece.of_source(source, starts, lengths))
    slices = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    assert torch.equal(target, stored[slices])


class Parts(DefaultLoadPlanner):
    """Wants a box of each tensor."""

    def __init__(self, targets: dict[str, torch.Tensor], starts: Sequence[int]) -> None:
        super().__init__()
        self.targets, self.starts = targets, torch.Size(starts)
        self.committed: list[str] = []

    def create_local_plan(self) -> LoadPlan:
        def item(name: str, target: torch.Tensor) -> ReadItem:
            none = torch.Size([0] * target.dim())
            index = MetadataIndex(name, none)
            return ReadItem(LoadItemType.TENSOR, index, none, index, self.starts, target.size())

        return LoadPlan([item(name, target) for name, target in self.targets.items()])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.targets[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(read_item.dest_index.fqn)


@pytest.mark.parametrize("verify", ["off", "auto", "full"])
@pytest.mark.parametrize("bound", [1, 100, 5000, 1 << 20])
def test_parts_and_casts_are_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int, verify: Literal["off", "auto", "full"]
) -> None:
    monkeypatch.setattr(shard, "COPIED_BYTES_MAX", bound)
    stored = {f"w{index}": torch.randn(9, 5, 11) for index in range(4)}
    save(dict(stored), storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    targets = {name: torch.zeros(4, 3, 6, dtype=torch.float64 if name == "w1" else torch.float32) for name in stored}
    targets["w2"] = torch.zeros(6, 3, 4).permute(2, 1, 0)
    planner = Parts(targets, (2, 1, 4))
    state = {name: torch.empty(9, 5, 11) for name in stored}
    load(state, storage_reader=DeepnvmeReader(tmp_path, verify=verify), planner=planner, no_dist=True)
    for name, tensor in stored.items():
        assert torch.equal(targets[name], tensor[2:6, 1:4, 4:10].to(targets[name].dtype)), name
    assert sorted(planner.committed) == sorted(stored)


def test_memory_stays_within_the_buffers(tmp_path: Path) -> None:
    code = (
        PROCESS_MEMORY
        + """
import sys, torch
from torch.distributed import checkpoint as dcp
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter
state = {f"w{index}": torch.ones(4 << 20) for index in range(20)}
writer = DeepnvmeWriter(sys.argv[1], durability="none")
dcp.save(state, storage_writer=writer, no_dist=True)
state = {name: torch.ones(4 << 20, dtype=torch.bfloat16) for name in state}
before = restart_peak()
dcp.load(state, storage_reader=DeepnvmeReader(sys.argv[1]), no_dist=True)
print(memory_bytes("VmHWM") - before >> 20)
"""
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "x")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 110, "320 MiB are cast with 64 MiB of buffers"
