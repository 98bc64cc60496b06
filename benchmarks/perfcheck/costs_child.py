"""One operation of one tool in a process of its own: ``python -m perfcheck.costs_child OPERATION TOOL FOLDER``.

It prepares, says ``ready``, waits for a line, does the work once, prints its usage as JSON, and waits for another
line. The parent counts system calls between the two lines.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepnvme
import torch
from deepnvme.integrations.weights import iterate_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from common.memory import touch
from common.sync import sync

if TYPE_CHECKING:
    from collections.abc import Iterable

COUNT, ELEMENTS = 64, 4 << 20  # 64 tensors of 16 MiB


def state() -> dict[str, torch.Tensor]:
    """Return the tensors to save and load: random floats."""
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.weight": torch.randn(ELEMENTS, generator=generator) for i in range(COUNT)}


Work = Callable[[], object]


def tensors_to_fill() -> dict[str, torch.Tensor]:
    """Return tensors to fill."""
    return {name: torch.ones_like(tensor) for name, tensor in state().items()}


def touch_each(tensors: Iterable[torch.Tensor]) -> None:
    """Touch one tensor after the other, and keep none: tensors of a mapped file have no memory until then."""
    for tensor in tensors:
        touch([tensor])


def _save(folder: Path) -> Work:
    made = state()
    return lambda: deepnvme.save(made, folder / "ours.safetensors")


def _load_into(folder: Path) -> Work:
    into = tensors_to_fill()
    return lambda: deepnvme.load(folder / "ours.safetensors", into=into)


def _iterate(folder: Path) -> Work:
    return lambda: touch_each(tensor for _, tensor in iterate_weights(folder / "ours.safetensors"))


def _swap(folder: Path) -> Work:
    folder.joinpath("swap").mkdir(exist_ok=True)
    swapper = deepnvme.Swapper(folder / "swap", memory="256MB")
    made = state()
    for key, tensor in made.items():
        swapper.put(key, tensor)
    swapper.flush()
    swapper.schedule(list(made))
    del made

    def step() -> None:
        for index in range(COUNT):
            with swapper.borrow(f"layers.{index}.weight") as tensor:
                tensor[0] += 1
        swapper.flush()

    return step


def _torch_save(folder: Path) -> Work:
    made, path = state(), folder / "torch.pt"

    def save() -> None:
        torch.save(made, path)
        sync(path)

    return save


def _torch_load_into(folder: Path) -> Work:
    into = tensors_to_fill()

    def copy() -> None:
        for name, tensor in torch.load(folder / "torch.pt", weights_only=True, mmap=True).items():
            into[name].copy_(tensor)

    return copy


def _safetensors_save(folder: Path) -> Work:
    made, path = state(), folder / "theirs.safetensors"

    def save() -> None:
        save_file(made, path)
        sync(path)

    return save


def _safetensors_iterate(folder: Path) -> Work:
    def each() -> None:
        with safe_open(folder / "theirs.safetensors", framework="pt") as opened:
            touch_each(opened.get_tensor(name) for name in opened.keys())  # noqa: SIM118 - it is no mapping

    return each


#: The function of each tool, by operation. Saves come first: later operations read their files.
OPERATIONS: dict[str, dict[str, Callable[[Path], Work]]] = {
    "save": {"deepnvme": _save, "torch": _torch_save, "safetensors": _safetensors_save},
    "load": {
        "deepnvme": lambda folder: lambda: deepnvme.load(folder / "ours.safetensors"),
        "torch": lambda folder: lambda: torch.load(folder / "torch.pt", weights_only=True),
        "safetensors": lambda folder: lambda: touch(load_file(folder / "theirs.safetensors").values()),
    },
    "load into": {"deepnvme": _load_into, "torch": _torch_load_into},
    "iterate": {"deepnvme": _iterate, "safetensors": _safetensors_iterate},
    "swap": {"deepnvme": _swap},
}


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "faults": used.ru_minflt + used.ru_majflt}


def _engine_counters() -> dict[str, int]:
    stats = deepnvme.stats()
    return {name: getattr(stats, name) for name in ("requests", "ops", "bytes_bounced")}


def main(operation: str, tool: str, folder: str) -> None:
    """Prepare, wait, work once, report, wait."""
    work = OPERATIONS[operation][tool](Path(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    counts = _engine_counters if tool == "deepnvme" else dict
    before: dict[str, Any] = {**_usage(), **counts()}
    work()
    after: dict[str, Any] = {**_usage(), **counts()}
    print(json.dumps({name: after[name] - before[name] for name in after}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
