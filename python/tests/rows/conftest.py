"""The file that most tests of packed tables begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write a table, one of codes with scales, and tensors that are none. Return the file."""
    torch.manual_seed(3)
    state = {
        "table": torch.randn(2000, 40),
        "codes": torch.randint(-100, 100, (2000, 64)).char(),
        "scales": torch.rand(2000, 4).bfloat16(),
        "bias": torch.ones(7),
        "cube": torch.ones(2, 3, 4, dtype=torch.float64),
    }
    deepnvme.save(state, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"
