"""Where the engine copies to and from by itself."""

from __future__ import annotations

import torch


def is_reached(device: torch.device) -> bool:
    """Whether memory there is read and filled block by block: the host's, and that of CUDA devices."""
    return device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None)
