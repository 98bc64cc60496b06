"""Train a model with its parameters, gradients, optimizer state and activations on disk.

Usage: python examples/offload_training.py [FOLDER]
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme


def main(folder: Path) -> None:
    """Train a network whose state is many times the memory that it gets."""
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(12)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(512, 1))
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{nbytes / 1e6:.0f} MB of parameters, the same of gradients, {2 * nbytes / 1e6:.0f} MB of moments")

    # From here on, all of them and the activations are on disk, and share this memory while they are used.
    model, optimizer = deepnvme.offload(model, torch.optim.AdamW, lr=1e-4, memory="8MB", swap_dir=folder)

    inputs = torch.randn(32, 512)
    targets = inputs.sum(1, keepdim=True) / 16
    for step in range(1, 7):
        started = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - started:.2f} s")

    print(optimizer.plan)
    offloading: Any = model.offloading
    stats = offloading.stats()
    peak, limit = stats.resident_bytes_peak / 1e6, stats.memory_bytes / 1e6
    print(f"at most {peak:.0f} of {limit:.0f} MB in memory, {stats.stored_bytes / 1e6:.0f} MB on disk")

    offloading.save(folder / "model.safetensors")  # one file in memory at a time
    optimizer.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
