"""Tensors that are read on first use behave like tensors."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme import errors

from .states import assert_same

W = torch.arange(12, dtype=torch.float32).view(3, 4)
B = torch.tensor([1.5, -2.5, 0.5])


@pytest.fixture(params=["pt", "safetensors"])
def lazy(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / f"x.{request.param}"
    deepnvme.save({"w": W, "b": B, "one": torch.tensor(2)}, path)
    state: dict[str, Any] = deepnvme.load(path, lazy=True)
    return state


def is_read(tensor: torch.Tensor) -> bool:
    return "read=True" in repr(tensor)


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum of both": lambda w, b: w + b[:, None],
    "product with a number": lambda w, b: (2 * w, w / 2, b**2, -b, abs(b), w @ w.T),
    "comparison": lambda w, b: (w == 3, b > 0, torch.equal(w, w)),
    "functions": lambda w, b: (torch.stack([w[0, :3], b]), torch.cat([b, b]), torch.where(b > 0, b, -b)),
    "nested arguments": lambda w, b: torch.einsum("ij,i->j", [w, b]),
    "indexing": lambda w, b: (w[1], w[:, 2], w[..., None], w[b > 0], w[torch.tensor([0, 2])], b[-1]),
    "index by itself": lambda w, b: torch.arange(12)[w.long()],
    "rows": lambda w, b: list(w),
    "shapes": lambda w, b: (w.view(4, 3), w.reshape(b.shape[0], -1), w.view(torch.Size([2, 6])), w.expand(2, 3, 4)),
    "attributes": lambda w, b: (w.T, w.mT, w.data, w.real, w.requires_grad, w.is_leaf, w.grad),
    "numbers": lambda w, b: (b[0].item(), float(b[1]), bool(b[2]), int(w.sum()), b.tolist(), len(w)),
    "types": lambda w, b: (w.double(), w.to(torch.float16), w.cpu(), w.int().numpy().tolist(), w.contiguous()),
    "numpy": lambda w, b: (np.asarray(w).tolist(), w.numpy().sum().item()),
    "text": lambda w, b: (f"{b[0]:.2f}", str(w + 0), f"{w}"),
    "out": lambda w, b: torch.add(w, 1, out=torch.empty(3, 4)),
    "copies": lambda w, b: (copy.copy(w), copy.deepcopy(b), w.clone(), pickle.loads(pickle.dumps(b))),
    "autograd": lambda w, b: torch.autograd.grad((x := b.clone().requires_grad_()).mul(b).sum(), x),
    "where memory is": lambda w, b: (w.stride(), w.storage_offset(), w.untyped_storage().nbytes(), w.is_contiguous()),
    "a parameter": lambda w, b: (torch.nn.Parameter(b).data, b.detach() + 0),
    "a module": lambda w, b: torch.nn.functional.linear(torch.ones(1, 4), w, b),
    "dlpack": lambda w, b: torch.utils.dlpack.from_dlpack(w),
}


@pytest.mark.parametrize("name", USES)
def test_operations_read_the_tensor(lazy: dict[str, Any], name: str) -> None:
    assert not is_read(lazy["w"]) and not is_read(lazy["b"])
    assert_same(USES[name](lazy["w"], lazy["b"]), USES[name](W, B), name)
    assert_same(USES[name](lazy["w"], lazy["b"]), USES[name](W, B), f"{name} again")
    assert not is_read(lazy["one"])


def test_attributes_need_no_read(lazy: dict[str, Any]) -> None:
    w = lazy["w"]
    before = deepnvme.stats().bytes_read
    known = (w.shape, w.size(), w.size(1), w.dtype, w.device, w.ndim, w.dim(), w.numel(), w.nbytes, len(w), w.stride())
    assert known == (W.shape, W.size(), 4, W.dtype, W.device, 2, 2, 12, 48, 3, W.stride())
    assert isinstance(w, torch.Tensor)
    assert torch.is_tensor(w)
    assert hash(w) == hash(w)
    assert "shape=(3, 4)" in repr(w)
    assert deepnvme.stats().bytes_read == before
    assert not is_read(w)


def test_changes_stay(lazy: dict[str, Any]) -> None:
    w = lazy["w"]
    w += 1
    w[0, 0] = 7
    lazy["b"].zero_()
    expected = W + 1
    expected[0, 0] = 7
    assert torch.equal(w, expected)
    assert lazy["b"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_takes_them_and_learns(lazy: dict[str, Any], assign: bool) -> None:
    models = [torch.nn.Linear(4, 3) for _ in range(2)]
    models[0].load_state_dict({"weight": W.clone(), "bias": B.clone()})
    models[1].load_state_dict({"weight": lazy["w"], "bias": lazy["b"]}, assign=assign)
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).pow(2).sum().backward()
        optimizer.step()
    assert not torch.equal(models[0].weight, W)
    for mine, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert isinstance(mine, torch.nn.Parameter)
        assert torch.equal(mine, expected)
    state = {name: value + 0 for name, value in models[1].state_dict().items()}
    assert_same(state, dict(models[0].state_dict()))


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_lazy_tensors_are_saved_as_tensors(lazy: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    deepnvme.save(lazy, tmp_path / f"y.{suffix}")
    torch.save(lazy, tmp_path / "z.pt")
    for again in (deepnvme.load(tmp_path / f"y.{suffix}"), torch.load(tmp_path / "z.pt")):
        assert_same({name: again[name] for name in ("w", "b", "one")}, {"w": W, "b": B, "one": torch.tensor(2)})


def test_several_threads_read_once(lazy: dict[str, Any]) -> None:
    before = deepnvme.stats().requests
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(lazy["w"].data_ptr())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert deepnvme.stats().requests - before <= 1


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_damage_is_found_at_the_first_use(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    deepnvme.save({"a": torch.ones(1 << 18), "b": torch.ones(3)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    lazy = deepnvme.load(path, lazy=True, verify="full")
    assert torch.equal(lazy["b"], torch.ones(3))
    with pytest.raises(errors.ChecksumError):
        lazy["a"] + 1
    with pytest.raises(errors.ChecksumError):
        lazy["a"].sum()


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantised_views_are_read_at_once(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randint(0, 256, (28,), dtype=torch.uint8)
    deepnvme.save({"a": values.view(dtype), "b": torch.ones(3)}, tmp_path / "q.pt")
    loaded = deepnvme.load(tmp_path / "q.pt", lazy=True)
    assert loaded["a"].dtype == dtype
    assert bytes(loaded["a"].untyped_storage().tolist()) == bytes(values.tolist())
    assert torch.equal(loaded["b"] + 1, torch.full((3,), 2.0))
