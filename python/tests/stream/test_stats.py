"""Tests of the counters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import deepnvme
from deepnvme._stream.stats import Step, StepRecorder

from . import plain_module
from .small_models import SmallModels, tokens, weights_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("no_grad")


def test_each_call_is_a_step(saved: plain_module.Saved) -> None:
    model = saved.stream()
    assert model.streaming.stats().steps == 0
    for count in range(1, 6):
        model(saved.question)
        stats = model.streaming.stats()
        assert stats.steps == count
        assert stats.tokens == count * saved.question.numel()
    layers = plain_module.DEPTH + 1
    assert stats.hits + stats.waits == 5 * layers, "each layer, and the head, was called once in each step"
    assert stats.fetches >= stats.waits
    assert stats.fetches_ahead <= stats.fetches
    # The layers do not fit, so each step reads some of them again, and never more than all.
    assert saved.path.stat().st_size < stats.bytes_read <= 7 * (saved.path.stat().st_size + 50_000)
    assert stats.tokens_per_s > 0
    assert stats.disk_gb_per_s > 0
    assert stats.seconds >= stats.stalled_s
    model.streaming.close()
    assert model.streaming.stats().bytes_read >= stats.bytes_read, "what was counted stays when the model is closed"
    model.streaming.close()


def test_all_that_fits_is_read_once(saved: plain_module.Saved) -> None:
    model = saved.stream(memory=10_000_000)
    for _ in range(5):
        model(saved.question)
    first = model.streaming.stats()
    for _ in range(5):
        model(saved.question)
    stats = model.streaming.stats()
    assert stats.bytes_read == first.bytes_read
    # The layers, the head and the rows, which are loaded whole with this much memory.
    assert (stats.hits - first.hits, stats.waits - first.waits) == (5 * (plain_module.DEPTH + 2), 0)
    assert stats.hit_rate == stats.hits / (stats.hits + stats.waits)
    model.streaming.close()


def test_experts_that_stay_are_not_read_again(models: SmallModels, streamed: Callable[..., Any]) -> None:
    folder = models.folder("mixtral")
    model = streamed(folder, memory=2 * weights_bytes(folder))
    model(tokens(4, 50))
    first = model.streaming.stats()
    assert first.row_waits > 0
    model(tokens(4, 50))
    stats = model.streaming.stats()
    assert stats.row_waits == first.row_waits, "the same tokens go to the same experts"
    assert stats.row_hits > first.row_hits
    assert 0 < stats.row_hit_rate < 1
    # One token needs two of eight experts in each layer.
    small = streamed(folder, memory=700_000)
    small(tokens(1, 1))
    before = small.streaming.stats()
    small(tokens(1, 1, seed=9))
    after = small.streaming.stats()
    rows = after.row_hits + after.row_waits - before.row_hits - before.row_waits
    assert rows <= 4 * 2 + 1
    assert after.bytes_read - before.bytes_read < weights_bytes(folder) // 2


def test_a_generation_counts_its_tokens(models: SmallModels, streamed: Callable[..., Any]) -> None:
    model = streamed(models.folder("llama"), memory=300_000)
    model.generate(tokens(2, 6), min_new_tokens=4, max_new_tokens=4, do_sample=False)
    stats = model.streaming.stats()
    assert stats.steps == 4
    assert stats.tokens == 2 * 6 + 3 * 2
    # Embedded inputs count as the tokens they were made from.
    model(inputs_embeds=model.get_input_embeddings()(tokens(3, 5)))
    assert model.streaming.stats().tokens == stats.tokens + 15


def test_figures_are_ready_for_json(saved: plain_module.Saved) -> None:
    model = saved.stream()
    empty = model.streaming.stats().to_dict()
    assert empty["roofline_fraction"] == 1.0
    model(saved.question)
    figures = model.streaming.stats().to_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert set(figures) == set(empty)
    for name in ("hit_rate", "row_hit_rate", "overlap", "roofline_fraction"):
        assert 0 <= figures[name] <= 1, name
    assert figures["steps"] == 1
    model.streaming.close()


def test_a_step_that_fails_is_counted_and_changes_nothing(saved: plain_module.Saved) -> None:
    model = saved.stream()
    with pytest.raises(IndexError):
        model(torch.tensor([[plain_module.ROWS + 7]]))
    assert torch.equal(model(saved.question), saved.answer)
    stats = model.streaming.stats()
    assert stats.steps == 2
    model.streaming.close()


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_a_step_divides_its_time(seconds: float, stalled: float, busy: float) -> None:
    step = Step(seconds, stalled, busy, 1, 1)
    assert 0 <= step.compute_s <= step.seconds
    assert step.roofline_s >= max(step.compute_s, step.disk_busy_s) - 1e-9
    assert 0 <= step.roofline_fraction <= 1
    assert 0 <= step.overlap <= 1
    assert json.loads(json.dumps(step.to_dict())) == step.to_dict()


def test_each_step_has_figures_of_its_own(saved: plain_module.Saved) -> None:
    model = saved.stream()
    for _ in range(3):
        model(saved.question)
    steps, stats = list(model.streaming.steps.last), model.streaming.stats()
    assert len(steps) == stats.steps == 3
    assert sum(step.tokens for step in steps) == stats.tokens
    assert sum(step.seconds for step in steps) == pytest.approx(stats.seconds)
    for step in steps:
        figures = step.to_dict()
        assert figures["tokens_per_s"] == pytest.approx(saved.question.numel() / step.seconds)
        assert figures["roofline_fraction"] == pytest.approx(min(figures["roofline_s"] / step.seconds, 1))
        assert {"overlap", "compute_s", "bytes_read", "stalled_s"} < set(figures)
    assert set(stats.to_dict()) > set(steps[0].to_dict())


def test_only_the_last_steps_are_remembered_one_by_one() -> None:
    steps = StepRecorder(lambda: {"bytes_read": 3.0})
    forward = steps.record(nn.Identity())
    for _ in range(10_050):
        forward(torch.zeros(1, dtype=torch.int64))
    assert len(steps.last) == 10_000
    assert steps.stats().steps == steps.stats().tokens == 10_050
    assert steps.stats().bytes_read == 0, "what was read before does not count"


def test_the_class_is_public() -> None:
    assert deepnvme.StreamStats.__doc__
    assert deepnvme.Streaming.__doc__
