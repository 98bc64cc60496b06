"""Record what the drive and your own code do, and how much of it overlaps.

Usage: python examples/trace_timeline.py [timeline.html]

The file is kept. Perfetto and chrome://tracing open *.json.
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

LAYERS = 8


def main(folder: Path, timeline: Path) -> None:
    """Compute with one layer while the next one is read."""
    paths = [folder / f"layer-{index}.bin" for index in range(LAYERS)]
    for path in paths:
        deepnvme.write(torch.randn(2048, 2048), path, durability="data")
    slots = [deepnvme.pinned_empty((2048, 2048), torch.float32) for _ in range(2)]
    activations = torch.randn(256, 2048)

    with deepnvme.trace(timeline) as trace:
        transfer = deepnvme.start_read(slots[0], paths[0])
        for index in range(LAYERS):
            transfer.result()
            if index + 1 < LAYERS:
                transfer = deepnvme.start_read(slots[(index + 1) % 2], paths[index + 1])
            started = time.monotonic_ns()
            activations = torch.tanh(activations @ slots[index % 2])
            # A bar of your own, in a lane of your own.
            deepnvme.span(f"layer {index}", "compute", started, time.monotonic_ns())

    summary = trace.summary()
    print(f"{summary['ops']} ops, {summary['bytes_read'] / 1e6:.0f} MB, in {summary['seconds']:.3f} s")
    print(f"the drive was busy for {summary['disk_busy_s']:.3f} s")
    for lane in summary["lanes"]:
        print(f"{lane['name']}: {lane['spans']} spans, {lane['busy_s']:.3f} s")
        print(f"  {lane['disk_overlap']:.0%} of that while the drive worked")
    print(f"{timeline.name}: {timeline.stat().st_size / 1e3:.0f} kB, open it in a browser")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name), Path(sys.argv[1]) if sys.argv[1:] else Path(name) / "timeline.html")
