"""Use several drives as one file, without RAID.

Usage: python examples/stripe_disks.py [FOLDER ...]

Give one folder on each drive.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit("This example needs torch: pip install torch")
import deepnvme


def main(folders: list[Path]) -> None:
    """Write and read a tensor in stripes of 1 MiB, and show where its bytes are."""
    tensor = torch.randn(32 << 20).bfloat16()
    disks = deepnvme.StripeSet([folder / "weights.bin" for folder in folders], stripe_bytes="1MiB")

    started = time.perf_counter()
    deepnvme.write(tensor, disks, durability="data")
    seconds = time.perf_counter() - started
    print(f"wrote {tensor.nbytes / 1e6:.0f} MB at {tensor.nbytes / seconds / 1e9:.2f} GB/s")
    for path in disks.paths:
        print(f"  {Path(path).stat().st_size / 1e6:.1f} MB in {path}")

    # The manifest next to the first part names all of them. `read`, `write` and `load` accept it as a path.
    again = torch.empty_like(tensor)
    started = time.perf_counter()
    deepnvme.read(again, disks.manifest_path)
    seconds = time.perf_counter() - started
    print(f"read {again.nbytes / 1e6:.0f} MB at {again.nbytes / seconds / 1e9:.2f} GB/s")
    print("equal:", torch.equal(tensor, again))

    # Checkpoints are striped in the same way.
    model = deepnvme.StripeSet([folder / "model.safetensors" for folder in folders])
    deepnvme.save({"weight": tensor}, model)
    print("checkpoint:", *deepnvme.load(model), "from", Path(model.manifest_path).name)


if __name__ == "__main__":
    with ExitStack() as stack:
        # Without arguments, two folders of the same drive stand for two drives.
        places = sys.argv[1:] or [tempfile.gettempdir()] * 2
        main([Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place))) for place in places])
