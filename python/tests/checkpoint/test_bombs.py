"""Small files that would expand are refused before memory is allocated. Similar harmless files are loaded."""

from __future__ import annotations

import _codecs
import io
import pickle
import struct
import subprocess
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _utils

import deepnvme
from deepnvme import errors
from process_memory import memory_bytes, restart_peak

from .states import assert_same
from .test_hostile import Runs, archive

HUGE = 10**12
REFUSED = (errors.UnsafeFileError, errors.CorruptFileError, errors.UnsupportedError)


def new(name: str, *sizes: int) -> bytes:
    """Make an object of a class without its ``__init__``. pickle itself would refuse to write that."""
    numbers = b"".join(pickle.dumps(size, 2)[2:-1] for size in sizes)
    return b"\x80\x02c" + name.encode() + b"\n(" + numbers + b"t\x81."


class Storage:
    """The only storage of the file, with four floats."""


class Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", 4) if obj is Storage else None


def bomb(path: Path, made: Any, protocol: int = 2) -> Path:
    file = io.BytesIO()
    if isinstance(made, bytes):
        file.write(made)
    else:
        Pickler(file, protocol).dump({"x": made})
    return archive(path, file.getvalue(), {"data/0": struct.pack("<4f", 1, 2, 3, 4)})


def view(*size: int, function: Any = _utils._rebuild_tensor_v2, stride: int = 0) -> Runs:
    """Describe a view of the storage."""
    return Runs(function, Storage, 0, size, (stride,) * len(size), False, OrderedDict())


def typed(function: Any, *arguments: Any) -> Runs:
    """Make torch's own function for subclasses call a function."""
    return Runs(torch._tensor._rebuild_from_type_v2, function, torch.Tensor, arguments, {})


shared = list(range(100_000))
text = "x" * 1_000_000

BOMBS = {
    "range": Runs(set, Runs(range, HUGE)),
    "range alone": Runs(range, HUGE),
    "slice": Runs(slice, 1, 2),
    "bytearray": Runs(bytearray, HUGE),
    "bytes": Runs(bytes, HUGE),
    "new bytes": new("builtins\nbytes", HUGE),
    "new bytearray": new("builtins\nbytearray", HUGE),
    "new bytes by keyword": b"\x80\x04cbuiltins\nbytes\n)}\x8c\x06source\x8a\x06\x00\x00\x00\x00\x00\x7fs\x92.",
    "bytes of a bool": Runs(bytes, True),
    "by way of a type": typed(bytearray, HUGE),
    "set of a view": Runs(set, view(HUGE)),
    "counter of a view": Runs(Counter, view(HUGE)),
    "ordered dict of a view": Runs(OrderedDict, view(HUGE, 2)),
    "size of a view": Runs(torch.Size, view(HUGE)),
    "bytes of a view": Runs(bytes, view(HUGE)),
    "tensor": Runs(torch.Tensor, 10**6, 10**6),
    "new tensor": new("torch\nTensor", 10**6, 10**6),
    "storage": Runs(torch.FloatStorage, 10**10),
    "new storage": new("torch.storage\nUntypedStorage", 10**10),
    "typed storage": Runs(torch.storage.TypedStorage, 10**10),
    "tensor of a type": typed(_utils._rebuild_tensor_v2, Storage, 0, (HUGE,), (1,), False, OrderedDict()),
    "tensor of a type, negative": typed(_utils._rebuild_tensor_v2, Storage, -1, (4,), (1,), False, OrderedDict()),
    "quantised": Runs(_utils._rebuild_qtensor, Storage, 0, (HUGE,), (0,),
                      (torch.per_tensor_affine, 0.1, 0), False, OrderedDict()),
    "converted": Runs(_utils._rebuild_device_tensor_from_cpu_tensor, view(HUGE), torch.float64, "cpu", False),
    "sparse": Runs(_utils._rebuild_sparse_tensor, torch.sparse_coo, (view(1, HUGE), view(HUGE), (4,))),
    "nested": Runs(_utils._rebuild_nested_tensor, view(4), view(1, 1), view(1, 1), view(1)),
    "copies of a list": [Runs(set, shared) for _ in range(1000)],
    "copies of a dict": [Runs(OrderedDict, dict.fromkeys(shared)) for _ in range(1)]
    + [Runs(Counter, shared) for _ in range(1000)],
    "copies of a text": [Runs(_codecs.encode, text, "latin1") for _ in range(1000)],
    "copies of bytes": [Runs(bytearray, text, "latin-1") for _ in range(1000)],
    "another encoding": Runs(_codecs.encode, "x", "punycode"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_bomb_is_refused(tmp_path: Path, name: str, protocol: int) -> None:
    path = bomb(tmp_path / "x.pt", BOMBS[name], protocol)
    before = restart_peak()
    with pytest.raises(REFUSED, match=r"x\.pt"):
        deepnvme.load(path)
    assert memory_bytes("VmHWM") - before < 200 << 20
    for options in ({"device": "meta"}, {"lazy": True}):
        with pytest.raises(REFUSED):
            deepnvme.load(path, **options)


def test_a_state_of_a_tensor(tmp_path: Path) -> None:
    """Setting a tensor would grow its storage."""
    head = b"\x80\x02ctorch\nTensor\n)Rq\x01"
    for state in (b")b.", b"(h\x01K\x00\x8a\x06\x00\x00\x00\x00\x00\x7f\x85K\x01\x85tb."):
        with pytest.raises(errors.UnsafeFileError, match="storage"):
            deepnvme.load(archive(tmp_path / "x.pt", head + state))


@pytest.mark.parametrize(("scales", "axis"), [([0.1], 0), ([0.1] * 4, 1), ([0.1] * 4, -1)])
def test_missing_quantisation_channels(tmp_path: Path, scales: list[float], axis: int) -> None:
    quantizer = (torch.per_channel_affine, scales, [0] * len(scales), axis)
    made = Runs(_utils._rebuild_qtensor, Storage, 0, (4,), (1,), quantizer, False, OrderedDict())
    with pytest.raises(errors.UnsafeFileError, match="channels"):
        deepnvme.load(bomb(tmp_path / "x.pt", made))


def test_harmless_objects_are_built(tmp_path: Path) -> None:
    big = list(range(300_000))
    state = {
        "set": set(big), "frozen": frozenset(big), "counter": Counter("hello"), "bytes": b"\xff" * 1_000_000,
        "array": bytearray(b"\x80" * 1_000_000), "empty": [b"", bytearray(), set(), frozenset(), Counter()],
        "sizes": [torch.Size([1, 2])] * 100_000, "ordered": [OrderedDict(a=1) for _ in range(1000)],
        "expanded": torch.randn(3, 1).expand(3, 10**9), "complex": [1j] * 10,
        "coo": torch.sparse_coo_tensor(torch.arange(500).expand(2, 500), torch.ones(1).expand(500),
                                       check_invariants=False),
    }  # fmt: skip
    for protocol in (2, 4):
        torch.save({**state, "expanded": None}, tmp_path / "x.pt", pickle_protocol=protocol)
        loaded = deepnvme.load(tmp_path / "x.pt")
        assert_same({**loaded, "coo": None}, {**state, "expanded": None, "coo": None})
        assert torch.equal(loaded["coo"].to_dense(), torch.eye(500))
    deepnvme.save({"x": state["expanded"]}, tmp_path / "x.pt")
    assert deepnvme.load(tmp_path / "x.pt")["x"].shape == (3, 10**9)


def test_nothing_large_is_made_in_little_memory(tmp_path: Path) -> None:
    """Run all bombs in a process with little memory."""
    for number, made in enumerate(BOMBS.values()):
        bomb(tmp_path / f"{number}.pt", made)
    code = (
        "import resource, sys, pathlib, torch, deepnvme\n"
        "from deepnvme.errors import CorruptFileError, UnsafeFileError, UnsupportedError\n"
        "refused = (CorruptFileError, UnsafeFileError, UnsupportedError)\n"
        "deepnvme.save({'a': torch.ones(3)}, sys.argv[1] + '/first.pt'); deepnvme.load(sys.argv[1] + '/first.pt')\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).glob('[0-9]*.pt')):\n"
        "    try:\n        deepnvme.load(path)\n        sys.exit(f'{path} was loaded')\n"
        "    except refused:\n        pass\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
