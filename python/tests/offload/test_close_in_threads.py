"""``close`` while another thread uses the parameters, and backward passes that come after it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepnvme
from deepnvme.errors import ClosedError
from pause import Pause


class Slow(nn.Linear):
    """Calls ``wait`` when its weights are in memory and not used yet."""

    wait: Any = staticmethod(lambda: None)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.wait()
        return super().forward(hidden)


def offloaded(folder: Path) -> tuple[Any, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Slow(64, 64) for _ in range(6)))
    question = torch.randn(2, 64)
    answer = model(question).detach()
    deepnvme.offload_parameters(model, memory="100kB", swap_dir=folder)
    return model, question, answer


def test_parameters_in_use_are_not_moved(tmp_path: Path) -> None:
    model, question, answer = offloaded(tmp_path)
    pause = Pause()
    answers: list[torch.Tensor] = []
    model[3].wait = pause.wait
    with (
        pause.of(lambda: answers.append(model(question))),
        pytest.raises(RuntimeError, match=r"3\.weight is in use.* call offloading\.close\(\) again"),
    ):
        model.offloading.close()
    assert torch.equal(answers[0], answer), "the pass went on with its parameters"
    model.offloading.close()
    assert torch.equal(model(question), answer)


@pytest.mark.parametrize("fails", [False, True])
def test_a_backward_pass_in_another_thread_keeps_its_parameters(tmp_path: Path, *, fails: bool) -> None:
    model, question, _ = offloaded(tmp_path)
    pause = Pause()

    def wait(*_gradients: Any) -> None:
        pause.wait()
        if fails:
            raise ArithmeticError

    hidden = model[:4](question)
    # Called in the backward of block 3, which holds its weights by then.
    hidden.grad_fn.register_hook(wait)
    loss = model[4:](hidden).square().sum()
    errors: list[BaseException] = []

    def backward() -> None:
        try:
            loss.backward()
        except ArithmeticError as error:
            errors.append(error)

    with (
        pause.of(backward),
        pytest.raises(RuntimeError, match=r"backward pass in another thread.* call offloading\.close\(\) again"),
    ):
        model.offloading.close()
    assert len(errors) == fails
    if not fails:
        assert all(parameter.grad is not None for parameter in model.parameters())
    model.offloading.close()
    assert model(question).isfinite().all()


def test_two_threads_that_close(tmp_path: Path) -> None:
    for _ in range(10):
        model, question, answer = offloaded(tmp_path)
        errors: list[BaseException] = []

        def close(model: Any, errors: list[BaseException]) -> None:
            try:
                model.offloading.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=close, args=(model, errors)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not errors
        assert torch.equal(model(question), answer)


def test_a_backward_pass_after_the_close(tmp_path: Path) -> None:
    model, question, _ = offloaded(tmp_path)
    loss = model(question).square().sum()
    model.offloading.close()
    with pytest.raises(ClosedError, match="run the forward pass again"):
        loss.backward()
    model(question).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_save_goes_on_when_a_close_comes_just_before_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = offloaded(tmp_path / "swap")
    offloading = model.offloading
    swapper = offloading._swapper
    borrow = swapper.borrow

    def late(key: str, *, shared: bool = False) -> Any:
        monkeypatch.undo()
        offloading.close()
        return borrow(key, shared=shared)

    monkeypatch.setattr(swapper, "borrow", late)
    offloading.save(tmp_path / "saved.safetensors")
    assert offloading.is_closed
    saved = deepnvme.load(tmp_path / "saved.safetensors")
    assert all(map(torch.equal, saved.values(), model.state_dict().values()))
