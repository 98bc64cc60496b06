"""Clipping by the total norm as in torch's ``clip_grad_norm_``, above all for norms that are not finite."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from deepnvme import optim

if TYPE_CHECKING:
    from pathlib import Path

NUMBERS = [float("nan"), float("inf"), -float("inf"), 1e30, 3.0, 0.0]
WHERE: dict[str, dict[str, Any]] = {
    "in memory": {},
    "state on disk": {"memory": "1MB"},
    "gradients on disk": {"memory": "1MB", "swap_gradients": True},
}


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(5)
    one = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))
    other = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 3))
    other.load_state_dict(one.state_dict())
    return one, other


def backward(net: nn.Module, number: float) -> None:
    """Set all gradients, one of them with that number in it."""
    torch.manual_seed(6)
    net.zero_grad()
    weight = net[1].weight  # type: ignore[index]

    def put(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[1, 7] = number
        return grad

    hook = weight.register_hook(put)
    net(torch.randn(5, 30)).square().mean().backward()
    hook.remove()


def optimizer(net: nn.Module, folder: Path, where: str, **settings: Any) -> Any:
    place = {**WHERE[where], "swap_dir": folder} if WHERE[where] else {}
    return optim.SGD(net.parameters(), lr=0.5, max_norm=0.1, **place, **settings)


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_clipping_is_torchs(tmp_path: Path, where: str, number: float) -> None:
    one, other = nets()
    mine = optimizer(one, tmp_path, where)
    theirs = torch.optim.SGD(other.parameters(), lr=0.5)
    backward(one, number)
    backward(other, number)
    mine.step()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    if math.isinf(norm) and not math.isinf(number):
        # torch adds squares in fp32, which overflows; the kernel does not. Both scale all others to zero.
        other[1].weight.grad[1, 7] = 0.1  # type: ignore[index]
    theirs.step()
    for mine_, his in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_, his, equal_nan=True)
    mine.close()


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize("where", WHERE)
def test_a_norm_that_is_no_number_is_an_error_where_that_is_asked_for(
    tmp_path: Path, where: str, number: float
) -> None:
    one, _ = nets()
    mine = optimizer(one, tmp_path, where, error_if_nonfinite=True)
    backward(one, number)
    before = [param.detach().clone() for param in one.parameters()]
    if math.isfinite(number):
        mine.step()
        assert not all(map(torch.equal, before, one.parameters()))
    else:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"norm of the gradients is (nan|inf)"):
                mine.step()
        assert all(map(torch.equal, before, one.parameters()))
        backward(one, 1.0)
        mine.step()
        assert all(param.isfinite().all() for param in one.parameters())
    mine.close()
