"""Every call that takes a path refuses names that no file can have, with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme import optim
from deepnvme.deepspeed import aio_handle
from deepnvme.errors import InvalidArgumentError

TENSOR = torch.ones(8)
CALLS: dict[str, Callable[[Any], Any]] = {
    "read": lambda name: deepnvme.read(TENSOR, name),
    "write": lambda name: deepnvme.write(TENSOR, name),
    "read_batch": lambda name: deepnvme.read_batch([(name, 0, TENSOR)]),
    "start_write": lambda name: deepnvme.start_write(TENSOR, name),
    "open": deepnvme.open,
    "save": lambda name: deepnvme.save({"a": TENSOR}, name),
    "load": deepnvme.load,
    "Checkpointer": deepnvme.Checkpointer,
    "Swapper": lambda name: deepnvme.Swapper(name, memory="1MB"),
    "StripeSet": lambda name: deepnvme.StripeSet([name, "b"], stripe_bytes=4096),
    "sync_pwrite": lambda name: aio_handle().sync_pwrite(TENSOR, name),
    "async_pread": lambda name: aio_handle().async_pread(TENSOR, name),
    "pwrite": lambda name: aio_handle().pwrite(TENSOR, name, True, False),
}


@pytest.mark.parametrize(
    ("name", "what"), [("a\ud800", "lone surrogate"), ("\udfff/a", "lone surrogate"), ("a\0b", "null byte")], ids=ascii
)
@pytest.mark.parametrize("call", CALLS)
def test_a_name_that_no_file_can_have(call: str, name: str, what: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"the (path|part) .* has a {what} in"):
        CALLS[call](name)


@pytest.mark.parametrize("name", ["a\ud800", "a\0b"], ids=ascii)
def test_files_of_optimizers(tmp_path: Any, name: str) -> None:
    optimizer = optim.AdamW([torch.nn.Parameter(torch.ones(8))], swap_dir=tmp_path, memory="1MB")
    for call in (optimizer.save_state, optimizer.load_state):
        with pytest.raises(InvalidArgumentError, match=r"the path .* has a"):
            call(name)
    optimizer.close()
