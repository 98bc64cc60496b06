"""``load(into=)`` of many tensors: a few large reads, and the same result as tensor by tensor."""

from __future__ import annotations

import zipfile
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deepnvme
from deepnvme._checkpoint import load_into
from deepnvme._deepnvme import _PlainTargets
from deepnvme.errors import CorruptFileError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


SUFFIXES = (".pt", ".safetensors")


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    sizes = torch.randint(1024, 16384, (count,), generator=generator)
    return {f"layer.{i}.weight": torch.randn(int(size), generator=generator) for i, size in enumerate(sizes)}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether shape, dtype and bytes are equal."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for tensor in (one, other)]
    return bool(torch.equal(*(tensor.view(torch.uint8) for tensor in flat)))


@pytest.mark.parametrize("writer", ["deepnvme.pt", "torch.pt", "deepnvme.safetensors"])
def test_neighbours_in_the_file_are_read_together(tmp_path: Path, writer: str) -> None:
    state = small_tensors(400)
    path = tmp_path / writer
    if writer == "torch.pt":
        torch.save(state, path)
    else:
        deepnvme.save(state, path)
    into = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in reversed(state.items())}
    with deepnvme.Engine() as engine:
        deepnvme.load(path, into=into, engine=engine, verify="off")
        stats = engine.stats()
    assert all(same(into[name], tensor) for name, tensor in state.items())
    # One operation a block, and a few for the index.
    assert stats.ops <= path.stat().st_size / (1 << 20) + 20
    assert stats.requests <= 10


@contextmanager
def one_by_one() -> Iterator[None]:
    """Fill each target for itself, as with a release of torch that does not describe tensors in C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_into, "_PlainTargets", lambda _targets: _PlainTargets({}))
        yield


DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 5), (5, 1, 4), (2049,), (70, 33))
KINDS = ("plain", "parameter", "transposed", "slice", "cast", "tied", "subclass", "negative")


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Draw a state, and the kind of each target."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    count = draw(st.integers(1, 12))
    state = {}
    for number in range(count):
        shape, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        if dtype == torch.bool:
            state[f"t{number}"] = torch.randint(2, shape, generator=generator, dtype=torch.uint8).bool()
        else:
            raw = torch.randint(256, (nbytes,), generator=generator, dtype=torch.int16).to(torch.uint8)
            state[f"t{number}"] = torch.empty(shape, dtype=dtype).view(-1).copy_(raw.view(dtype)).view(shape)
    return state, {name: draw(st.sampled_from(KINDS)) for name in state}


class Subclass(torch.Tensor):
    """A tensor of another class."""


def targets(state: dict[str, torch.Tensor], kinds: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, tensor in state.items():
        empty = torch.zeros(tensor.shape, dtype=tensor.dtype)
        match kinds[name]:
            case "parameter" if tensor.is_floating_point():
                made[name] = torch.nn.Parameter(empty)
            case "transposed" if tensor.ndim == 2:
                made[name] = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).t()
            case "slice" if tensor.ndim:
                wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
                made[name] = wide[..., 1 : tensor.shape[-1] + 1]
            case "cast" if tensor.dtype == torch.float32:
                made[name] = torch.zeros(tensor.shape, dtype=torch.float64)
            case "subclass":
                made[name] = empty.as_subclass(Subclass)
            case "negative" if tensor.dtype == torch.float32:
                made[name] = torch._neg_view(empty)
            case _:
                made[name] = empty
    return made


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=pairs())
def test_both_ways_fill_the_same_bytes(tmp_path: Path, suffix: str, pair: Any) -> None:
    state, kinds = pair
    path = tmp_path / f"state{suffix}"
    if suffix == ".safetensors":
        state = {name: tensor for name, tensor in state.items() if tensor.dtype != torch.float8_e4m3fn}
    deepnvme.save(state, path, durability="none")
    if not state:
        return
    first, second = targets(state, kinds), targets(state, kinds)
    deepnvme.load(path, into=first, cast=True)
    with one_by_one():
        deepnvme.load(path, into=second, cast=True)
    for name, tensor in state.items():
        assert same(first[name], second[name]), name
        assert same(first[name].to(tensor.dtype), tensor) or kinds[name] == "cast", name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plain_target_and_a_part_of_it_are_refused_together(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"state{suffix}"
    deepnvme.save({"whole": torch.randn(10), "part": torch.randn(4).double(), "alone": torch.randn(3)}, path)
    whole, alone = torch.zeros(10), torch.zeros(3)
    # A cast: it is no plain target.
    into = {"whole": whole, "part": whole[2:6], "alone": alone}
    with pytest.raises(InvalidArgumentError, match=r"whole.* share a part|part.* share a part"):
        deepnvme.load(path, into=into, cast=True)
    assert not whole.any()
    assert not alone.any()


def test_a_name_that_the_file_contains_twice_is_ambiguous(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    deepnvme.save({"a": {"b": torch.randn(3)}, "a.b": torch.randn(3), "c": torch.randn(2)}, path)
    into = {"a.b": torch.zeros(3), "c": torch.zeros(2)}
    for way in (one_by_one, None):
        with way() if way else nullcontext(), pytest.raises(InvalidArgumentError, match="ambiguous"):
            deepnvme.load(path, into=into)
    assert not into["c"].any()


def rewritten(source: Path, target: Path, extra: bytes) -> None:
    """Write an archive again, with an extra field in each header."""
    with zipfile.ZipFile(source) as read:
        records = [(info.filename, read.read(info)) for info in read.infolist()]
    with zipfile.ZipFile(target, "w") as write:
        for name, data in records:
            info = zipfile.ZipInfo(name)
            info.extra = extra
            write.writestr(info, data)


def test_records_that_lie_elsewhere_are_found(tmp_path: Path) -> None:
    state = small_tensors(40)
    path, moved = tmp_path / "torch.pt", tmp_path / "moved.pt"
    torch.save(state, path)
    rewritten(path, moved, b"XX\x05\x00abcde")
    assert torch.load(moved, weights_only=True).keys() == state.keys()
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    deepnvme.load(moved, into=into)
    assert all(same(into[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("verify", ["auto", "full", "off"])
def test_a_damaged_header_before_a_plain_target_is_found(tmp_path: Path, verify: Any) -> None:
    state = small_tensors(40)
    path = tmp_path / "state.pt"
    deepnvme.save(state, path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        record = next(info for info in archive.infolist() if info.filename.endswith("data/7"))
    # A letter of the name.
    data[record.header_offset + 31] ^= 1
    path.write_bytes(data)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.raises((CorruptFileError, deepnvme.errors.ChecksumError)) as caught:
        deepnvme.load(path, into=into, verify=verify)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("verify", ["auto", "full", "off"])
@pytest.mark.parametrize("writer", [torch.save, deepnvme.save])
def test_a_record_fills_several_tensors(tmp_path: Path, writer: Any, verify: Any) -> None:
    tied = torch.randn(400_000)
    writer({"embed": tied, "head": tied, "other": torch.randn(5)}, tmp_path / "tied.pt")
    into = {"embed": torch.zeros(400_000), "head": torch.zeros(400_000), "other": torch.zeros(5)}
    deepnvme.load(tmp_path / "tied.pt", into=into, verify=verify)
    assert same(into["embed"], tied)
    assert same(into["head"], tied)


def test_an_inference_tensor_that_a_copy_would_fill_is_refused_before_anything_changes(tmp_path: Path) -> None:
    deepnvme.save({"a": torch.randn(400), "b": torch.randn(400)}, tmp_path / "state.pt")
    with torch.inference_mode():
        into = {"a": torch.zeros(400), "b": torch.zeros(400, dtype=torch.float64)}
    with pytest.raises(InvalidArgumentError, match="b is an inference tensor"):
        deepnvme.load(tmp_path / "state.pt", into=into, cast=True)
    assert not into["a"].any()
    with torch.inference_mode():
        deepnvme.load(tmp_path / "state.pt", into=into, cast=True)
    assert into["a"].any()
    assert into["b"].any()
