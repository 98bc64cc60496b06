"""The bytes of a tensor."""

from __future__ import annotations

import torch

import deepnvme


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(deepnvme.as_bytes(tensor.detach().contiguous()).numpy())
