"""Lazy complex conjugates and negatives, and every way to read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deepnvme
from deepnvme.integrations._torch_load import load_as_torch

from .states import assert_same
from .test_convert import convert

pytestmark = pytest.mark.filterwarnings("ignore:.*(experimental|deprecated)")


def signed() -> dict[str, torch.Tensor]:
    base = torch.tensor([[1 + 2j, 3 - 4j, 5 + 6j], [7 - 8j, 9 + 1j, -2 + 3j]])
    state = {
        "conj": torch.tensor([1 + 2j]).conj(),
        "shared": base, "conj of shared": base.conj(), "turned": base.t().conj(), "part": base[:, 1:].conj(),
        "neg": base.clone().conj().imag, "neg part": base.clone().conj().imag[1], "neg complex": torch._neg_view(base),
        "both": torch._neg_view(base.conj()), "c128": base.to(torch.complex128).conj(),
        "c128 neg": (base.to(torch.complex128) + 1).conj().imag, "plain": torch.randn(3),
        "large": torch.randn(300_000, dtype=torch.complex64).conj(),
    }  # fmt: skip
    assert state["neg"].is_neg() and state["both"].is_neg() and state["both"].is_conj()
    return state


def resolved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.resolve_conj().resolve_neg().contiguous() for name, tensor in state.items()}


@pytest.fixture(params=["deepnvme", "torch"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    state = signed()
    (deepnvme.save if request.param == "deepnvme" else torch.save)(state, tmp_path / "x.pt")
    return tmp_path / "x.pt", state


def test_they_are_loaded(file: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = file
    assert_same(deepnvme.load(path), state)
    assert_same(load_as_torch(path, lambda storage, _: storage), state)
    for name, tensor in deepnvme.load(path, lazy=True).items():
        assert torch.equal(torch.clone(tensor), torch.clone(state[name])), name
        assert torch.equal(torch.clone(deepnvme.load(path, only=name)[name]), torch.clone(state[name])), name


def test_others_are_filled_with_them(file: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, state = file
    for targets in (
        {name: torch.empty_like(tensor) for name, tensor in resolved(state).items()},
        {name: torch.zeros(tensor.shape, dtype=tensor.dtype).mT if tensor.dim() > 1 else torch.zeros_like(tensor)
         for name, tensor in resolved({name: t.mT if t.dim() > 1 else t for name, t in state.items()}).items()},
    ):  # fmt: skip
        deepnvme.load(path, into=targets)
        for name, tensor in resolved(state).items():
            assert torch.equal(torch.clone(targets[name]), tensor), name
    lazy = {
        "conj": torch.zeros(1, dtype=torch.complex64).conj(),
        "neg": torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
    }
    deepnvme.load(path, into=lazy)
    for name, tensor in lazy.items():
        assert torch.equal(torch.clone(tensor), resolved(state)[name]), name
    with_cast = {"neg": torch.empty(2, 3, dtype=torch.float64)}
    deepnvme.load(path, into=with_cast, cast=True)
    assert torch.equal(with_cast["neg"], resolved(state)["neg"].double())


def test_they_are_converted(file: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    path, state = file
    convert(path, tmp_path / "y.pt")
    assert_same(deepnvme.load(tmp_path / "y.pt"), state)
    assert_same(torch.load(tmp_path / "y.pt"), state)
    state = {name: tensor for name, tensor in state.items() if tensor.dtype != torch.complex128}
    deepnvme.save(state, path)
    convert(path, tmp_path / "y.safetensors")
    loaded = load_file(tmp_path / "y.safetensors")
    for name, tensor in resolved(state).items():
        assert torch.equal(loaded[name], tensor), name


def test_they_are_saved_resolved(tmp_path: Path) -> None:
    state: dict[str, Any] = {name: tensor for name, tensor in signed().items() if tensor.dtype != torch.complex128}
    deepnvme.save(state, tmp_path / "x.safetensors")
    for loaded in (load_file(tmp_path / "x.safetensors"), deepnvme.load(tmp_path / "x.safetensors", verify="full")):
        for name, tensor in resolved(state).items():
            assert torch.equal(loaded[name], tensor), name


@pytest.mark.parametrize("is_later", [False, True])
def test_a_negative_view_with_another_dtype_than_its_storage(tmp_path: Path, is_later: bool) -> None:
    base = torch.randn(100, dtype=torch.complex128)
    state = {"all": base, "neg": base.conj().imag, "part": base[7:].conj().imag[::3], "both": base.conj()}
    if is_later:
        state = dict(reversed(state.items()))
    # More than tensors, so that Python pickles it.
    deepnvme.save({**state, "more": {1, 2}}, tmp_path / "a.pt")
    loaded = deepnvme.load(tmp_path / "a.pt", verify="full")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert loaded["neg"].untyped_storage().data_ptr() == loaded["all"].untyped_storage().data_ptr()
