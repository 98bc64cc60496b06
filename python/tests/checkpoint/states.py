"""States of every kind, their comparison, and manifests."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import torch


def assert_same(actual: Any, expected: Any, name: str = "state") -> None:
    """Compare types, structure and bits."""
    assert type(actual) is type(expected), f"{name}: {type(actual)} for {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert_same_tensor(actual, expected, name)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), name
        for key in expected:
            assert_same(actual[key], expected[key], f"{name}.{key}")
        if isinstance(expected, OrderedDict):
            assert_same(vars(actual), vars(expected), f"{name}.__dict__")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), name
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{name}.{index}")
    else:
        assert actual == expected or (actual != actual and expected != expected), name  # noqa: PLR0124


def assert_same_tensor(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    described = [
        (t.dtype, t.shape, t.layout, t.requires_grad, t.device, t.is_quantized, t.is_conj(), t.is_neg())
        for t in (actual, expected)
    ]
    assert described[0] == described[1], name
    assert_same(vars(actual), vars(expected), f"{name}.__dict__")
    actual, expected = actual.detach(), expected.detach()
    if expected.is_quantized:
        assert actual.qscheme() == expected.qscheme(), name
        actual, expected = actual.int_repr(), expected.int_repr()
    if expected.layout is torch.sparse_coo:
        assert torch.equal(actual._indices(), expected._indices()), name
        actual, expected = actual._values(), expected._values()
    elif expected.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    assert actual.stride() == expected.stride(), name
    if expected.is_meta:
        return
    assert bits(actual) == bits(expected), name


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.dtype.itemsize
    return bytes(flat[start : start + tensor.numel() * tensor.dtype.itemsize].tolist())


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bits, without zeros; for bools, 0 and 1."""
    count = dtype.itemsize
    for size in shape:
        count *= size
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    flat = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def everything() -> dict[str, Any]:
    """One of each kind of object that torch saves."""
    base = torch.randn(100, 50)
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    with_attribute = torch.randn(3)
    with_attribute.note = "seen"  # type: ignore[attr-defined]
    return {
        "dtypes": {str(dtype): random((7, 3), dtype) for dtype in DTYPES},
        "base": base, "view": base[3:, ::2], "transposed": base.t(), "as_int": base.view(torch.int32),
        "expanded": torch.randn(3, 1).expand(3, 5),
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 5), "large": torch.randn(700, 1000),
        "requires_grad": torch.randn(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "frozen": torch.nn.Parameter(torch.randn(5), requires_grad=False),
        "attribute": with_attribute,
        "plain": [1, "x\u00e4\ud83d\ude80".encode("utf-16", "surrogatepass").decode("utf-16"), None, True, 2**70, -3,
                  2**40, b"bytes", bytearray(b"q"), (1, (2,), ()), {1, 2}, frozenset({3}), 1.5, float("nan"), 1 + 2j],
        "ordered": OrderedDict(b=1, a=torch.randn(2)), "ints": {1: "a", -(2**33): "b"},
        "coo": torch.eye(5).to_sparse(), "csr": torch.eye(5).to_sparse_csr(), "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "quantised": torch.quantize_per_tensor(torch.randn(5), 0.1, 2, torch.qint8),
        "by_channel": torch.quantize_per_channel(torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.tensor([1, 2]), 0,
                                                 torch.quint8),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "imaginary": torch.randn(3, dtype=torch.complex64).conj().imag,
        "meta": torch.empty(3, 4, device="meta"),
        "dtype": torch.float16, "size": torch.Size([1, 2]), "device": torch.device("cpu"),
        "model": model.state_dict(), "optimizer": optimizer.state_dict(),
    }  # fmt: skip


def manifest_of_missing(count: int) -> str:
    """Return the text of a manifest that lists this many checkpoints, none of which exists."""
    same = {"nbytes": 1, "time": "", "index_offset": 0, "index_nbytes": 1, "torch": "", "deepnvme": ""}
    entries = [{"file": f"step-{step:08}.pt", "step": step, "index_crc64": "0" * 16, **same} for step in range(count)]
    return json.dumps({"version": 1, "checkpoints": entries})
