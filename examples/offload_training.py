"""Train a model with its parameters, gradients and optimizer state on disk.

Usage: python examples/offload_training.py [FOLDER]
"""

import sys
import tempfile
import time
from pathlib import Path

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

    # From here on a block's parameters are in memory only while the block runs.
    offloading = deepnvme.offload_parameters(model, memory="4MB", swap_dir=folder)
    # The optimizer keeps its state on disk, and moves gradients there as soon as autograd has made them.
    optimizer = deepnvme.optim.AdamW(model.parameters(), lr=1e-4, swap_dir=folder, memory="4MB", swap_gradients=True)
    offloading.attach(optimizer)

    inputs = torch.randn(32, 512)
    targets = inputs.sum(1, keepdim=True) / 16
    for step in range(1, 7):
        started = time.perf_counter()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, {time.perf_counter() - started:.2f} s")

    for what, stats in (("parameters", offloading.stats()), ("optimizer", optimizer.swap_stats())):
        peak, limit = stats.resident_bytes_peak / 1e6, stats.memory_bytes / 1e6
        print(f"{what}: at most {peak:.0f} of {limit:.0f} MB in memory, {stats.stored_bytes / 1e6:.0f} MB on disk")
        print(f"  read {stats.bytes_read / 1e6:.0f} MB, wrote {stats.bytes_written / 1e6:.0f} MB")

    offloading.save(folder / "model.safetensors")  # one file in memory at a time
    optimizer.close()
    offloading.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
