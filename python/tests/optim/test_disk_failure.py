"""A disk that fails in the middle of a step: the error, and the resumed step."""

from __future__ import annotations

import copy
import os
import resource
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from deepnvme import optim
from deepnvme.errors import StepStoppedError

from .nets import MEMORY, Net, assert_same_parameters, train, twins

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def trained(tmp_path: Path, **settings: Any) -> tuple[Net, optim.AdamW, Net, optim.AdamW]:
    one, other = twins()
    mine = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=tmp_path, memory=MEMORY, **settings)
    his = optim.AdamW(other.parameters(), lr=1e-3)
    train(one, mine, range(3))
    train(other, his, range(3))
    backward(one, 3)
    backward(other, 3)
    return one, mine, other, his


def backward(net: Net, step: int) -> None:
    net.zero_grad()
    net(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()


@contextmanager
def damaged(optimizer: optim.AdamW) -> Iterator[None]:
    """Flip a byte in each later group on disk. At the end, restore those that were not written since."""
    swapper = optimizer._store.swapper  # type: ignore[attr-defined]
    swapper.flush()
    numbers = sorted(int(key.removeprefix("state.")) for key in swapper.keys() if key.startswith("state."))  # noqa: SIM118
    harmed = []
    for number in numbers[len(numbers) // 2 :]:
        _, fd, offset, nbytes = swapper.extents(f"state.{number}")[0]
        data = bytearray(os.pread(fd, nbytes, offset))
        data[5] ^= 0x40
        os.pwrite(fd, data[5:6], offset + 5)
        harmed.append((fd, offset, data))
    os.fsync(fd)
    yield
    for fd, offset, data in harmed:
        if os.pread(fd, len(data), offset) == data:
            os.pwrite(fd, bytes([data[5] ^ 0x40]), offset + 5)
    os.fsync(fd)


@contextmanager
def unwritable() -> Iterator[None]:
    """Make every write fail that ends beyond the first bytes of a file."""
    before, deaf = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, deaf)


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_unreadable_state(tmp_path: Path, swap_gradients: bool) -> None:
    one, mine, other, his = trained(tmp_path, checksums=True, swap_gradients=swap_gradients)
    before = [param.detach().clone() for param in one.parameters()]
    with damaged(mine):
        for _ in range(2):
            with pytest.raises(StepStoppedError, match="goes on where it stopped") as caught:
                mine.step()
        assert isinstance(caught.value.__cause__, deepnvme.errors.CorruptFileError)
        assert str(tmp_path) in str(caught.value)
        with pytest.raises(RuntimeError, match="stopped half way"):
            mine.state_dict()
        with pytest.raises(RuntimeError, match="stopped half way"):
            mine.save_state(tmp_path / "state")
    changed = sum(not torch.equal(was, param) for was, param in zip(before, one.parameters(), strict=True))
    assert 0 < changed < len(before), "it stopped half way"
    mine.step()
    his.step()
    assert_same_parameters(one, other)
    backward(one, 4)
    backward(other, 4)
    mine.step()
    his.step()
    assert_same_parameters(one, other)
    assert mine.state_dict()["state"][0]["step"] == his.state_dict()["state"][0]["step"]


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_unwritable_state(tmp_path: Path, swap_gradients: bool) -> None:
    one, mine, other, his = trained(tmp_path, swap_gradients=swap_gradients)
    mine._store.swapper.flush()  # type: ignore[attr-defined]
    with unwritable(), pytest.raises(StepStoppedError, match="goes on where it stopped") as caught:
        mine.step()
    assert caught.value.errno is not None
    assert caught.value.filename is not None
    mine.step()
    his.step()
    assert_same_parameters(one, other)


def test_a_disk_that_is_full_at_the_first_step(tmp_path: Path) -> None:
    """Space for state is allocated by the first step. Until then a full disk only stops a step."""
    one, other = twins()
    mine = optim.AdamW(one.parameters(), lr=1e-3, swap_dir=tmp_path, memory=MEMORY)
    his = optim.AdamW(other.parameters(), lr=1e-3)
    backward(one, 0)
    backward(other, 0)
    with unwritable(), pytest.raises(StepStoppedError, match="goes on where it stopped"):
        mine.step()
    mine.step()
    his.step()
    assert_same_parameters(one, other)


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_with_parameters_on_disk(tmp_path: Path, swap_gradients: bool) -> None:
    """One step is many calls of the optimizer, and resumes as one."""
    one, other = twins()
    offloading = deepnvme.offload_parameters(one, memory="512KiB", swap_dir=tmp_path)
    settings: dict[str, Any] = {
        "swap_dir": tmp_path,
        "memory": MEMORY,
        "checksums": True,
        "swap_gradients": swap_gradients,
    }
    mine = optim.AdamW(one.parameters(), lr=1e-3, **settings)
    offloading.attach(mine)
    his = optim.AdamW(other.parameters(), lr=1e-3)
    train(one, mine, range(3))
    train(other, his, range(3))
    backward(one, 3)
    backward(other, 3)
    with damaged(mine), pytest.raises(StepStoppedError):
        mine.step()
    mine.step()
    his.step()
    for name, tensor in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], tensor), name
    assert max(float(state["step"]) for state in mine.state.values()) == 4


@pytest.mark.parametrize("swap_gradients", [False, True])
def test_it_is_clipped_as_it_began(tmp_path: Path, swap_gradients: bool) -> None:
    settings = {"max_norm": 1e-3, "swap_gradients": swap_gradients}
    one, mine, other, _ = trained(tmp_path, checksums=True, **settings)
    twin = optim.AdamW(other.parameters(), lr=1e-3, max_norm=1e-3)
    twin.load_state_dict(copy.deepcopy(mine.state_dict()))
    other.load_state_dict(one.state_dict())
    backward(other, 3)
    with damaged(mine), pytest.raises(StepStoppedError):
        mine.step()
    mine.step()
    twin.step()
    for mine_one, his_one in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine_one, his_one, rtol=1e-5, atol=1e-7)


def test_other_gradients_are_another_step(tmp_path: Path) -> None:
    one, mine, _, _ = trained(tmp_path, checksums=True)
    with damaged(mine), pytest.raises(StepStoppedError):
        mine.step()
    assert max(float(state["step"]) for state in mine.state.values()) == 4
    backward(one, 4)
    mine.step()
    assert max(float(state["step"]) for state in mine.state.values()) == 5
    mine.state_dict()


def test_a_state_dict_replaces_a_stopped_step(tmp_path: Path) -> None:
    one, mine, other, his = trained(tmp_path, checksums=True)
    saved, params = his.state_dict(), other.state_dict()
    with damaged(mine), pytest.raises(StepStoppedError):
        mine.step()
    one.load_state_dict(params)
    mine.load_state_dict(copy.deepcopy(saved))
    mine.step()
    his.step()
    assert_same_parameters(one, other)


def test_in_memory_too() -> None:
    """A refusal between two param groups leaves the second to be done, once."""
    one, other = twins()
    settings: list[list[dict[str, Any]]] = [
        [{"params": net.lines.parameters()}, {"params": net.last.parameters(), "lr": 1e-2}] for net in (one, other)
    ]
    mine, his = optim.AdamW(settings[0], lr=1e-3), optim.AdamW(settings[1], lr=1e-3)
    backward(one, 0)
    backward(other, 0)
    mine.param_groups[1]["betas"] = (1.5, 0.9)
    with pytest.raises(ValueError, match="beta"):
        mine.step()
    mine.param_groups[1]["betas"] = (0.9, 0.999)
    mine.step()
    his.step()
    assert_same_parameters(one, other)
