"""An index of a distributed checkpoint that cannot be read is an error of deepnvme where torch reports it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys, load
from torch.distributed.checkpoint.state_dict_saver import save

import deepnvme
from deepnvme import errors
from deepnvme.integrations.dcp import DeepnvmeReader, DeepnvmeWriter


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "no text", "removed", "no folder"])
@pytest.mark.parametrize("keys", [None, {"a"}])
def test_an_index_that_cannot_be_read_is_an_error_of_deepnvme(tmp_path: Path, damage: str, keys: Any) -> None:
    """`dcp.load` replaces errors of `read_metadata` by an `AssertionError`."""
    folder = tmp_path / "checkpoint"
    save({"a": torch.ones(9)}, storage_writer=DeepnvmeWriter(folder), no_dist=True)
    index = folder / "deepnvme.json"
    text = index.read_bytes()
    if damage == "flipped":
        index.write_bytes(text.replace(b"9", b"8", 1))
    elif damage in ("cut", "empty", "no text"):
        index.write_bytes({"cut": text[:-20], "empty": b"", "no text": b"\xff" * 50}[damage])
    elif damage == "removed":
        index.unlink()
    else:
        shutil.rmtree(folder)
    with pytest.raises(CheckpointException) as caught:
        if keys is None:
            load({"a": torch.zeros(9)}, storage_reader=DeepnvmeReader(folder), no_dist=True)
        else:
            _load_state_dict_from_keys(keys, storage_reader=DeepnvmeReader(folder))
    (failure, _) = caught.value.failures[0]
    assert isinstance(failure, deepnvme.Error), failure
    expected = (
        FileNotFoundError if damage in ("removed", "no folder") else errors.CorruptFileError | errors.ChecksumError
    )
    assert isinstance(failure, expected)
    assert "deepnvme.json" in str(failure)


@pytest.mark.parametrize(
    "entry",
    [{"bytes": 1 << 64}, {"bytes": -1}, {"bytes": 1.0}, {"index_crc64": "0" * 17}, {"index_crc64": "-1"}, [], None],
)
def test_fingerprints_that_no_save_writes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: object
) -> None:
    """Found by the fuzz target `distributed`: the text has its checksum, so somebody has made it."""
    save({"a": torch.ones(9)}, storage_writer=DeepnvmeWriter(tmp_path), no_dist=True)
    index = tmp_path / "deepnvme.json"
    document = json.loads(index.read_text())
    ((name, found),) = document["deepnvme.files"].items()
    document["deepnvme.files"] = {name: {**found, **entry} if isinstance(entry, dict) else entry}
    index.write_text(json.dumps(document))
    monkeypatch.setattr("deepnvme._checkpoint.dcp.reader._list_state", lambda _: "sealed")
    with pytest.raises(errors.CorruptFileError, match=r"deepnvme\.json"):
        DeepnvmeReader(tmp_path).read_metadata()
