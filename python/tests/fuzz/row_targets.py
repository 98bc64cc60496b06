"""Readers of packed tables, and of the traces of requests that a table is packed with."""

from __future__ import annotations

import contextlib
import json
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import deepnvme
from attacked_readers import zipped
from deepnvme import errors
from deepnvme._rows.commands import read_trace
from deepnvme._rows.packed import hot_rows
from packed_header import compact, sealed

from .reading import read, safetensors_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .watch import Watch

ROWS = 50


def packed_table(folder: Path, watch: Watch) -> Callable[[bytes], None]:
    """The description of a packed table. A whole gather and ``deepnvme.verify`` accept the same files."""
    raw, path, engine = folder / "raw", folder / "rows.safetensors", deepnvme.Engine(workers=1)
    codes = torch.arange(ROWS * 32, dtype=torch.int32).to(torch.int8).reshape(ROWS, 32)
    deepnvme.save({"codes": codes, "scales": torch.rand(ROWS, 2) + 1}, raw)
    options: dict[str, Any] = {"memory": "1MB", "trace": [9, 9, 4, 4, 40, 40]}
    deepnvme.RowStore.create(path, raw, "codes", scales="scales", **options).close()
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header, content = json.loads(whole[8:end]), whole[end:]
    (folder / "description").write_text(header["__metadata__"]["deepnvme.rows"])

    def gather() -> object:
        with deepnvme.RowStore(path, memory="1MB", engine=engine) as store:
            store.verify()
            found = store.gather(torch.arange(len(store)))
            assert found.shape == store.shape
        return found

    def body(data: bytes) -> None:
        header["__metadata__"]["deepnvme.rows"] = compact(data.decode(errors="replace"))
        path.write_bytes(sealed(safetensors_file(header, content)))
        is_read = False
        # A block larger than the memory.
        with contextlib.suppress(errors.InvalidArgumentError):
            is_read = read(watch, path, gather) is not None
        assert deepnvme.verify(path, check=False)["is_sound"] == is_read

    return body


def trace(folder: Path, watch: Watch) -> Callable[[bytes], None]:
    """A trace of requests: an array of numpy, or a pickle in an archive. The first byte chooses."""
    array, archive = folder / "trace.npy", folder / "trace.pt"
    np.save(array, np.array([[1, 2], [2, 1]]))
    torch.save(torch.tensor([1, 2, 2, 1]), archive)
    with zipfile.ZipFile(archive) as file:
        records = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    (folder / "array").write_bytes(b"\0" + array.read_bytes())
    (folder / "pickle").write_bytes(b"\1" + records["data.pkl"])

    def body(data: bytes) -> None:
        path = archive if data[:1] > b"\x7f" or data[:1] == b"\1" else array
        path.write_bytes(zipped({**records, "data.pkl": data[1:]}) if path == archive else data[1:])
        try:
            ids: Any = read(watch, path, lambda: read_trace(str(path)))
        except AssertionError as error:
            # An array that is too large for the memory.
            if path == archive or not isinstance(error.args[0], errors.OutOfMemoryError):
                raise
            return
        if ids is None:
            return
        numbers = ids.flatten().tolist()
        assert all(type(number) is int for number in numbers)
        try:
            hot = hot_rows(ids, ROWS)
        except IndexError:
            assert not all(0 <= number < ROWS for number in numbers)
            return
        assert all(0 <= number < ROWS for number in numbers)
        assert len(set(hot)) == len(hot) <= ROWS // 8
        assert all(numbers.count(number) > 1 for number in hot)
        assert hot == sorted(hot, key=numbers.index)

    return body
