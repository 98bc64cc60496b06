"""Every call that takes a path refuses names that no file can have, with the same error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
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


@pytest.mark.parametrize("name", ["s3://bucket/a", "hf://org/model", "file:///a", "HTTPS://host/a"])
@pytest.mark.parametrize("call", CALLS)
def test_a_url_names_no_local_folder(call: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"the path .* is a URL; .*local or mounted folder"):
        CALLS[call](name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("disks", [[], ["s3://disk"]])
def test_pack_makes_no_folder_of_a_url(disks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    deepnvme.save({"a": TENSOR}, "a.safetensors")
    with pytest.raises(deepnvme.Error, match="it is a URL"):
        deepnvme.pack("a.safetensors", "new" if disks else "s3://bucket/new", disks=disks)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


@pytest.mark.parametrize("name", ["a:b", "a:/b", "1://b", "c/s3://b", "./s3://b", "a_b://c"])
def test_a_local_name_that_resembles_a_url(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    deepnvme.save({"a": TENSOR}, name)
    assert deepnvme.load(name)["a"].equal(TENSOR)


@pytest.mark.parametrize("name", ["a\ud800", "a\0b"], ids=ascii)
def test_files_of_optimizers(tmp_path: Any, name: str) -> None:
    optimizer = optim.AdamW([torch.nn.Parameter(torch.ones(8))], swap_dir=tmp_path, memory="1MB")
    for call in (optimizer.save_state, optimizer.load_state):
        with pytest.raises(InvalidArgumentError, match=r"the path .* has a"):
            call(name)
    optimizer.close()
