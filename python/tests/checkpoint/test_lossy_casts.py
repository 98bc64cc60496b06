"""``cast=True`` converts precision. A cast that loses more is refused before any tensor changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme._utils.tensors import cast_refusal
from deepnvme.errors import InvalidArgumentError

REFUSED = [
    (torch.complex64, torch.float32, "the imaginary parts"),
    (torch.complex64, torch.bool, "the imaginary parts"),
    (torch.float32, torch.int64, "the fractions"),
    (torch.float16, torch.bool, "all but whether"),
    (torch.int32, torch.bool, "all but whether"),
    (torch.int64, torch.int32, "the numbers beyond its range"),
    (torch.int8, torch.uint8, "the numbers beyond its range"),
    (torch.uint8, torch.int8, "the numbers beyond its range"),
    (torch.float32, torch.float8_e8m0fnu, "the signs"),
]
# A state, and a target that torch cannot convert it to.
IMPOSSIBLE = {
    "from quantized": (torch.quantize_per_tensor(torch.randn(6), 0.1, 3, torch.qint8), torch.zeros(6)),
    "from float4": (torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.zeros(6)),
    "to float4": (torch.randn(6), torch.zeros(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
    "from bits": (torch.arange(6, dtype=torch.uint8).view(torch.bits8), torch.zeros(6, dtype=torch.uint8)),
}
ALLOWED = [
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.complex64),
    (torch.int64, torch.float32),
    (torch.bool, torch.uint8),
    (torch.uint8, torch.int16),
    (torch.complex128, torch.complex64),
]


def values(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(6).to(dtype)


@pytest.mark.parametrize("name", ["state.pt", "state.safetensors"])
@pytest.mark.parametrize(("from_dtype", "to_dtype", "lost"), REFUSED)
def test_a_cast_that_loses_more_than_precision_is_refused(
    tmp_path: Path, name: str, from_dtype: torch.dtype, to_dtype: torch.dtype, lost: str
) -> None:
    deepnvme.save({"a": torch.ones(3), "b": values(from_dtype)}, tmp_path / name)
    into = {"a": torch.zeros(3), "b": torch.zeros(6).to(to_dtype)}
    before = into["b"].clone()
    with pytest.raises(InvalidArgumentError, match=f"b is {from_dtype}.*lose {lost}.*; fill a tensor of {from_dtype}"):
        deepnvme.load(tmp_path / name, into=into, cast=True)
    assert not into["a"].any()
    assert torch.equal(into["b"].view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(("from_dtype", "to_dtype"), ALLOWED)
def test_other_casts_are_as_in_torch(tmp_path: Path, from_dtype: torch.dtype, to_dtype: torch.dtype) -> None:
    deepnvme.save({"a": values(from_dtype)}, tmp_path / "state.pt")
    into = {"a": torch.zeros(6).to(to_dtype)}
    deepnvme.load(tmp_path / "state.pt", into=into, cast=True)
    assert torch.equal(into["a"], values(from_dtype).to(to_dtype))


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_cast_that_torch_lacks_is_refused_before_any_read(tmp_path: Path, case: str) -> None:
    stored, target = IMPOSSIBLE[case]
    deepnvme.save({"a": torch.ones(3), "b": stored}, tmp_path / "state.pt")
    into = {"a": torch.zeros(3), "b": target}
    refusal = f"b is {stored.dtype} in the file, and {target.dtype} in into, and torch does not convert it"
    with pytest.raises(InvalidArgumentError, match=refusal):
        deepnvme.load(tmp_path / "state.pt", into=into, cast=True)
    assert not into["a"].any()


def test_every_refusal_of_torch_is_one_of_ours() -> None:
    types = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    for from_dtype in types:
        for to_dtype in types:
            if from_dtype != to_dtype and not cast_refusal(from_dtype, to_dtype):
                torch.empty(2, dtype=to_dtype).copy_(torch.empty(2, dtype=from_dtype))
                assert torch.can_cast(from_dtype, to_dtype), (from_dtype, to_dtype)


def test_dcp_refuses_them_as_well(tmp_path: Path) -> None:
    from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter

    dcp: Any = torch.distributed.checkpoint
    dcp.save({"a": torch.randn(8, dtype=torch.complex64)}, storage_writer=DeepnvmeWriter(tmp_path / "dcp"))
    with pytest.raises(dcp.CheckpointException, match="would lose the imaginary parts"):
        dcp.load({"a": torch.zeros(8)}, storage_reader=DeepnvmeReader(tmp_path / "dcp"))
