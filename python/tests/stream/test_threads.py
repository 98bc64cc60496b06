"""Threads that use one model, and forks of a process that uses one."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from pause import Pause

from . import plain_module
from .small_models import SmallModels, tokens, weights_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    InThreads = Callable[[Callable[[int], object], int], None]

pytestmark = pytest.mark.usefixtures("no_grad")


def assert_right(saved: plain_module.Saved, model: Any) -> None:
    assert torch.equal(model(saved.question), saved.answer)


@pytest.mark.parametrize("memory", [90_000, plain_module.MEMORY, 10_000_000])
def test_threads_that_use_one_model(saved: plain_module.Saved, memory: int, in_threads: InThreads) -> None:
    model = saved.stream(memory=memory)
    questions = [
        torch.randint(0, plain_module.ROWS, (2, 30), generator=torch.Generator().manual_seed(seed)) for seed in range(4)
    ]
    answers = [model(question) for question in questions]

    def ask(index: int) -> None:
        with torch.no_grad():
            given = [model(questions[index]) for _ in range(8)]
        assert all(torch.equal(one, answers[index]) for one in given), f"another answer in thread {index}"

    in_threads(ask, 4)
    assert model.streaming.stats().steps == 36
    model.streaming.close()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_generations_in_two_threads(
    models: SmallModels, streamed: Callable[..., Any], name: str, in_threads: InThreads
) -> None:
    model = streamed(models.folder(name), memory=900_000 if name == "mixtral" else 150_000)
    expected = [models.model(name).generate(tokens(2, 6, seed), max_new_tokens=8, do_sample=False) for seed in range(2)]
    made: dict[int, torch.Tensor] = {}

    def generate(seed: int) -> None:
        with torch.no_grad():
            made[seed] = model.generate(tokens(2, 6, seed), max_new_tokens=8, do_sample=False)

    in_threads(generate, 2)
    assert all(torch.equal(made[seed], expected[seed]) for seed in range(2))


def test_a_failing_call_in_one_thread_takes_nothing_from_another(saved: plain_module.Saved) -> None:
    model = saved.stream()
    pause = Pause()
    handle = model.layers[1].register_forward_pre_hook(lambda *_: None)
    answers: list[torch.Tensor] = []

    class Pausing(torch.nn.Module):
        """Pauses between loading the weights and using them."""

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if threading.current_thread() is not threading.main_thread():
                pause.wait()
            return hidden

    class Slow(torch.nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(Pausing()(hidden))

    model.streaming.close()
    with torch.device("meta"):
        module = plain_module.Plain().eval()
        module.layers[1].__class__ = Slow
    model = deepnvme.stream(module, weights=saved.path, memory=plain_module.MEMORY)

    def ask() -> None:
        with torch.no_grad():
            answers.append(model(saved.question))

    with pause.of(ask), pytest.raises(RuntimeError):
        model.layers[1](torch.zeros(1, 3))  # of a wrong width, while the other thread is in the same layer
    assert torch.equal(answers[0], saved.answer)
    handle.remove()
    model.streaming.close()


def test_a_forked_child_is_told(saved: plain_module.Saved) -> None:
    model = saved.stream()
    assert_right(saved, model)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            model(saved.question)
            words = "it computed"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(write, words.encode())
        model.streaming.close()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        words = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert words.startswith("ClosedError:")
    assert "open the model again in this one" in words
    assert_right(saved, model)
    model.streaming.close()


def test_several_models_at_once(models: SmallModels, in_threads: InThreads) -> None:
    """Models on one engine, one after another and in threads."""
    names, question, options = ["llama_midsize", "mixtral_midsize"], tokens(1, 6), {"max_new_tokens": 6}
    options |= {"do_sample": False}
    expected = [models.model(name).generate(question, **options) for name in names]
    engine = deepnvme.Engine(workers=1)
    folders = [models.folder(name) for name in names]
    streamed = [deepnvme.stream(folder, memory=weights_bytes(folder) // 3, engine=engine) for folder in folders]
    for _ in range(2):
        for model, answer in zip(streamed, expected, strict=True):
            assert torch.equal(model.generate(question, **options), answer)
    right: list[bool] = []

    def run(index: int) -> None:
        with torch.no_grad():
            answers = [streamed[index].generate(question, **options) for _ in range(3)]
        right.extend(torch.equal(answer, expected[index]) for answer in answers)

    in_threads(run, 2)
    assert right == [True] * 6
    for model in streamed:
        model.streaming.close()
