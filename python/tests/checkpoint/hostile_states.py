"""Hostile states of optimizers and packed models, for ``hostile_inputs.py``.

Each exists with and without checksums. The first gives the saved state or an error. The second may contain anything
consistent: a state is complete, and a model gives an answer.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepnvme
from deepnvme import errors
from deepnvme._deepnvme import _run_command
from mutators import Target, as_text, mutate_json, same
from small_optimizer import small_optimizer, stepped_optimizer

SUMS = "deepnvme.checksums"


def split(whole: bytes) -> tuple[dict[str, Any], bytes]:
    """Split a safetensors file into its header and its tensors."""
    length = int.from_bytes(whole[:8], "little")
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def write_mutation(path: Path, header: dict[str, Any], inner: str, data: bytes, dice: random.Random) -> None:
    """Change a header, or, more often, the text ``inner`` in its metadata."""
    changed = header
    metadata = header["__metadata__"]
    for _ in range(dice.randrange(1, 3)):
        if dice.random() < 0.7 and isinstance(metadata.get(inner), str):
            document = mutate_json(json.loads(metadata[inner]), dice)
            metadata = {**metadata, inner: json.dumps(document)}
            changed = {**changed, "__metadata__": metadata}
        else:
            changed = mutate_json(changed, dice)
            break
    text = as_text(changed, dice)
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    said = dice.choice([len(text)] * 12 + [len(text) - 1, 1 << 40, 0])
    path.write_bytes(struct.pack("<Q", said) + text + data)


def optimizer(folder: Path) -> Target:
    """Changed descriptions of a state by ``save_state``: settings, counts, byte ranges, tensors."""
    mine, his = stepped_optimizer(folder), small_optimizer(folder)
    state = mine.state_dict()
    path = folder / "state"
    files = []
    for checksums in (True, False):
        mine.save_state(path, checksums=checksums)
        files.append(split(path.read_bytes()))
    turn = [0]

    def write(dice: random.Random) -> None:
        turn[0] += 1
        header, data = files[turn[0] % 2]
        write_mutation(path, header, "deepnvme.optimizer", data, dice)

    def load() -> object:
        his.load_state(path, verify="full" if turn[0] % 2 == 0 else "auto")
        return his.state_dict()

    def fits(loaded: Any) -> bool:
        if turn[0] % 2 == 0:
            return same(loaded, state)
        # Either all of a parameter's state, or none of it.
        wanted = state["state"][0].keys()
        return loaded["state"].keys() == {0, 1} and all(one.keys() == wanted for one in loaded["state"].values())

    mine.save_state(path)
    return path, write, load, fits


class Layers(torch.nn.Module):
    """Two layers with weights just large enough to be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(128, 256, bias=False).bfloat16() for _ in range(2))
        self.scale = torch.nn.Parameter(torch.rand(256).bfloat16())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        answer: torch.Tensor = (first(rows) + second(rows)) * self.scale
        return answer


def packed(folder: Path, form: str) -> Target:
    """Changed descriptions of the weights in a packed file."""
    torch.manual_seed(6)
    torch.set_num_threads(1)
    module = Layers().eval()
    rows = torch.randn(3, 128).bfloat16()
    source, target = folder / "source", folder / "packed"
    source.mkdir()
    deepnvme.save(module.state_dict(), source / "model.safetensors")
    assert _run_command(["pack", str(source), str(target), "--dtype", form]) == 0
    path = target / "packed.safetensors"
    sealed, data = split(path.read_bytes())
    without = {key: value for key, value in sealed["__metadata__"].items() if key != SUMS}
    headers = [sealed, {**sealed, "__metadata__": without}]
    turn = [0]
    # One engine for all, to save the time of starting threads.
    engine = deepnvme.Engine(workers=1)

    def write(dice: random.Random) -> None:
        turn[0] += 1
        write_mutation(path, headers[turn[0] % 2], "deepnvme.packed", data, dice)

    def load() -> object:
        with torch.device("meta"):
            empty = Layers().eval()
        # For example bfloat16 in a file of float32, or other names: the module reports it.
        with contextlib.suppress(errors.UnsupportedError):
            model = deepnvme.stream(empty, weights=target, memory=400_000, engine=engine)
            try:
                with torch.no_grad():
                    return model(rows)
            finally:
                model.streaming.close()
        return None

    answer = load()
    assert isinstance(answer, torch.Tensor)
    return path, write, load, lambda loaded: turn[0] % 2 == 1 or loaded is None or same(loaded, answer)


STATES: dict[str, Callable[[Path], Target]] = {
    "optimizer": optimizer,
    "packed_lossless": lambda folder: packed(folder, "lossless"),
    "packed_int8": lambda folder: packed(folder, "int8"),
}
