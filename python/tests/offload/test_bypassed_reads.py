"""Functions that bypass ``__torch_function__`` get an error of a parameter on disk, never a value."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
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
trace: Any = torch.jit.trace


class Own(nn.Parameter):
    """A parameter of a class of its own, as quantisers have."""


def made(kind: type[nn.Parameter]) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers:
        layer.weight = kind(layer.weight.data)
    return nn.Sequential(*layers)


READS: dict[str, Callable[[Any], Any]] = BYPASSES | {
    "Tensor": torch.Tensor,
    "another parameter": lambda p: torch.tensor(nn.Parameter(p.data)),
    "numpy": lambda p: np.asarray(p.detach()),
    "an array": lambda p: p.detach().numpy(),
    "dlpack": torch._C._to_dlpack,
    "script": scripted,
    "trace": lambda p: trace(lambda x: x @ p, torch.ones(1, WIDTH)),
    "no override": lambda p: torch._C._disabled_torch_function_impl(torch.add, (), (p, 1), {}),
    "address": lambda p: ctypes.c_float.from_address(torch.Tensor.data_ptr(p.detach())).value,
    "storage": lambda p: p.untyped_storage(),
    "list": lambda p: p.tolist(),
    "clone": lambda p: p.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "shared": lambda p: p.share_memory_(),
    "numpy out": lambda p: np.add(np.ones((WIDTH, WIDTH), np.float32), p, out=np.ones((WIDTH, WIDTH), np.float32)),
    "copied from": lambda p: torch.ones(WIDTH, WIDTH).copy_(p),
    "a storage set": lambda p: torch.empty(0).set_(p.data),
    "out": lambda p: torch.add(torch.ones(WIDTH, WIDTH), 1, out=p.data),
    "foreach": lambda p: torch._foreach_add([p.data], 1),
    "a module": lambda p: nn.utils.parameters_to_vector([p]),
    "norm": torch.linalg.vector_norm,
}


@needs_refusals
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [nn.Parameter, Own])
@pytest.mark.parametrize("read", READS)
def test_a_read_that_bypasses_the_class_is_refused(tmp_path: Path, read: str, kind: type[nn.Parameter]) -> None:
    model = made(kind)
    expected = copy.deepcopy(model).state_dict()
    deepnvme.offload_parameters(model, memory="200kB", swap_dir=tmp_path)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"1\.weight is on disk.*gathered"):
        READS[read](model[1].weight)
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    model.offloading.close()  # type: ignore[operator, union-attr]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    torch.tensor(model[1].weight)
