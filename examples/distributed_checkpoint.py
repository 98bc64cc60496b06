"""Write one checkpoint with several processes, and restore it in one.

Each process writes its byte range of the same file. Real jobs start their processes with torchrun.

Usage: python examples/distributed_checkpoint.py [FOLDER]
"""

import sys
import tempfile
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    from torch.multiprocessing.spawn import spawn
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme

PROCESSES = 2


def train(rank: int, folder: Path) -> None:
    """Train for some steps as one process of the job."""
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2048, 4096))
    optimizer = torch.optim.AdamW(model.parameters())

    # All processes make a Checkpointer with the same settings, and call `save` with the same steps.
    with deepnvme.Checkpointer(folder / "run", keep=2, async_=True) as checkpointer:
        for step in range(1, 4):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 2048)).square().mean()
            loss.backward()
            optimizer.step()
            checkpointer.save(step, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()})
            print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)
    print(f"rank {rank} wrote {deepnvme.stats().bytes_written / 1e6:.0f} MB", flush=True)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Run the job, and read its newest checkpoint."""
    spawn(train, (folder,), PROCESSES)
    checkpointer = deepnvme.Checkpointer(folder / "run")
    for checkpoint in checkpointer.checkpoints:
        print(f"step {checkpoint.step}: {checkpoint.path.name}, {checkpoint.nbytes / 1e6:.0f} MB")
    state = checkpointer.restore(verify="full")
    print("restored in one process:", *state, tuple(state["model"]["weight"].shape))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
