"""Torch archives: torch loads what deepnvme saves, and the reverse, bit for bit."""

from __future__ import annotations

import io
import re
import subprocess
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deepnvme
from deepnvme import errors

from .states import DTYPES, assert_same, everything, random

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("options", [{}, {"mmap": True}, {"map_location": "cpu"}])
def test_torch_reads_every_kind_of_object(tmp_path: Path, options: dict[str, Any]) -> None:
    state = everything()
    state["plain"] = [thing for thing in state["plain"] if not isinstance(thing, frozenset)]  # torch refuses those
    path = tmp_path / "state.pt"
    assert deepnvme.save(state, path) == path.stat().st_size
    assert_same(torch.load(path, weights_only=True, **options), state)


def test_every_kind_of_object_is_restored(tmp_path: Path) -> None:
    state = everything()
    deepnvme.save(state, tmp_path / "ours.pt")
    assert_same(deepnvme.load(tmp_path / "ours.pt", verify="full"), state)
    del state["as_int"]  # torch.save has one element type for each storage
    torch.save(state, tmp_path / "torchs.pt")
    assert_same(deepnvme.load(tmp_path / "torchs.pt", verify="full"), state)


def test_tools_for_zip_files_find_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    deepnvme.save(everything(), path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
        assert archive.namelist()[0] == "model/data.pkl"
    try:
        result = subprocess.run(["unzip", "-tq", path], capture_output=True, check=False)
    except FileNotFoundError:
        return
    assert result.returncode == 0, result.stdout


def test_large_tensors_are_aligned_for_direct_io(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    deepnvme.save({"a": torch.randn(7), "b": torch.randn(1000, 1000), "c": torch.randn(300_000)}, path)
    assert path.stat().st_size % 4096 == 0
    places = {
        name: (place, size)
        for name, size, _, place in deepnvme._deepnvme._CheckpointReader(path, None, True).storages()
    }
    assert places["data/0"][0] % 64 == 0
    assert places["data/1"][0] % 4096 == 0
    assert places["data/2"][0] % 4096 == 0


def test_shared_memory_stays_shared(tmp_path: Path) -> None:
    base = torch.randn(1000)
    tied = torch.nn.Parameter(torch.randn(5))
    state = {
        "base": base,
        "view": base[10:20],
        "ints": base.view(torch.int32)[5:],
        "tied": [tied, tied],
        "same": (base,),
    }
    path = tmp_path / "x.pt"
    deepnvme.save(state, path)
    for loaded in (deepnvme.load(path), torch.load(path, weights_only=True)):
        loaded["base"][12] = 42.0
        assert loaded["view"][2] == 42.0
        assert loaded["ints"][7].view(torch.float32) == 42.0
        assert loaded["tied"][0] is loaded["tied"][1]
        assert loaded["same"][0] is loaded["base"]
    assert path.stat().st_size < 3 * 4096


def test_cyclic_states_are_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {"list": [1]}
    state["list"].append(state["list"])
    state["self"] = state
    state["tuple"] = ([],)
    state["tuple"][0].append(state["tuple"])
    deepnvme.save(state, tmp_path / "x.pt")
    loaded = deepnvme.load(tmp_path / "x.pt")
    assert loaded["self"] is loaded
    assert loaded["list"][1] is loaded["list"]


def test_hooks_of_one_tensor_are_not_those_of_another(tmp_path: Path) -> None:
    deepnvme.save({"a": torch.randn(2, requires_grad=True), "b": torch.randn(2, requires_grad=True)}, tmp_path / "x.pt")
    for state in (deepnvme.load(tmp_path / "x.pt"), torch.load(tmp_path / "x.pt", weights_only=True)):
        seen: list[str] = []
        state["a"].register_hook(lambda grad, seen=seen: seen.append("a"))
        (state["a"].sum() + state["b"].sum()).backward()
        assert seen == ["a"]


def test_the_same_state_gives_the_same_bytes(tmp_path: Path) -> None:
    state = {"a": torch.arange(100_000), "b": OrderedDict(x=torch.ones(3))}
    (tmp_path / "1").mkdir()
    deepnvme.save(state, tmp_path / "x.pt")
    deepnvme.save(state, tmp_path / "1" / "x.pt")
    assert (tmp_path / "x.pt").read_bytes() == (tmp_path / "1" / "x.pt").read_bytes()


def test_the_fast_pickler_and_pythons_agree(tmp_path: Path) -> None:
    from deepnvme._checkpoint.pickler import Pickler
    from deepnvme._deepnvme import _pickle_plain

    model = torch.nn.Linear(3, 4)
    shared = [torch.randn(4)]
    state = {"m": model.state_dict(), "p": list(model.parameters()), "n": [1, 300, 70_000, 2**40, -1, 1.5, "a", None],
             "s": (shared, shared, "a"), "o": OrderedDict(z=1, y=()), "t": torch.randn(3, 4).t()}  # fmt: skip
    state["o"].move_to_end("z")  # type: ignore[attr-defined]
    plain = _pickle_plain(state)
    assert plain is not None
    file = io.BytesIO()
    pickler = Pickler(file)
    pickler.dump(state)
    assert [s.data_ptr() for s in plain[1]] == [s.data_ptr() for s in pickler.storages]

    def load(pickle: bytes, storages: list[Any]) -> Any:
        path = tmp_path / "x.pt"
        options = {"engine": None, "durability": "none", "checksums": True, "staging": None}
        after = [("version", b"3\n")]
        plan = deepnvme._deepnvme._plan_archive(path, [("data.pkl", pickle)], storages, after, options)
        plan.start().wait(None, True)
        return torch.load(path, weights_only=True)

    assert_same(load(*plain), load(file.getvalue(), pickler.storages))
    assert_same(load(*plain), state)


@pytest.mark.parametrize("odd", [frozenset({1}), 2**80, b"x", "\ud800", {1, 2}, torch.float32, object])
def test_pythons_pickler_handles_the_rest(odd: object) -> None:
    assert deepnvme._deepnvme._pickle_plain({"a": [odd]}) is None


SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)
TENSORS = st.builds(random, SHAPES, st.sampled_from(DTYPES), st.integers(0, 99))
LEAVES = st.one_of(TENSORS, st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(min_size=1))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers()), inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=STATES)
def test_any_state_is_read_by_torch_and_read_from_torch(tmp_path: Path, state: object) -> None:
    ours, torchs = tmp_path / "ours.pt", tmp_path / "torchs.pt"
    deepnvme.save(state, ours, durability="none")
    torch.save(state, torchs)
    assert_same(torch.load(ours, weights_only=True), state)
    assert_same(deepnvme.load(ours, verify="full"), state)
    assert_same(deepnvme.load(torchs, verify="full"), state)


def test_many_small_tensors(tmp_path: Path) -> None:
    state = {f"layer.{index}": torch.randn(index % 50) for index in range(3000)}
    deepnvme.save(state, tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True), state)
    assert_same(deepnvme.load(tmp_path / "x.pt", verify="full"), state)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_sizes_around_every_border(tmp_path: Path, suffix: str) -> None:
    borders = (64, 4096, 256 << 10, 1 << 20, 2 << 20)
    state = {f"{size + more}": random((size + more,), torch.uint8, size) for size in borders for more in (-1, 0, 1)}
    path = tmp_path / f"x{suffix}"
    deepnvme.save(state, path)
    loaded = deepnvme.load(path, verify="full")
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_a_stripe_set_is_one_checkpoint(tmp_path: Path) -> None:
    parts = [tmp_path / f"disk{index}" / "x.pt" for index in range(3)]
    for part in parts:
        part.parent.mkdir()
    stripes = deepnvme.StripeSet(parts, stripe_bytes=1 << 20)
    state = {"a": torch.randn(1000, 1000), "b": torch.randn(5)}
    deepnvme.save(state, stripes)
    assert_same(deepnvme.load(stripes, verify="full"), state)


def test_torch_save_through_an_open_file_still_works(tmp_path: Path) -> None:
    state = {"a": torch.randn(1000, 1000)}
    with deepnvme.open(tmp_path / "x.pt", "wb") as file:
        torch.save(state, file)
    assert_same(deepnvme.load(tmp_path / "x.pt"), state)


@pytest.mark.parametrize("shared", [0, 1, 3])
def test_damage_names_the_tensors_that_have_it(tmp_path: Path, shared: int) -> None:
    weight = torch.randn(300_000)
    state = {"model": {"weight": weight, **{f"view {index}": weight[index:] for index in range(shared)}}}
    deepnvme.save(state, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(weight.numpy().tobytes()[:64]) + 5] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    others = {0: "", 1: ' and "model.view 0"', 3: " and 3 more tensors"}[shared]
    expected = re.escape(f'the bytes of "model.weight"{others} (record "data/0") at offset ')
    with pytest.raises(errors.ChecksumError, match=expected):
        deepnvme.load(tmp_path / "x.pt", verify="full")
    with pytest.raises(errors.ChecksumError, match=expected):
        deepnvme.load(tmp_path / "x.pt", lazy=True, verify="full")["model"]["weight"].sum()
