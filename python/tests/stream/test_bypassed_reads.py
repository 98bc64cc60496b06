"""A streamed weight that is on disk raises in functions that bypass ``__torch_function__``."""

from __future__ import annotations

import copy
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

import deepnvme
from bypasses import BYPASSES, needs_refusals, scripted

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 64
swap_tensors: Any = torch.utils.swap_tensors


READS: dict[str, Callable[[Any], Any]] = BYPASSES | {
    "numpy": np.asarray,
    "an array": lambda p: p.detach().numpy(),
    "a list": lambda p: p.tolist(),
    "dlpack": torch._C._to_dlpack,
    "address": lambda p: ctypes.c_float.from_address(torch.Tensor.data_ptr(p)).value,
    "storage": torch.Tensor.untyped_storage,
    "a map": torch.func.vmap(torch.sum),
    "deepcopy": copy.deepcopy,
    "swap": lambda p: swap_tensors(p, nn.Parameter(torch.ones(WIDTH, WIDTH))),
    "swapped": lambda p: swap_tensors(nn.Parameter(torch.ones(WIDTH, WIDTH)), p),
}


@needs_refusals
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("read", READS)
def test_a_read_of_a_placeholder_is_refused(tmp_path: Path, read: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    deepnvme.save(model.state_dict(), tmp_path / "w.safetensors")
    x = torch.ones(1, WIDTH)
    expected = model(x)
    streamed = deepnvme.stream(model, weights=tmp_path / "w.safetensors", memory="100kB")
    with pytest.raises(RuntimeError, match=r"2\.weight is on disk.*close the streaming"):
        READS[read](streamed[2].weight)
    # TorchScript passes no messages of Python on.
    with pytest.raises(RuntimeError):
        scripted(streamed[2].weight)
    with torch.no_grad():
        assert torch.equal(streamed(x), expected)
    streamed.streaming.close()
    assert torch.equal(streamed(x), expected)
