"""A state that changes while it is pickled: no object is saved in place of one that was freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import deepnvme


class Changes(TorchFunctionMode):
    """Frees pickled tensors, and makes as many new ones in between, as another thread could."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state
        self.done = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.done and args and args[0] is self.state["then"][0]:
            self.done = True
            with torch._C.DisableTorchFunction():
                self.state["first"].clear()
                self.state["last"].extend(torch.full((3,), float(index)) for index in range(500))
        return func(*args, **(kwargs or {}))


def test_a_reused_address_is_another_object(tmp_path: Path) -> None:
    # Views whose storage outlives them.
    base = torch.full((3,), -1.0)
    state: dict[str, Any] = {"first": [base.view(3) for _ in range(500)], "then": [torch.full((3,), -2.0)], "last": []}
    with Changes(state) as changes:
        deepnvme.save(state, tmp_path / "x.pt")
    assert changes.done
    loaded = deepnvme.load(tmp_path / "x.pt")["last"]
    assert [tensor[0].item() for tensor in loaded] == list(range(500))
