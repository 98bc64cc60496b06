"""One operation of one tool in a process of its own: ``python -m perfcheck.costs_child OPERATION TOOL FOLDER``.

It prepares, says ``ready``, waits for a line, does the work once, prints its usage as JSON, and waits for another
line. The parent counts system calls between the two lines.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

COUNT, ELEMENTS = 64, 4 << 20  # 64 tensors of 16 MiB


def state() -> dict[str, torch.Tensor]:
    """Return what is saved and loaded: random floats."""
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{i}.weight": torch.randn(ELEMENTS, generator=generator) for i in range(COUNT)}


def _deepnvme(operation: str, folder: Path) -> Callable[[], object]:
    import deepnvme  # noqa: PLC0415

    path = folder / "ours.safetensors"
    if operation == "save":
        made = state()
        return lambda: deepnvme.save(made, path)
    if operation == "load":
        return lambda: deepnvme.load(path)
    if operation == "load into":
        existing = {name: torch.ones_like(tensor) for name, tensor in state().items()}
        return lambda: deepnvme.load(path, into=existing)
    if operation == "iterate":
        from deepnvme.integrations.weights import iterate_weights  # noqa: PLC0415

        return lambda: sum(tensor.numel() for _, tensor in iterate_weights(path))
    if operation == "swap":
        folder.joinpath("swap").mkdir(exist_ok=True)
        swapper = deepnvme.Swapper(folder / "swap", memory="256MB")
        for key, tensor in state().items():
            swapper.put(key, tensor)
        swapper.flush()
        swapper.schedule(list(state()))

        def step() -> None:
            for index in range(COUNT):
                with swapper.borrow(f"layers.{index}.weight") as tensor:
                    tensor[0] += 1
            swapper.flush()

        return step
    raise NotImplementedError(operation)


def _torch(operation: str, folder: Path) -> Callable[[], object]:
    from checkpointbench.tools import sync  # noqa: PLC0415

    path = folder / "torch.pt"
    if operation == "save":
        made = state()
        return lambda: (torch.save(made, path), sync(path))
    if operation == "load":
        return lambda: torch.load(path, weights_only=True)
    if operation == "load into":
        existing = {name: torch.ones_like(tensor) for name, tensor in state().items()}

        def copy() -> None:
            for name, tensor in torch.load(path, weights_only=True, mmap=True).items():
                existing[name].copy_(tensor)

        return copy
    raise NotImplementedError(operation)


def _safetensors(operation: str, folder: Path) -> Callable[[], object]:
    from safetensors import safe_open  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    from checkpointbench.tools import sync  # noqa: PLC0415

    path = folder / "theirs.safetensors"
    if operation == "save":
        made = state()
        return lambda: (save_file(made, path), sync(path))
    if operation == "load":
        # Its tensors are pages of the file until they are touched, so they are touched.
        return lambda: sum(float(tensor.view(torch.int32)[::1024].sum()) for tensor in load_file(path).values())
    if operation == "iterate":

        def each() -> None:
            with safe_open(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    opened.get_tensor(name).view(torch.int32)[::1024].sum()

        return each
    raise NotImplementedError(operation)


TOOLS = {"deepnvme": _deepnvme, "torch": _torch, "safetensors": _safetensors}
OPERATIONS = {
    "save": ("deepnvme", "torch", "safetensors"),
    "load": ("deepnvme", "torch", "safetensors"),
    "load into": ("deepnvme", "torch"),
    "iterate": ("deepnvme", "safetensors"),
    "swap": ("deepnvme",),
}


def _usage() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"cpu_s": used.ru_utime + used.ru_stime, "faults": used.ru_minflt + used.ru_majflt}


def _engine() -> dict[str, int]:
    if "deepnvme" not in sys.modules:
        return {}
    import deepnvme  # noqa: PLC0415

    stats = deepnvme.stats()
    return {name: getattr(stats, name) for name in ("requests", "ops", "bytes_bounced")}


def main(operation: str, tool: str, folder: str) -> None:
    """Prepare, wait, work once, report, wait."""
    work = TOOLS[tool](operation, Path(folder))
    print("ready", flush=True)
    sys.stdin.readline()
    before: dict[str, Any] = {**_usage(), **_engine()}
    work()
    after: dict[str, Any] = {**_usage(), **_engine()}
    print(json.dumps({name: after[name] - before[name] for name in after if name in before}), flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main(*sys.argv[1:])
