"""bf16 and 8-bit moments: their deviation from fp32, their size, and their saved form."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from deepnvme import optim

from .nets import KINDS, MEMORY, assert_same_parameters, train, twins

if TYPE_CHECKING:
    from pathlib import Path

SHORT = ["bf16", "8bit"]


@pytest.mark.parametrize("moments", SHORT)
@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_disk_as_in_memory(
    tmp_path: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype, moments: str
) -> None:
    one, other = twins(dtype)
    mine = kind(one.parameters(), **settings, moments=moments, swap_dir=tmp_path, memory=MEMORY // 4)
    his = kind(other.parameters(), **settings, moments=moments)
    train(one, mine, range(6))
    train(other, his, range(6))
    assert_same_parameters(one, other)
    assert mine.swap_stats().resident_bytes_peak <= MEMORY // 4
    ours, theirs = mine.state_dict(), his.state_dict()
    for index, state in theirs["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(ours["state"][index][name]), torch.as_tensor(value)), (index, name)


@pytest.mark.parametrize("moments", SHORT)
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_saved_state_continues_without_difference(tmp_path: Path, moments: Any, on_disk: bool) -> None:
    """torch's optimizers can load it: it is fp32."""
    place: dict[str, Any] = {"swap_dir": tmp_path, "memory": MEMORY} if on_disk else {}
    one, other = twins()
    mine = optim.AdamW(one.parameters(), lr=1e-3, moments=moments, **place)
    his = optim.AdamW(other.parameters(), lr=1e-3, moments=moments)
    train(one, mine, range(4))
    train(other, his, range(4))
    saved = copy.deepcopy(mine.state_dict())
    assert {value.dtype for state in saved["state"].values() for value in state.values()} == {torch.float32}
    again = optim.AdamW(one.parameters(), lr=1e-3, moments=moments, **place)
    again.load_state_dict(saved)
    for index, state in again.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][index][name]), name
    torchs = torch.optim.AdamW(copy.deepcopy(one).parameters(), lr=1e-3)
    torchs.load_state_dict(saved)
    back = optim.AdamW(one.parameters(), lr=1e-3, moments=moments, **place)
    back.load_state_dict(torchs.state_dict())
    # Its noise differs, so it deviates as much as two seeds do.
    train(one, back, range(4, 8))
    train(other, his, range(4, 8))
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=0, atol=4e-3)


def test_bytes(tmp_path: Path) -> None:
    """Fewer bytes are the purpose."""
    found = {}
    kinds: list[Any] = ["fp32", *SHORT]
    for moments in kinds:
        param = nn.Parameter(torch.randn(100_000))
        optimizer: Any = optim.AdamW([param], moments=moments, swap_dir=tmp_path, memory="2MB")
        param.grad = torch.randn(100_000)
        optimizer.step()
        found[moments] = optimizer.swap_stats().stored_bytes
    assert found["bf16"] <= 0.52 * found["fp32"]
    assert found["8bit"] <= 0.28 * found["fp32"]
    in_memory = optim.AdamW([param], moments="8bit")
    param.grad = torch.randn(100_000)
    in_memory.step()
    held = sum(value.nbytes for value in in_memory.state[param].values())
    assert held <= 2.1 * 100_000
    clone = copy.deepcopy(in_memory)
    ours, theirs = clone.state_dict()["state"][0], in_memory.state_dict()["state"][0]
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == torch.float32
        assert torch.equal(ours[name], value), name


class Words(nn.Module):
    """A small language model that predicts from the last eight letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 24)
        self.hidden = nn.Linear(8 * 24, 128)
        self.norm = nn.LayerNorm(128)
        self.out = nn.Linear(128, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.hidden(self.embedding(letters).flatten(1))))
        answer: torch.Tensor = self.out(hidden)
        return answer


def test_it_converges_as_fp32_does() -> None:
    """Train on real text. Return the loss on unseen letters."""
    text = copy.__doc__ or ""
    source = (text + (torch.optim.Adam.__doc__ or "") + (torch.nn.Linear.__doc__ or "") + (nn.LSTM.__doc__ or "")) * 2
    letters = torch.tensor([min(ord(letter), 127) for letter in source])
    assert len(letters) > 5_000
    windows = letters.unfold(0, 9, 1)
    unseen = torch.arange(len(windows)) % 10 == 0
    training, testing = windows[~unseen], windows[unseen]
    losses = {}
    for moments in ("fp32", *SHORT):
        torch.manual_seed(7)
        model = Words()
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, moments=moments)  # type: ignore[arg-type]
        for _ in range(300):
            batch = training[torch.randint(len(training), (64,))]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch[:, :8]), batch[:, 8]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            losses[moments] = float(nn.functional.cross_entropy(model(testing[:, :8]), testing[:, 8]))
    assert losses["fp32"] < 2.0, "it has learnt something"
    for moments in SHORT:
        assert losses[moments] < losses["fp32"] + 0.1, losses


def test_refusal() -> None:
    with pytest.raises(ValueError, match="'8bit'"):
        optim.AdamW([nn.Parameter(torch.zeros(3))], moments="4bit")  # type: ignore[arg-type]
