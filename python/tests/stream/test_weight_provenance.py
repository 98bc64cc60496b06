"""Random programs give the same elements with traced tensors as with real ones."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import deepnvme
from deepnvme._stream.weight_origin import ByteRange, Origin, TracedTensor, UntraceableError, merge_adjacent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The real tensor, and its traced counterpart.
Pair = tuple[torch.Tensor, torch.Tensor]
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3)


class Store:
    """Files in memory, and tensors in them."""

    def __init__(self, seed: int) -> None:
        self.files = [bytearray(), bytearray()]
        self.generator = torch.Generator().manual_seed(seed)

    def pair(self, shape: Sequence[int], source: int) -> Pair:
        real = torch.randint(0, 30_000, tuple(shape), generator=self.generator, dtype=torch.int16)
        file = self.files[source]
        piece = ByteRange(source, len(file), real.nbytes)
        file += real.numpy().tobytes()
        return real, TracedTensor(Origin((piece,) if piece.nbytes else (), torch.int16, tuple(shape)))

    def content(self, origin: Origin) -> torch.Tensor:
        held = b"".join(self.files[each.source][each.offset : each.offset + each.nbytes] for each in origin.ranges)
        if not held:
            return torch.empty(origin.shape, dtype=origin.dtype)
        return torch.frombuffer(bytearray(held), dtype=origin.dtype).view(origin.shape)


def step(  # noqa: PLR0911 (a line for each thing that may happen)
    draw: st.DrawFn, pairs: list[Pair]
) -> list[Pair]:
    """One operation that a library performs when it assembles weights."""
    real, traced = draw(st.sampled_from(pairs))
    what = draw(
        st.sampled_from(["cat", "stack", "split", "chunk", "narrow", "select", "index", "view", "unsqueeze", "same"])
    )
    dim = draw(st.integers(-real.ndim, real.ndim - 1)) if real.ndim else 0
    if what in {"cat", "stack"}:
        like = [each for each in pairs if each[0].shape == real.shape]
        chosen = draw(st.lists(st.sampled_from(like), min_size=1, max_size=3))
        if what == "cat" and real.ndim:
            return [(torch.cat([each[0] for each in chosen], dim), torch.cat([each[1] for each in chosen], dim))]
        dim = draw(st.integers(-real.ndim - 1, real.ndim))
        return [(torch.stack([each[0] for each in chosen], dim), torch.stack([each[1] for each in chosen], dim))]
    if what == "unsqueeze":
        dim = draw(st.integers(-real.ndim - 1, real.ndim))
        return [(real.unsqueeze(dim), traced.unsqueeze(dim))]
    if what == "view":
        return [(real.reshape(-1), traced.view(-1))]
    if what == "same" or not real.ndim:
        return [(real, torch.nn.functional.pad(traced.detach().clone(), (0, 0)) if real.ndim else traced)]
    length = real.shape[dim]
    if what in {"split", "chunk"}:
        count = draw(st.integers(1, max(length, 1)))
        name = {"split": torch.split, "chunk": torch.chunk}[what]
        return list(zip(name(real, count, dim), name(traced, count, dim), strict=True))
    start = draw(st.integers(0, max(length - 1, 0)))
    if what == "narrow" or not length:
        size = draw(st.integers(0, length - start)) if length else 0
        return [(real.narrow(dim, start, size), traced.narrow(dim, start, size))]
    if what == "select":
        return [(real.select(dim, start), traced.select(dim, start))]
    begin = -1 - start % max(real.shape[0], 1)
    return [(real[begin:], traced[begin:])]


@st.composite
def programs(draw: st.DrawFn) -> tuple[Store, list[Pair]]:
    store = Store(draw(st.integers(0, 1 << 30)))
    shape = draw(SHAPES)
    pairs = [store.pair(shape, draw(st.integers(0, 1))) for _ in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, 8))):
        made = step(draw, pairs)
        pairs += [each for each in made if each[0].numel() <= 4000]
    return store, pairs


@given(programs())
def test_traced_operations_equal_real_ones(program: tuple[Store, list[Pair]]) -> None:
    store, pairs = program
    for real, traced in pairs:
        assert isinstance(traced, TracedTensor)
        assert traced.shape == real.shape == torch.Size(traced.origin.shape)
        assert sum(piece.nbytes for piece in traced.origin.ranges) == real.nbytes == traced.origin.nbytes
        assert torch.equal(store.content(traced.origin), real)
        assert traced.origin.ranges == merge_adjacent(traced.origin.ranges), "in no more pieces than needed"


def test_operations_that_change_values_are_refused() -> None:
    _, traced = Store(1).pair([4, 6], 0)
    changes: list[Callable[[], object]] = [
        lambda: traced + 1,
        lambda: traced[::2],
        lambda: traced.t().contiguous(),
        lambda: torch.nn.functional.pad(traced, (0, 1)),
        lambda: torch.cat([traced, torch.zeros(1, 6, dtype=torch.int16)]),
        lambda: torch.cat([traced, Store(1).pair([4, 6], 0)[1].to(torch.float32)]),
        lambda: traced / 2,
    ]
    for change in changes:
        with pytest.raises(UntraceableError):
            change()


def test_a_refused_operation_names_the_weight() -> None:
    _, plain = Store(1).pair([4, 6], 0)
    assert isinstance(plain, TracedTensor)
    named = TracedTensor(plain.origin, weight_name="layers.0.weight")
    changes: list[Callable[[], object]] = [
        lambda: named.view(6, 4)[1:3] + 1,
        lambda: torch.stack([named, named])[0][::2],
        lambda: torch.cat([torch.zeros(1, 6, dtype=torch.int16), named.detach()]),
        lambda: torch.nn.functional.pad(named.clone(), (0, 1)),
    ]
    for change in changes:
        with pytest.raises(UntraceableError, match=r"layers\.0\.weight"):
            change()
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight cannot be pickled"):
        pickle.dumps(named)


def test_another_dtype_leaves_the_bytes_where_they_are() -> None:
    _, traced = Store(1).pair([4, 6], 0)
    cast = traced.to(torch.float32)
    assert cast.dtype == torch.float32
    assert isinstance(cast, TracedTensor)
    assert isinstance(traced, TracedTensor)
    assert cast.origin == traced.origin
    assert cast.requires_grad is False


def test_a_concatenation_has_its_own_memory_even_if_its_ranges_are_adjacent() -> None:
    """Kernels add in another order at another alignment, so the last bits of results would differ."""
    rows: list[torch.Tensor] = [
        TracedTensor(Origin((ByteRange(0, 40 + 80 * row, 80),), torch.float32, (4, 5))) for row in range(3)
    ]
    stacked = torch.stack(rows)
    assert isinstance(stacked, TracedTensor)
    assert stacked.origin.ranges == (ByteRange(0, 40, 240),)
    cases: list[tuple[torch.Tensor, int]] = [
        (rows[0], 40),
        (rows[1], 120 % 64),
        (stacked, 0),
        (torch.cat(rows), 0),
        (torch.cat(rows[:1]), 0),
        (rows[0].clone(), 0),
        (stacked[1], 80 % 64),
        (stacked[1:].view(-1)[3:], (80 + 12) % 64),
    ]
    for one, line_offset in cases:
        assert isinstance(one, TracedTensor)
        assert one.origin.line_offset == line_offset
        assert one.origin.for_device(torch.device("cpu")) == one.origin
        assert one.origin.for_device(torch.device("cuda")).line_offset == 0


def test_a_tensor_on_meta_that_no_file_can_have_is_named(tmp_path: Path) -> None:
    class Rotating(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.table = torch.eye(8)

    with torch.device("meta"):
        inside = torch.nn.Sequential(Rotating())
    weights = {f"0.{name}": tensor for name, tensor in Rotating().state_dict().items()}
    deepnvme.save(weights, tmp_path / "inside.safetensors")
    with pytest.warns(UserWarning, match=r"0\.table is on the meta device") as warned:
        streamed = deepnvme.stream(inside, weights=tmp_path / "inside.safetensors", memory="1MB")
    streamed.streaming.close()
    assert [Path(warning.filename).name for warning in warned] == [Path(__file__).name]
