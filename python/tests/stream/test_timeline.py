"""Timelines of a model from its first read to its end."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from deepnvme import errors

from . import plain_module

if TYPE_CHECKING:
    from pathlib import Path


def lanes_and_names(path: Path) -> tuple[set[str], set[str]]:
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {event["args"].get("name") for event in events if event["ph"] == "M"}
    return lanes, {event["name"] for event in events if event["ph"] == "X"}


def test_from_the_first_fetch_to_the_end(saved: plain_module.Saved, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    model = saved.stream(memory=200_000, trace=path)
    model(saved.question)
    assert not path.exists(), "it is written at the end"
    model.streaming.close()
    lanes, names = lanes_and_names(path)
    assert "compute" in lanes
    assert {f"layers.{index}" for index in range(plain_module.DEPTH)} <= names
    written = path.stat().st_mtime_ns
    model.streaming.close()
    assert path.stat().st_mtime_ns == written


def test_a_model_that_nobody_closes(saved: plain_module.Saved, tmp_path: Path) -> None:
    path = tmp_path / "timeline.html"
    model: Any = saved.stream(memory=200_000, trace=path)
    model(saved.question)
    del model
    gc.collect()
    assert "<svg" in path.read_text()


def test_a_program_that_ends_with_the_model_open(tmp_path: Path) -> None:
    code = (
        "import sys, torch, deepnvme\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])\n"
        "deepnvme.save(model.state_dict(), 'weights.safetensors')\n"
        "model = deepnvme.stream(model, weights='weights.safetensors', memory='1MB', trace='timeline.json')\n"
        "with torch.no_grad(): model(torch.ones(1, 256))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert "compute" in lanes_and_names(tmp_path / "timeline.json")[0]


def test_traces_that_cannot_be_written(saved: plain_module.Saved, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.html"):
        saved.stream(memory=200_000, trace=tmp_path / "timeline.txt")
    with pytest.raises(errors.NotFoundError):
        saved.stream(memory=200_000, trace=tmp_path / "nowhere" / "timeline.html")
    model = saved.stream(memory=200_000)
    assert torch.equal(model(saved.question), saved.answer)
    model.streaming.close()
