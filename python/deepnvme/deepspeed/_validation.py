"""`validate=True`: read the file again after a transfer, and compare it with the tensor.

Plain Python reads it, so that an error of the engine shows. Stripe sets are read with the engine.
"""

from __future__ import annotations

import errno
import logging

import torch

from deepnvme._deepnvme import StripeSet
from deepnvme._deepnvme import read as read_bytes
from deepnvme._utils.tensors import as_bytes
from deepnvme.errors import Error

from ._arguments import Name

CHUNK_BYTES = 8 << 20

logger = logging.getLogger(__name__)


def compare(tensor: torch.Tensor, name: Name, offset: int) -> None:
    """Raise `deepnvme.Error` if the bytes of the file at `offset` differ from `tensor`."""
    expected = as_bytes(tensor.detach().cpu().contiguous())
    for start in range(0, expected.numel(), CHUNK_BYTES):
        part = expected[start : start + CHUNK_BYTES]
        found = _file_bytes(name, offset + start, part.numel())
        if not torch.equal(found, part):
            first = offset + start + _first_difference(found, part)
            msg = (
                f"validate: the file differs from the tensor, first at byte {first}; "
                "another process wrote to it, or the device returned wrong data"
            )
            raise Error(errno.EIO, msg, str(name))
    logger.info("validated %d bytes of %s at offset %d", expected.numel(), name, offset)


def _file_bytes(name: Name, offset: int, count: int) -> torch.Tensor:
    buffer = bytearray(count)
    found = torch.frombuffer(buffer, dtype=torch.uint8)
    if isinstance(name, StripeSet):
        read_bytes(found, name, offset)
        return found
    length = 0
    with open(name, "rb", buffering=0) as file:  # noqa: PTH123 - the name may be bytes
        file.seek(offset)
        while length < count:
            more = file.readinto(memoryview(buffer)[length:])
            if not more:
                break
            length += more
    return found[:length]


def _first_difference(found: torch.Tensor, expected: torch.Tensor) -> int:
    common = min(found.numel(), expected.numel())
    different = torch.nonzero(found[:common] != expected[:common])
    return int(different[0]) if different.numel() else common
