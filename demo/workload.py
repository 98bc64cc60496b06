"""The demo's data: the real weights, and generated tensors so that the speed of the disk shows."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch

from measure import remove

DEFAULT_GB = 2.0
PATIENCE_S = 120.0  # for all rounds; with loading the model and the checks the demo stays under three minutes
LEAVE_FREE_BYTES = 1 << 30  # of disk and of memory
# Seconds per byte of a round in addition to the disk: copies, checksums and the comparison.
CPU_S_PER_BYTE = 5e-9
PACE_TRIES = 2
# The parameters of a transformer layer with hidden size 1024, in the shapes of real models.
HIDDEN = 1024
LAYER = {
    "attention.query.weight": (HIDDEN, HIDDEN),
    "attention.key.weight": (HIDDEN, HIDDEN),
    "attention.value.weight": (HIDDEN, HIDDEN),
    "attention.output.weight": (HIDDEN, HIDDEN),
    "mlp.up.weight": (4 * HIDDEN, HIDDEN),
    "mlp.up.bias": (4 * HIDDEN,),
    "mlp.down.weight": (HIDDEN, 4 * HIDDEN),
    "mlp.down.bias": (HIDDEN,),
    "norm.weight": (HIDDEN,),
    "norm.bias": (HIDDEN,),
}


def total_bytes(state: dict[str, torch.Tensor]) -> int:
    """Total bytes of the tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def state_dict(weights: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Make the real weights and layers of random bits, alternately float32 and bfloat16, about `size` bytes in total.

    Random bits, because zeros or repetitions could be compressed or deduplicated.
    """
    state = dict(weights)
    generator = torch.Generator().manual_seed(20)
    have, layer = total_bytes(state), 0
    while have < size:
        dtype = (torch.float32, torch.bfloat16)[layer % 2]
        for name, shape in LAYER.items():
            words = torch.Size(shape).numel() * dtype.itemsize // 8
            bits = torch.empty(words, dtype=torch.int64).random_(generator=generator)
            state[f"generated.{layer}.{name}"] = bits.view(dtype).view(shape)
        have, layer = total_bytes(state), layer + 1
    return state


def choose_bytes(scratch: Path, weights: dict[str, torch.Tensor], methods: int, rounds: int) -> tuple[int, list[str]]:
    """Limit the requested size to what disk, memory and time allow. Return the size and the reasons."""
    asked = float(os.environ.get("DEMO_GB", DEFAULT_GB)) * 1e9
    free_disk = shutil.disk_usage(scratch).free - LEAVE_FREE_BYTES
    # The state, the copy read back, and the buffers of the reader or the page cache.
    free_memory = (available_memory_bytes() - LEAVE_FREE_BYTES) / 3
    write_s, delete_s = disk_pace(scratch, weights)
    seconds_per_byte = methods * (2 * write_s + delete_s) + CPU_S_PER_BYTE
    limits = {
        f"the disk has {max(free_disk, 0) / 1e9:.1f} GB to spare": free_disk / 2,
        f"memory allows a third of {free_memory * 3 / 1e9:.1f} GB": free_memory,
        f"the disk takes about {1e-9 / write_s:.2f} GB/s and the demo should end in three minutes": (
            PATIENCE_S / rounds / seconds_per_byte
        ),
    }
    size, reasons = asked, []
    for reason, limit in limits.items():
        if limit < size:
            size = max(limit, total_bytes(weights))
            reasons.append(f"{size / 1e9:.2f} GB instead of {asked / 1e9:.2f} GB: {reason}")
    return int(size), reasons


def disk_pace(scratch: Path, weights: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Measure seconds per byte to write the real weights durably, and to delete them. The best try counts."""
    path, size = scratch / "pace.bin", total_bytes(weights)
    tries = []
    for _ in range(PACE_TRIES):
        begin = time.monotonic()
        with path.open("wb") as file:
            for tensor in weights.values():
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        written = time.monotonic()
        remove(path)
        tries.append(((written - begin) / size, (time.monotonic() - written) / size))
    return min(tries)


def available_memory_bytes() -> int:
    """Return the memory available without swapping, within the limit of this control group."""
    available = numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        # Cached pages count as used, but are freed on demand.
        cached = numbers(group / "memory.stat")
    except (OSError, ValueError):  # no such group, or no limit
        return available
    return min(available, max(limit - used + cached["active_file"] + cached["inactive_file"], 0))


def numbers(path: Path) -> dict[str, int]:
    """Parse a file of lines `name number ...`."""
    return {name: int(number) for name, number, *_ in map(str.split, path.read_text().splitlines())}
