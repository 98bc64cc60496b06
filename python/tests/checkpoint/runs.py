"""Folders of a ``Checkpointer`` with a small state for each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import deepnvme


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((30_000,), float(step)), "step": step}


def save_all(folder: Path, *steps: int, **options: Any) -> None:
    with deepnvme.Checkpointer(folder, keep=None, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state_of(step))
