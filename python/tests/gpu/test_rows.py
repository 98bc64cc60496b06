"""``RowStore`` with tensors on GPUs: the rows of the table, in stream order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme

from .test_transfer import bits, values

ROWS, COLUMNS = 5000, 300


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def store(table: torch.Tensor, tmp_path: Path) -> deepnvme.RowStore:
    deepnvme.save({"table": table}, tmp_path / "table.safetensors")
    return deepnvme.RowStore(tmp_path / "table.safetensors", "table", memory="2MB")


def on_gpu(gpu: Any, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: int = 0) -> Any:
    """Return a tensor of random bytes on a GPU."""
    return gpu.tensor(values(shape, dtype, 9), device)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 700), (40_000,)])
def test_gathers(gpu: Any, store: deepnvme.RowStore, table: torch.Tensor, shape: tuple[int, ...]) -> None:
    with store:
        for device in (0, 1):
            ids = torch.randint(0, ROWS, shape)
            out = on_gpu(gpu, (*shape, COLUMNS), device=device)
            assert store.gather(ids, out=out) is out
            assert bits(gpu.to_host(out)) == bits(table[ids])
            late = on_gpu(gpu, (*shape, COLUMNS), device=device)
            assert bits(gpu.to_host(store.start_gather(ids, out=late).result())) == bits(table[ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_conversions(gpu: Any, store: deepnvme.RowStore, table: torch.Tensor, dtype: torch.dtype) -> None:
    with store:
        ids = torch.randint(0, ROWS, (6000,))
        out = on_gpu(gpu, (6000, COLUMNS), dtype)
        store.gather(ids, out=out, scale=0.37)
        host = store.gather(ids, dtype=dtype, scale=0.37)
        assert bits(gpu.to_host(out)) == bits(host)
        assert torch.equal(host, (table[ids] * 0.37).to(dtype))


def test_packed_rows_with_scales(gpu: Any, tmp_path: Path) -> None:
    table = torch.randn(900, 64).to(torch.float8_e4m3fn)
    scales = torch.rand(900, 4)
    deepnvme.save({"t": table, "s": scales}, tmp_path / "x.safetensors")
    packed = deepnvme.RowStore.create(
        tmp_path / "rows.safetensors", tmp_path / "x.safetensors", "t", scales="s", memory="1MB"
    )
    with packed:
        ids = torch.randint(0, 900, (2000,))
        out = on_gpu(gpu, (2000, 64), torch.bfloat16)
        packed.gather(ids, out=out)
        expected = (table.float() * scales.repeat_interleave(16, 1)).to(torch.bfloat16)
        assert bits(gpu.to_host(out)) == bits(expected[ids])


def test_a_kernel_still_reads_the_target(gpu: Any, store: deepnvme.RowStore, table: torch.Tensor) -> None:
    old = values((100, COLUMNS), torch.float32, 1)
    for start in (False, True):
        out, copy = gpu.tensor(old), on_gpu(gpu, (100, COLUMNS))
        gpu.late(copy, out, 60)
        if start:
            store.start_gather(torch.arange(100), out=out).result()
        else:
            store.gather(torch.arange(100), out=out)
        assert bits(gpu.to_host(out)) == bits(table[:100])
        gpu.close()
        assert bits(gpu.to_host(copy)) == bits(old)
    store.close()


def test_rows_are_visible_to_the_next_kernel(gpu: Any, store: deepnvme.RowStore, table: torch.Tensor) -> None:
    with store:
        out, copy = on_gpu(gpu, (3000, COLUMNS)), on_gpu(gpu, (3000, COLUMNS))
        store.gather(torch.arange(3000), out=out)
        gpu.late(copy, out, 0)
        gpu.close()
        assert bits(gpu.to_host(copy)) == bits(table[:3000])
