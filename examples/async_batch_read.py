"""Read thousands of small tensors with one call, from asyncio, while other tasks run.

Usage: python examples/async_batch_read.py [FOLDER]
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme

Items = list[tuple[Path, int, torch.Tensor]]


async def show_progress(transfer: deepnvme.Transfer) -> None:
    """Stand for the other tasks of a program, which go on during the transfer."""
    while not transfer.done():
        print(f"  {transfer.progress().bytes_done / 1e6:.0f} MB so far")
        await asyncio.sleep(0.01)


async def read(items: Items) -> None:
    """Start one transfer for all tensors, and await it."""
    started = time.perf_counter()
    transfer = deepnvme.start_read_batch(items)  # returns at once
    nbytes, _ = await asyncio.gather(transfer, show_progress(transfer))
    seconds = time.perf_counter() - started
    print(f"batch: {nbytes / 1e6:.0f} MB in {seconds:.2f} s, {nbytes / seconds / 1e9:.2f} GB/s")


def main(folder: Path) -> None:
    """Write 4000 tensors of odd sizes into one file, and read them in two ways."""
    path, offset, items = folder / "records.bin", 0, []
    for index in range(4000):
        tensor = torch.randn(1000 + index)
        items.append((path, offset, tensor))
        offset += tensor.nbytes
    deepnvme.write_batch(items, durability="data")
    targets: Items = [(path, offset, torch.empty_like(tensor)) for path, offset, tensor in items]

    started = time.perf_counter()
    for path, offset, target in targets:
        deepnvme.read(target, path, offset)
    print(f"one by one: {time.perf_counter() - started:.2f} s")
    for _, _, target in targets:
        target.zero_()
    asyncio.run(read(targets))
    print("equal:", all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(items, targets, strict=True)))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if sys.argv[1:] else None) as name:
        main(Path(name))
