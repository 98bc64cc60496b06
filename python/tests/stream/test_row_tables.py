"""Embeddings are read row by row, also those of classes that scale or normalise what torch's embedding returns."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import deepnvme
from deepnvme._modules.partition import only_looks_rows_up
from deepnvme._stream import streaming
from deepnvme._stream.row_cache import GatheredRows

from .small_models import TABLES, SmallModels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS, WIDTH = 20_000, 64


@pytest.mark.parametrize("name", TABLES)
def test_models_with_a_table(models: SmallModels, streamed: Callable[..., Any], name: str) -> None:
    """A table that exceeds the memory is not loaded, and the results are those of the model in memory."""
    model = models.model(name)
    table = model.get_parameter(TABLES[name])
    rest = sum(each.nbytes for each in model.parameters()) - table.nbytes
    memory = max(rest, 3 << 20)
    assert memory < table.nbytes
    tokens = torch.arange(3, 3 + 24).reshape(2, 12)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    other = streamed(models.folder(name), memory=memory)
    with torch.no_grad():
        assert torch.equal(other(tokens).logits, model(tokens).logits)
    assert torch.equal(other.generate(tokens, **options), model.generate(tokens, **options))
    stats = other.streaming.stats()
    assert stats.row_hits > 0
    assert stats.row_waits > 0
    other.streaming.close()
    with pytest.raises(deepnvme.errors.ClosedError):
        other(tokens)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and gather as for a GPU. Host memory for rows then comes on top of ``memory``."""
    monkeypatch.setattr(streaming, "is_on_host", lambda _: False)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", TABLES)
def test_rows_for_a_gpu_are_gathered(models: SmallModels, streamed: Callable[..., Any], name: str, dtype: str) -> None:
    model = models.model(name)
    table = model.get_parameter(TABLES[name])
    memory = max(sum(each.nbytes for each in model.parameters()) - table.nbytes, 3 << 20)
    assert memory < table.nbytes
    if dtype != "auto":
        model = type(model).from_pretrained(models.folder(name), dtype=torch.bfloat16).eval()
    tokens = torch.arange(3, 3 + 24).reshape(2, 12)
    other = streamed(models.folder(name), memory=memory, dtype=dtype)
    assert isinstance(other.streaming.row_cache, GatheredRows)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(other(tokens).logits, model(tokens).logits)
    stats = other.streaming.stats()
    assert stats.row_hits > 0
    assert stats.row_waits > 0
    with pytest.raises(IndexError):
        other(tokens + 100_000)
    other.streaming.close()
    with pytest.raises(deepnvme.errors.ClosedError):
        other(tokens)


class Scaled(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH, padding_idx=3)
        self.scale = nn.Buffer(torch.tensor(3.5), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        return super().forward(input) * self.scale.to(self.weight.dtype)


class ScaledAgain(Scaled):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.weight.shape[1] == WIDTH
        return super().forward(ids) + 1


class Normed(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        found: torch.Tensor = self.norm(super().forward(input)) + self.bias
        return found


class Positions(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input * 0 + torch.arange(input.shape[-1]) + 2)


class Whole(nn.Embedding):
    """Uses more than rows of its weight."""

    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) - self.weight.mean(0)


class Direct(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return functional.embedding(input, self.weight)


class Hidden(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) - self.extra()

    def extra(self) -> torch.Tensor:
        return self.weight.mean(0)


def helper(module: nn.Embedding) -> torch.Tensor:
    return module.weight.mean(0)


def wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(self: Any, ids: torch.Tensor) -> Any:
        return forward(self, ids) * self.weight.mean()

    return run


class Sly(nn.Embedding):
    """Uses its weight in a way that its code does not show at first sight."""

    def __init__(self) -> None:
        super().__init__(ROWS, WIDTH)

    @property
    def mean(self) -> torch.Tensor:
        return self.weight.mean(0)


class ByName(Sly):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        found: torch.Tensor = super().forward(input) - getattr(self, "weight").mean(0)  # noqa: B009
        return found


class ByHelper(Sly):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) - helper(self)


class ByClosure(Sly):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        mean: Callable[[], torch.Tensor] = lambda: self.weight.mean(0)  # noqa: E731
        found: torch.Tensor = super().forward(input) - mean()
        return found


class ByProperty(Sly):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) - self.mean


class ByDict(Sly):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        weight: Any = self._parameters["weight"]
        found: torch.Tensor = super().forward(input) - weight.mean(0)
        return found


class ByAttribute(Sly):
    def __init__(self) -> None:
        super().__init__()
        self.find: Callable[[], torch.Tensor] = lambda: self.weight.mean(0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        found: torch.Tensor = super().forward(input) - self.find()
        return found


class ByWrapper(Sly):
    @wrapped
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input)


class ByInstance(Sly):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda ids: functional.embedding(ids + 100, self.weight)  # type: ignore[assignment, method-assign]


BY_ROWS = [Scaled, ScaledAgain, Normed, Positions]
SLY = [ByName, ByHelper, ByClosure, ByProperty, ByDict, ByAttribute, ByWrapper, ByInstance]
AS_A_WHOLE = [Whole, Direct, Hidden, *SLY]


class Net(nn.Module):
    def __init__(self, kind: type[nn.Embedding]) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH) if kind is nn.Embedding else kind()  # type: ignore[call-arg]
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids))
        return found


def nets(kind: type[nn.Embedding], folder: Path) -> tuple[Net, Net]:
    """Return a module in memory, and one without weights, which are in a file."""
    torch.manual_seed(7)
    net = Net(kind).eval()
    deepnvme.save(net.state_dict(), folder / "net.safetensors", progress=False)
    return net, Net(kind).eval()


@pytest.mark.parametrize("kind", [*BY_ROWS, *AS_A_WHOLE, nn.Embedding])
def test_which_classes_only_look_rows_up(kind: Any) -> None:
    assert only_looks_rows_up(nn.Embedding(3, 4) if kind is nn.Embedding else kind()) == (kind not in AS_A_WHOLE)
    assert not only_looks_rows_up(nn.Embedding(3, 4, max_norm=1.0))


@pytest.mark.parametrize("kind", [*BY_ROWS, *AS_A_WHOLE])
def test_results_are_those_in_memory(tmp_path: Path, streamed: Callable[..., Any], kind: Any) -> None:
    net, other = nets(kind, tmp_path)
    nbytes = net.table.weight.nbytes
    memory = nbytes // 4 if kind in BY_ROWS else nbytes * 2
    other = streamed(other, weights=tmp_path / "net.safetensors", memory=memory)
    for shape in [(3,), (2, 40), (1, 0), (700,), (6000,)]:
        ids = torch.randint(0, ROWS - 10_000, shape)
        with torch.no_grad():
            assert torch.equal(other(ids), net(ids))
    stats = other.streaming.stats()
    assert (stats.row_waits > 0) == (kind in BY_ROWS)
    if kind is not Positions:
        with pytest.raises(IndexError):
            other(torch.tensor([ROWS]))
    with torch.no_grad():
        assert torch.equal(other(torch.tensor([5])), net(torch.tensor([5])))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", [nn.Embedding, *BY_ROWS, *AS_A_WHOLE])
def test_gathered_rows_are_those_in_memory(tmp_path: Path, streamed: Callable[..., Any], kind: Any) -> None:
    net, other = nets(kind, tmp_path)
    is_by_rows = kind not in AS_A_WHOLE
    nbytes = net.table.weight.nbytes
    other = streamed(other, weights=tmp_path / "net.safetensors", memory=nbytes // 4 if is_by_rows else nbytes * 2)
    for shape in [(), (3,), (2, 40), (1, 0), (700,), (6000,)]:
        ids = torch.randint(0, ROWS - 10_000, shape)
        if kind is Positions and shape == ():
            continue
        with torch.no_grad():
            assert torch.equal(other(ids), net(ids))
    assert (other.streaming.stats().row_waits > 0) == is_by_rows


def test_patched_look_ups_get_their_rows(
    tmp_path: Path, streamed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library replaces torch's look-up."""
    net, other = nets(nn.Embedding, tmp_path)
    monkeypatch.setattr(nn.Embedding, "forward", lambda self, ids: functional.embedding(ids + 7, self.weight))
    other = streamed(other, weights=tmp_path / "net.safetensors", memory=ROWS * WIDTH)
    ids = torch.arange(40)
    own = functional.embedding
    monkeypatch.setattr(functional, "embedding", lambda ids, *arguments: own(ids + 100, *arguments))
    with torch.no_grad():
        assert torch.equal(other(ids), net(ids))
        # The parent looks rows up by itself.
        assert torch.equal(own(ids, other.table.weight), own(ids, net.table.weight))


def test_a_thread_that_looks_rows_up_beside_a_call(tmp_path: Path, streamed: Callable[..., Any]) -> None:
    net, other = nets(nn.Embedding, tmp_path)
    other = streamed(other, weights=tmp_path / "net.safetensors", memory=ROWS * WIDTH)
    is_done = threading.Event()

    def call() -> None:
        while not is_done.is_set():
            with torch.no_grad():
                other(torch.randint(0, ROWS, (2000,)))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(200):
            ids = torch.randint(0, ROWS, (5,))
            with torch.no_grad():
                assert torch.equal(functional.embedding(ids, other.table.weight), net.table.weight[ids])
    finally:
        is_done.set()
        thread.join()


def test_threads_look_rows_up(
    tmp_path: Path, streamed: Callable[..., Any], in_threads: Callable[[Callable[[int], object], int], None]
) -> None:
    net, other = nets(ScaledAgain, tmp_path)
    other = streamed(other, weights=tmp_path / "net.safetensors", memory=ROWS * WIDTH)

    def work(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for _ in range(40):
            ids = torch.randint(0, ROWS, (50,), generator=generator)
            with torch.no_grad():
                assert torch.equal(other(ids), net(ids))

    in_threads(work, 4)
