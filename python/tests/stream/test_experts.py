"""Experts are read one by one if the module uses those that its argument selects, and all of them otherwise."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deepnvme._modules import partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

EXPERTS, WIDTH, INNER = 16, 64, 96
# Less than all experts of both layers, more than those of one.
MEMORY = 1 << 20


class Experts(nn.Module):
    """Experts as in Mixtral, with small biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 8)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, INNER))

    def one(self, expert: int, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.up[expert].T + self.up_bias[expert]) @ self.down[expert].T

    def forward(self, hidden: torch.Tensor, top_index: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for row, experts in enumerate(top_index.tolist()):
            for expert in experts:
                output[row] += self.one(expert, hidden[row])
        return output + self.more(hidden)

    def more(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


class WithSharedExpert(Experts):
    """The last expert serves all tokens."""

    def more(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.one(EXPERTS - 1, hidden)


class WithMean(Experts):
    """A mean over all experts."""

    def more(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.down.mean(0)[:, :WIDTH]


class WithFirstColumns(Experts):
    """A few bytes of each expert."""

    def more(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.up[:, 0, 0].sum()


class WithBiases(Experts):
    """Only weights that are small enough to stay in memory."""

    def more(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.up_bias.mean()


class Neighbour(Experts):
    """The argument does not select experts, but those before them."""

    def forward(self, hidden: torch.Tensor, top_index: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, (top_index + 1) % EXPERTS)


class Model(nn.Module):
    """Two layers of experts, and the selected ones."""

    def __init__(self, kind: type[Experts]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = hidden + layer(hidden, indices)
        return hidden


@pytest.fixture
def warnings_told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield told


class Returned(Experts):
    """The weight of another expert is part of the result, and nobody has read it yet."""

    def forward(self, hidden: torch.Tensor, top_index: torch.Tensor) -> torch.Tensor:
        super().forward(hidden, top_index)
        return self.up[EXPERTS - 1][: len(hidden), :WIDTH]


OTHERS = [WithSharedExpert, WithMean, WithFirstColumns, Neighbour, Returned]


@pytest.fixture
def all_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the code of tests for that of transformers."""
    monkeypatch.setattr(partition, "is_known", lambda _: True)


def both(kind: type[Experts], folder: Path, streamed: Callable[..., Any]) -> tuple[Model, Any]:
    """Make a model in memory, and the same one streamed."""
    torch.manual_seed(0)
    model = Model(kind).eval()
    path = folder / "experts.safetensors"
    save_file(model.state_dict(), path)
    with torch.device("meta"):
        empty = Model(kind).eval()
    return model, streamed(empty, weights=path, memory=MEMORY)


def assert_same(model: Model, other: Model) -> None:
    """Compare the results for several tokens and selections."""
    with torch.no_grad():
        for seed in range(6):
            torch.manual_seed(seed)
            hidden, indices = torch.randn(3, WIDTH), torch.randint(0, EXPERTS // 2, (3, 1))
            # Sums may differ in their last bits where the weights are aligned differently.
            torch.testing.assert_close(other(hidden, indices), model(hidden, indices), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [Experts, *OTHERS])
def test_code_that_is_not_known_has_all_experts(
    kind: type[Experts], tmp_path: Path, streamed: Callable[..., Any]
) -> None:
    model, other = both(kind, tmp_path, streamed)
    assert other.streaming.row_cache is None
    assert_same(model, other)


@pytest.mark.usefixtures("all_known")
@pytest.mark.parametrize("kind", [Experts, WithBiases, *OTHERS])
def test_other_experts_are_noticed(
    kind: type[Experts],
    tmp_path: Path,
    streamed: Callable[..., Any],
    warnings_told: list[warnings.WarningMessage],
) -> None:
    model, other = both(kind, tmp_path, streamed)
    needs_all = kind not in (Experts, WithBiases)
    assert_same(model, other)
    names = [str(each.message) for each in warnings_told if "does not select" in str(each.message)]
    assert [name.split()[0] for name in names] == (["layers.0", "layers.1"] if needs_all else [])
    if not needs_all:
        # Up to three experts of each layer in each call, and no more than were selected.
        assert 0 < other.streaming.stats().row_waits <= 2 * EXPERTS // 2


@pytest.mark.usefixtures("all_known")
def test_small_experts_are_loaded_whole(tmp_path: Path, streamed: Callable[..., Any]) -> None:
    """Experts that are smaller than pages would hide the use of their neighbours."""
    torch.manual_seed(0)
    model = Experts()
    model.up = nn.Parameter(torch.randn(4000, 4, WIDTH))
    model.down = nn.Parameter(torch.randn(4000, WIDTH, 4))
    model.up_bias = nn.Parameter(torch.randn(4000, 4))
    path = tmp_path / "experts.safetensors"
    save_file(model.state_dict(), path)
    other = streamed(model, weights=path, memory="12MB")
    with torch.no_grad():
        hidden, indices = torch.randn(3, WIDTH), torch.randint(0, 4000, (3, 2))
        answer = other(hidden, indices)
    assert other.streaming.stats().row_waits == 0
    assert answer.isfinite().all()
