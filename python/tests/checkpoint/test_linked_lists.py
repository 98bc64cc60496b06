"""A list of files that is a symbolic link belongs to another folder: saves refuse it, and nothing there is removed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import deepnvme
from deepnvme.errors import InvalidArgumentError
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

if TYPE_CHECKING:
    from pathlib import Path


def state_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"l{index}": torch.randn(50, generator=generator) for index in range(6)}


def linked(source: Path, target: Path) -> dict[str, bytes]:
    """Fill a folder with links to the files of another; what that one holds."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).symlink_to(path)
    return content(source)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith(".lock")}


@pytest.mark.parametrize("max_shard_bytes", [None, 500])
def test_a_model_that_a_folder_of_links_leads_to_stays(tmp_path: Path, max_shard_bytes: int | None) -> None:
    base, variant = tmp_path / "base", tmp_path / "variant"
    base.mkdir()
    deepnvme.save(state_of(0), base / "model.safetensors", max_shard_bytes=500)
    before = linked(base, variant)
    assert len(deepnvme.load(variant)) == 6
    if max_shard_bytes is None:
        with pytest.warns(UserWarning, match="may not be deepnvme's"):
            deepnvme.save(state_of(1), variant / "model.safetensors")
        assert torch.equal(deepnvme.load(variant / "model.safetensors")["l0"], state_of(1)["l0"])
    else:
        with pytest.raises(InvalidArgumentError, match=r"index\.json.*symbolic link"):
            deepnvme.save(state_of(1), variant / "model.safetensors", max_shard_bytes=max_shard_bytes)
    assert content(base) == before
    assert torch.equal(deepnvme.load(base)["l0"], state_of(0)["l0"])


def test_shards_that_a_folder_of_links_leads_to_stay(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    save(state_of(0), storage_writer=DeepnvmeWriter(one))
    before = linked(one, two)
    with pytest.raises(CheckpointException, match="symbolic link"):
        save(state_of(1), storage_writer=DeepnvmeWriter(two))
    assert content(one) == before
    loaded = {name: torch.zeros(50) for name in state_of(0)}
    load(loaded, storage_reader=DeepnvmeReader(two))
    assert torch.equal(loaded["l3"], state_of(0)["l3"])


def test_a_history_that_a_folder_of_links_leads_to_stays(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with deepnvme.Checkpointer(one, keep=2) as checkpointer:
        for step in range(2):
            checkpointer.save(step, state_of(step))
    before = linked(one, two)
    with deepnvme.Checkpointer(two, keep=2) as checkpointer:
        assert torch.equal(checkpointer.restore()["l0"], state_of(1)["l0"])
        with pytest.raises(InvalidArgumentError, match=r"manifest\.json.*symbolic link"):
            checkpointer.save(2, state_of(2))
    assert content(one) == before


def test_a_stripe_set_whose_manifest_is_a_link_stays(tmp_path: Path) -> None:
    parts = [tmp_path / name for name in ("a", "b")]
    deepnvme.save(state_of(0), deepnvme.StripeSet(parts))
    (tmp_path / "elsewhere").mkdir()
    manifest = tmp_path / "a.stripes.json"
    moved = tmp_path / "elsewhere" / "a.stripes.json"
    manifest.rename(moved)
    manifest.symlink_to(moved)
    before = content(tmp_path / "elsewhere")
    with pytest.raises(InvalidArgumentError, match=r"stripes\.json.*symbolic link"):
        deepnvme.save(state_of(1), deepnvme.StripeSet(parts))
    assert content(tmp_path / "elsewhere") == before
    assert torch.equal(deepnvme.load(deepnvme.StripeSet(parts))["l0"], state_of(0)["l0"])
