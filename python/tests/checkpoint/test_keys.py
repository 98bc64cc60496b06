"""Keys of states are restored exactly, and different keys stay different."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import errors

from .test_hostile import Runs, archive

# Results of `os.listdir` for a name that is not UTF-8, and halves of a character.
ODD = ["\udcff", "a\udc80b", "\ud83d", "\ude80", "\ud83d\ude80"[:1] + "x", "\\udcff", "ä\udcff"]


def test_lone_surrogates_come_back(tmp_path: Path) -> None:
    state: dict[str, Any] = {key: torch.full((2,), float(index)) for index, key in enumerate(ODD)}
    state["nested"] = {key: [key, {key}] for key in ODD}
    for write in (deepnvme.save, torch.save):
        write(state, tmp_path / "x.pt")
        for lazy in (False, True):
            loaded = deepnvme.load(tmp_path / "x.pt", lazy=lazy)
            assert list(loaded) == list(state)
            assert loaded["nested"] == state["nested"]
            assert all(torch.equal(loaded[key], state[key]) for key in ODD)
        assert list(torch.load(tmp_path / "x.pt")) == list(state)


def test_lone_surrogates_are_chosen_and_filled(tmp_path: Path) -> None:
    state = dict(zip(["\udcff", "\udcfe", "c"], torch.randn(3, 2), strict=True))
    deepnvme.save(state, tmp_path / "x.pt")
    assert list(deepnvme.load(tmp_path / "x.pt", only="\udcff")) == ["\udcff"]
    assert list(deepnvme.load(tmp_path / "x.pt", only=["\udcff", "c"])) == ["\udcff", "c"]
    into = {key: torch.empty(2) for key in state}
    deepnvme.load(tmp_path / "x.pt", into=into)
    assert all(torch.equal(into[key], state[key]) for key in state)


def test_a_safetensors_file_refuses_lone_surrogates(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=r"udcff.*\.pt"):
        deepnvme.save({"a\udcff": torch.ones(2)}, tmp_path / "x.safetensors")
    for metadata in ({"\udcff": "x"}, {"x": "\udcff"}):
        with pytest.raises(errors.InvalidArgumentError, match="udcff"):
            deepnvme.save({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata=metadata)
    assert not list(tmp_path.iterdir())


def test_text_that_is_not_utf8_is_corrupt(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", b"\x80\x02}X\x02\x00\x00\x00\xff\xfeK\x01s.")
    with pytest.raises(errors.CorruptFileError, match="UTF-8"):
        deepnvme.load(path)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)},
        {1: torch.ones(2), "1": torch.zeros(2)},
        {None: torch.ones(2), "None": torch.zeros(2)},
        {True: torch.ones(2), "True": torch.zeros(2)},
        {"\udcff": torch.ones(2), "\\udcff": torch.zeros(2)},
        {"a": [torch.ones(2)], "a.0": torch.zeros(2)},
    ],
)
def test_two_tensors_of_one_name_are_not_filled(tmp_path: Path, state: dict[Any, Any]) -> None:
    deepnvme.save(state, tmp_path / "x.pt")
    empty = {key: [torch.empty(2)] if isinstance(value, list) else {"b": torch.empty(2)} if isinstance(value, dict)
             else torch.empty(2) for key, value in state.items()}  # fmt: skip
    with pytest.raises(errors.InvalidArgumentError) as caught:
        deepnvme.load(tmp_path / "x.pt", into=empty)
    for key in state:
        assert repr(key) in str(caught.value)


def test_a_name_that_the_file_has_twice_is_not_filled(tmp_path: Path) -> None:
    deepnvme.save({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2), "c": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(errors.InvalidArgumentError, match=r"'a\.b'.*two tensors|two tensors.*'a\.b'"):
        deepnvme.load(tmp_path / "x.pt", into={"a.b": torch.empty(2)})
    into = {"c": torch.empty(1)}
    assert deepnvme.load(tmp_path / "x.pt", into=into)["c"].item() == 1


class Subclass(torch.Tensor):
    pass


def other_entries() -> dict[str, Any]:
    noted = torch.randn(3)
    noted.note = "seen"  # type: ignore[attr-defined]
    return {
        "noted": noted,
        "parameter": torch.nn.Parameter(noted),
        "buffer": torch.nn.Buffer(torch.randn(3)),
        "subclass": torch.randn(3).as_subclass(Subclass),
        "storage": torch.FloatStorage(4),  # type: ignore[no-untyped-call]
        "untyped": torch.UntypedStorage(4),  # type: ignore[no-untyped-call]
        "sparse": torch.eye(3).to_sparse(),
        "quantised": torch.quantize_per_tensor(torch.randn(5), 0.1, 2, torch.qint8),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "unsafe": Runs(os.system, "true"),
        "set of unsafe": [Runs(os.system, "true")],
    }


@pytest.mark.filterwarnings("ignore")
def test_entries_that_were_not_asked_for_are_not_built(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    for name, value in other_entries().items():
        torch.save({"a": torch.ones(3), "epoch": 3, "bits": {1}, name: value}, path)
        every: list[dict[str, Any]] = [{}, {"lazy": True}, {"device": "meta"}]
        for options in every:
            loaded = deepnvme.load(path, only="a", **options)
            assert loaded["epoch"] == 3, "plain values stay"
            assert loaded["bits"] == {1}
            assert name not in loaded, name
        assert torch.equal(deepnvme.load(path, only="a")["a"], torch.ones(3))


@pytest.mark.filterwarnings("ignore")
def test_tensors_with_attributes_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    state = other_entries()
    torch.save({key: state[key] for key in ("noted", "buffer", "subclass")} | {"a": torch.ones(3)}, path)
    with torch.serialization.safe_globals([Subclass, torch.nn.Buffer]):
        for key in ("noted", "buffer", "subclass"):
            for lazy in (False, True):
                loaded = deepnvme.load(path, only=key, lazy=lazy)
                assert list(loaded) == [key]
                assert torch.equal(loaded[key].detach(), state[key].detach())
        assert deepnvme.load(path, only="noted")["noted"].note == "seen"
        into = {key: torch.empty(3) for key in ("noted", "buffer", "subclass")}
        deepnvme.load(path, into=into)
        assert all(torch.equal(into[key], state[key].as_subclass(torch.Tensor)) for key in into)
    # No object of a class is built there.
    deepnvme.load(path, into={"subclass": torch.empty(3)})
