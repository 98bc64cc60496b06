"""The builders, and the small op `cast_to_byte_tensor`."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from deepnvme import deepspeed as ops


@pytest.mark.parametrize(
    ("builder", "build_var", "name", "exports"),
    [
        (
            ops.AsyncIOBuilder,
            "DS_BUILD_AIO",
            "async_io",
            ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"],
        ),
        (ops.PinMemoryBuilder, "DS_BUILD_PIN_MEMORY", "pin_memory", ["pin_handle"]),
        (ops.UtilsBuilder, "DS_BUILD_UTILS", "utils", ["cast_to_byte_tensor"]),
        (ops.GDSBuilder, "DS_BUILD_GDS", "gds", ["gds_handle"]),
    ],
)
@pytest.mark.usefixtures("no_compiling")
def test_builders_load_without_compiling(builder: Any, build_var: str, name: str, exports: list[str]) -> None:
    assert build_var == builder.BUILD_VAR
    assert (builder.NAME, builder().name) == (name, name)
    module = builder().load()
    assert builder().load(verbose=True) is module
    assert module.__name__ == builder().absolute_name()
    assert builder().is_compatible(verbose=False) is (name != "gds" or torch.cuda.is_available())
    for export in exports:
        assert getattr(module, export) is getattr(ops, export)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 4)])
def test_cast_shares_the_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    cast = ops.cast_to_byte_tensor(tensor)
    assert cast.dtype == torch.uint8
    assert cast.shape == (tensor.nbytes,)
    if tensor.nbytes:
        assert cast.data_ptr() == tensor.data_ptr()
        cast[0] ^= 0xFF
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), cast)


def test_cast_keeps_its_source_alive() -> None:
    casts = [ops.cast_to_byte_tensor(torch.full((1000,), index)) for index in range(50)]
    gc.collect()
    rubbish = [torch.full((1000,), 255) for _ in range(50)]
    assert all(cast.view(torch.int64).tolist() == [index] * 1000 for index, cast in enumerate(casts))
    assert len(rubbish) == 50


def test_cast_of_lists() -> None:
    tensors = [torch.arange(10), torch.zeros(0), torch.tensor(1, dtype=torch.uint8)]
    for sequence in (tensors, tuple(tensors)):
        cast = ops.cast_to_byte_tensor(sequence)
        assert isinstance(cast, list)
        assert [part.numel() for part in cast] == [80, 0, 1]
        assert cast[0].data_ptr() == tensors[0].data_ptr()
    assert ops.cast_to_byte_tensor([]) == []


def test_cast_refuses_non_contiguous_tensors() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        ops.cast_to_byte_tensor(torch.zeros(4, 5).t())
    with pytest.raises(TypeError, match="src_tensor"):
        ops.cast_to_byte_tensor(b"bytes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="src_tensor"):
        ops.cast_to_byte_tensor([torch.zeros(1), 2])  # type: ignore[list-item]


def test_cast_of_a_parameter_is_no_part_of_the_graph() -> None:
    cast = ops.cast_to_byte_tensor(torch.nn.Parameter(torch.zeros(3)))
    assert not cast.requires_grad
