"""Write an optimizer of your own whose state stays on disk, with `deepnvme.Swapper`.

Usage: python examples/custom_swap.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme


class DiskMomentum:
    """SGD with momentum. Each momentum is in memory only while its parameter changes."""

    def __init__(self, model: torch.nn.Module, folder: Path, memory: str) -> None:
        self.parameters = dict(model.named_parameters())
        self.swapper = deepnvme.Swapper(folder, memory=memory)
        for key, parameter in self.parameters.items():
            self.swapper.put(key, torch.zeros_like(parameter))
        # The order of each step. The next tensors are read, and changed ones written, while one is in use.
        self.swapper.schedule(self.parameters)

    @torch.no_grad()
    def step(self, loss: torch.Tensor) -> None:
        """Change all parameters by the gradients of a loss."""
        gradients = dict(zip(self.parameters, torch.autograd.grad(loss, [*self.parameters.values()]), strict=True))
        for key, parameter in self.parameters.items():
            with self.swapper.borrow(key) as momentum:  # a view of a memory slot, without a copy
                momentum.mul_(0.9).add_(gradients[key])
                parameter.sub_(momentum, alpha=0.5)


def main(folder: Path) -> None:
    """Train a model whose momentum is three times the memory that it gets."""
    layers = [torch.nn.Linear(512, 512) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        torch.nn.init.orthogonal_(layer.weight)  # so that twelve layers learn in a few steps
    optimizer = DiskMomentum(model, folder, memory="4MiB")
    inputs, targets = torch.randn(32, 512), torch.randn(32, 512)
    for step in range(1, 9):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.step(loss)
        print(f"step {step}: loss {loss.item():.5f}")

    stats = optimizer.swapper.stats()
    print(f"{stats.stored_bytes / 1e6:.1f} MB on disk, at most {stats.resident_bytes_peak / 1e6:.1f} MB in memory")
    print(f"{stats.bytes_read / 1e6:.0f} MB read, {stats.hit_rate:.0%} of the borrows did not wait")
    optimizer.swapper.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
