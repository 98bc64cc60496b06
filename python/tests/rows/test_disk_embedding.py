"""``DiskEmbedding`` gives the rows that ``torch.nn.Embedding`` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(500, 24, dtype=torch.bfloat16)


@pytest.fixture
def store(tmp_path: Path, weight: torch.Tensor) -> deepnvme.RowStore:
    deepnvme.save({"weight": weight}, tmp_path / "x.safetensors")
    return deepnvme.RowStore(tmp_path / "x.safetensors", "weight", memory="1MB")


@pytest.mark.parametrize("padding_idx", [None, 0, -1])
def test_it_equals_an_embedding(store: deepnvme.RowStore, weight: torch.Tensor, padding_idx: int | None) -> None:
    ours = deepnvme.nn.DiskEmbedding(store, padding_idx=padding_idx)
    theirs = torch.nn.Embedding(500, 24, padding_idx=padding_idx, dtype=torch.bfloat16)
    theirs.weight.data.copy_(weight)
    if padding_idx is not None:
        theirs.weight.data[padding_idx] = 0
    for ids in (torch.randint(0, 500, (3, 40)), torch.tensor([[0, 499]]), torch.empty(0, dtype=torch.int64)):
        assert torch.equal(ours(ids), theirs(ids))
    assert repr(ours) == repr(theirs).replace("Embedding", "DiskEmbedding")
    assert list(ours.parameters()) == []
    assert ours.state_dict() == {}


def test_dtype_and_scale(store: deepnvme.RowStore, weight: torch.Tensor) -> None:
    module = deepnvme.nn.DiskEmbedding(store, scale=3.0, dtype=torch.float32)
    ids = torch.randint(0, 500, (30,))
    assert torch.equal(module(ids), weight[ids].float() * 3)
    assert torch.equal(module.to(torch.float16)(ids), (weight[ids].float() * 3).half())
    assert torch.equal(module.start(ids).result(), (weight[ids].float() * 3).half())


def test_wrong_arguments(store: deepnvme.RowStore, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="RowStore"):
        deepnvme.nn.DiskEmbedding(torch.ones(3, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        deepnvme.nn.DiskEmbedding(store, padding_idx=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ids must be a torch tensor"):
        deepnvme.nn.DiskEmbedding(store)([1])
    for padding_idx in (500, -501):
        with pytest.raises(ValueError, match="500 rows"):
            deepnvme.nn.DiskEmbedding(store, padding_idx=padding_idx)
    deepnvme.write(torch.ones(4, 2, 2), tmp_path / "cube")
    cube = deepnvme.RowStore(tmp_path / "cube", shape=(4, 2, 2), dtype=torch.float32, memory="1MB")
    with pytest.raises(ValueError, match="rows and columns"):
        deepnvme.nn.DiskEmbedding(cube)


def test_padding_of_a_dtype_that_torch_cannot_fill(tmp_path: Path) -> None:
    codes = torch.randint(1, 100, (50, 8), dtype=torch.uint8).view(torch.float8_e4m3fn)
    deepnvme.write(codes, tmp_path / "x")
    with deepnvme.RowStore(tmp_path / "x", shape=(50, 8), dtype=codes.dtype, memory="1MB") as store:
        rows = deepnvme.nn.DiskEmbedding(store, padding_idx=3)(torch.tensor([3, 4]))
        assert torch.equal(rows.view(torch.uint8), torch.stack([torch.zeros(8), codes[4].view(torch.uint8)]).byte())


def test_a_table_with_scales(tmp_path: Path) -> None:
    codes, scales = torch.randint(-100, 100, (50, 32)).char(), torch.rand(50, 4)
    deepnvme.save({"codes": codes, "scales": scales}, tmp_path / "x.pt")
    with deepnvme.RowStore(tmp_path / "x.pt", "codes", scales="scales", memory="1MB") as store:
        ids = torch.randint(0, 50, (3, 9))
        expected = codes[ids].float() * scales.repeat_interleave(8, 1)[ids]
        assert torch.equal(deepnvme.nn.DiskEmbedding(store)(ids), expected)
        assert torch.equal(deepnvme.nn.DiskEmbedding(store, dtype=torch.bfloat16)(ids), expected.bfloat16())
