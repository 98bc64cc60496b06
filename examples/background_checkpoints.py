"""Save checkpoints in the background while training goes on, and resume from the newest one.

Usage: python examples/background_checkpoints.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme


def train(folder: Path, last_step: int) -> None:
    """Train up to a step, from the newest checkpoint of the folder if there is one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(32, 512), torch.randn(32, 512)

    # `save` returns once the tensors are copied to pinned memory. The drive works while the next steps run.
    with deepnvme.Checkpointer(folder, keep=2, every=5, async_=True) as checkpointer:
        first_step = 1
        if newest := checkpointer.latest():
            state: dict[str, Any] = checkpointer.restore()
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            first_step = newest.step + 1
            print(f"resumed from step {newest.step}")
        for step in range(first_step, last_step + 1):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
                print(f"step {step:2}: loss {loss.item():.4f}, checkpoint on its way")

    # Closing waits for the last save.
    cost = checkpointer.stats()
    print(f"{cost.saves} checkpoints, {cost.nbytes / 1e6:.0f} MB, written in {cost.write_s:.2f} s")
    print(f"training waited for {cost.stall_s:.2f} s")
    print("kept:", *[f"step {checkpoint.step}" for checkpoint in checkpointer.checkpoints])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        train(Path(name), last_step=15)
        train(Path(name), last_step=25)
