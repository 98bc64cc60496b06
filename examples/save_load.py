"""Save a state dict and load it again, in both formats, and compare the speed with torch.

The files are ordinary torch archives and safetensors files, so torch and safetensors read them.

Usage: python examples/save_load.py [FOLDER]

FOLDER is on the drive to measure.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme


def measure(what: str, nbytes: int, call: Callable[[], object]) -> None:
    """Print the speed of a call that moves that many bytes."""
    started = time.perf_counter()
    call()
    print(f"{what:44} {nbytes / (time.perf_counter() - started) / 1e9:5.2f} GB/s")


def main(folder: Path) -> None:
    """Save and load a state of 134 MB."""
    state = {f"layers.{index}.weight": torch.randn(2048, 2048) for index in range(8)}
    nbytes = sum(tensor.nbytes for tensor in state.values())
    print(f"{len(state)} tensors, {nbytes / 1e6:.0f} MB")

    # A save is durable when it returns. The name selects the format.
    archive, safetensors = folder / "model.pt", folder / "model.safetensors"
    measure("torch.save, not durable", nbytes, lambda: torch.save(state, folder / "torch.pt"))
    measure("deepnvme.save, durable", nbytes, lambda: deepnvme.save(state, archive))
    measure("deepnvme.save, durable, safetensors", nbytes, lambda: deepnvme.save(state, safetensors))

    # The first load of each tool also imports modules, starts threads and gets memory: it is not measured.
    torch.load(folder / "torch.pt")
    deepnvme.load(archive)
    measure("torch.load, from the page cache", nbytes, lambda: torch.load(folder / "torch.pt"))
    measure("deepnvme.load, from the drive", nbytes, lambda: deepnvme.load(archive))
    measure("deepnvme.load, every byte compared", nbytes, lambda: deepnvme.load(safetensors, verify="full"))

    # Only some tensors, or straight into the memory of tensors that exist.
    print("one tensor:", *deepnvme.load(archive, only="layers.3"))
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    measure("deepnvme.load into existing tensors", nbytes, lambda: deepnvme.load(archive, into=target))
    print("equal to what was saved:", all(torch.equal(target[name], state[name]) for name in state))
    print("readable by torch:", torch.load(archive).keys() == state.keys())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
