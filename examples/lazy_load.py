"""Look into a checkpoint and read only the tensors that are used.

Usage: python examples/lazy_load.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme


class BytesRead:
    """Print how many bytes the drive delivered for each line of the example."""

    def __init__(self) -> None:
        self.before = deepnvme.stats().bytes_read

    def show(self, what: str) -> None:
        """Print the bytes since the last call."""
        now = deepnvme.stats().bytes_read
        print(f"{what:42} {(now - self.before) / 1e6:7.2f} MB read")
        self.before = now


def main(folder: Path) -> None:
    """Save a model of 67 MB, and load parts of it."""
    path = folder / "model.safetensors"
    layers = {f"layers.{index}": {"weight": torch.randn(1024, 1024), "bias": torch.randn(1024)} for index in range(16)}
    deepnvme.save({f"{layer}.{name}": each[name] for layer, each in layers.items() for name in each}, path)
    print(f"the file has {path.stat().st_size / 1e6:.2f} MB")

    reads = BytesRead()
    shapes = deepnvme.load(path, device="meta")
    reads.show(f"names and shapes of {len(shapes)} tensors")

    # Each tensor is read at its first use.
    state = deepnvme.load(path, lazy=True, verify="off")
    reads.show("a lazy state")
    mean = state["layers.3.weight"].mean().item()
    reads.show(f"the mean of one tensor, {mean:.4f}")

    biases = deepnvme.load(path, only="*.bias", verify="off")
    reads.show(f"{len(biases)} biases by a pattern")
    layer = deepnvme.load(path, only="layers.7", verify="off")
    reads.show(f"one layer: {', '.join(layer)}")
    deepnvme.load(path)
    reads.show("everything")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
