"""Write the seeds of the fuzz targets in Python.

    python scripts/fuzz_python_seeds.py [FOLDER]

Needs torch and deepnvme, and the seeds of ``fuzz_seeds.py`` in the same folder. The seeds are checked in; run this
again when a format has grown.
"""

from __future__ import annotations

import importlib
import io
import json
import struct
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fuzz_seeds import FOLDER, HUGE, write


def main() -> None:
    """Write what the targets in Python save themselves, and changes of it."""
    tests = Path(__file__).resolve().parent.parent / "python" / "tests"
    sys.path[:0] = [str(tests), str(tests / "shared")]
    targets: Any = importlib.import_module("fuzz.targets")

    texts: dict[str, str] = {}
    for name, saved_as in {
        "distributed": "index", "optimizer_state": "description", "checkpoints": "manifest", "model_config": "config",
    }.items():  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch).resolve()
            targets.TARGETS[name](folder, targets.Watch(folder))
            texts[name] = (folder / saved_as).read_text()
        write(name, "saved", texts[name])
        write(name, "deep", "[" * 5000)
        write(name, "cut", texts[name][: len(texts[name]) // 2])
    index = json.loads(texts["distributed"])
    plain = {key: value for key, value in index.items() if not key.startswith("deepnvme.")}
    halves = [[[row, 0], [2, 3], [targets.SHARD, "a"]] for row in (0, 2)]
    entries = plain["entries"]
    for name, changed in {
        "plain": entries,
        "overlap": {**entries, "a": {**entries["a"], "chunks": [*halves, halves[0]]}},
        "halves": {**entries, "a": {**entries["a"], "chunks": halves}},
        "huge": {**entries, "a": {**entries["a"], "size": [HUGE >> 1, 3]}},
        "elsewhere": {**entries, "n.cfg": {"bytes": ["../../etc/passwd", "x"]}},
        "kinds": {**entries, "a": entries["n.cfg"], "n.cfg": entries["a"]},
    }.items():
        write("distributed", name, json.dumps({**plain, "entries": changed}))
    write("distributed", "paths", json.dumps({**plain, "planner_data": {"a": ["n", 0, "b"], "n.cfg": [HUGE]}}))
    state = json.loads(texts["optimizer_state"])
    changes: dict[str, Any] = {
        "later": {"version": 99}, "no-groups": {"groups": []}, "shapes": {"shapes": [[HUGE]]},
        "stretches": {"stretches": state["stretches"][:1] * 3},
        "betas": {"groups": [{**group, "betas": [2.0, "x"]} for group in state["groups"]]},
    }  # fmt: skip
    for name, change in changes.items():
        write("optimizer_state", name, json.dumps({**state, **change}))
    config = json.loads(texts["model_config"])
    changes = {
        "layers": {"num_hidden_layers": 10**9}, "code": {"auto_map": {"AutoConfig": "evil.EvilConfig"}},
        "kernel": {"_attn_implementation": "evil/kernels"}, "class": {"architectures": ["GPT2LMHeadModel"]},
        "sizes": {"hidden_size": -1, "head_dim": 10**7}, "type": {"model_type": "qwen3_moe", "num_experts": 10**6},
    }  # fmt: skip
    for name, change in changes.items():
        write("model_config", name, json.dumps({**config, **change}))
    sums = {"version": 1, "algorithm": "crc-64/nvme", "cell_bytes": 1 << 20, "records": {"a": "0" * 16}}
    write("shard_checksums", "plain", json.dumps(sums))
    write("shard_checksums", "small", json.dumps({**sums, "cell_bytes": 1 << 16, "records": {"a": "0" * 256}}))
    write("shard_checksums", "none", json.dumps({**sums, "records": {}}))
    table_seeds(targets)
    for number, pickled in enumerate(sorted((FOLDER / "pickle").iterdir())):
        write("objects", pickled.name, bytes([number % 5]) + pickled.read_bytes())


def table_seeds(targets: Any) -> None:
    """Write descriptions of packed tables, lists of hot rows, and traces."""
    for name, files in {"packed_table": ["description"], "trace": ["array", "pickle"]}.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch).resolve()
            targets.TARGETS[name](folder, targets.Watch(folder))
            for file in files:
                write(name, file, (folder / file).read_bytes())
    described = json.loads((FOLDER / "packed_table" / "description").read_bytes())
    row = described["row"]
    int8, plain = {"shape": [40], "dtype": "int8"}, {"shape": [5, 2], "dtype": "float32", "scales": None}
    changes: dict[str, Any] = {
        "plain": {"row": int8}, "several": {"row": plain}, "none": {"rows": 0, "hot": {"rows": 0, "crc32c": 0}},
        "kinds": {"row": {**row, "scales": {"count": 1, "dtype": "int64"}}}, "huge": {"rows": HUGE, "row_bytes": HUGE},
        "wraps": {"row": {**row, "shape": [1 << 40, 1 << 40]}}, "later": {"version": 2}, "no-hot": {"hot": None},
        "blocks": {"rows_per_block": 1, "block_bytes": 4097}, "columns": {"row": {**row, "shape": [33]}},
        "listed": {"checksums": "list"}, "unsealed": {"header_crc32c": "ABCDEFGH"},
    }  # fmt: skip
    for target in ("packed_table", "packed_rows"):
        write(target, "saved", json.dumps(described))
        for name, change in changes.items():
            write(target, name, json.dumps({**described, **change}))
        write(target, "twice", json.dumps(described)[:-1] + ', "rows": 1}')
        write(target, "array", '[1, 50, 40, 102, 4096, [[32], "int8", null], null]')
        write(target, "deep", '{"version": 1, "row": ' + "[" * 500)
    write("packed_rows", "large", json.dumps({**described, "rows": 1 << 31, "row": int8, "hot": None}))
    (FOLDER / "packed_table" / "description").unlink()
    for name, (rows, numbers) in {
        "plain": (10, [3, 9, 0]), "empty": (0, []), "far": (10, [3, 10]), "twice": (10, [3, 3]), "last": (HUGE, [1]),
        "most": (HUGE, [0xFFFF_FFFE, 5, 4]), "many": (4000, [*range(0, 4000, 7)]),
    }.items():  # fmt: skip
        write("hot_rows", name, struct.pack(f"<{1 + len(numbers)}I", rows & 0xFFFF_FFFF, *numbers))
    write("hot_rows", "cut", struct.pack("<I", 10) + b"\1\0\0\0\2")
    for name, header, data in (
        ("other-order", "{'descr': '>i4', 'fortran_order': True, 'shape': (2, 1), }", b"\0\0\0\1" * 2),
        ("open", "((", b""), ("keys", "{[]: 1}", b""), ("deep", "(" * 5000, b""),
        ("objects", "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"\x80\x04N."),
        ("large", "{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,), }", b""),
        ("wraps", "{'descr': '<i8', 'fortran_order': False, 'shape': (1152921504606846976, 0), }", b""),
        ("fields", "{'descr': [('a', '<i4', (2,))], 'fortran_order': False, 'shape': (1,), }", bytes(8)),
        ("far", "{'descr': '<u8', 'fortran_order': False, 'shape': (2,), }", b"\xff" * 16),
    ):  # fmt: skip
        write("trace", name, b"\0\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode() + data)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as arrays:
        arrays.writestr("a.npy", b"")
    write("trace", "archive", b"\0" + archive.getvalue())
    for name in ("torch-views-2", "torch-kinds-2", "expanded"):
        write("trace", name, b"\1" + (FOLDER / "pickle" / name).read_bytes())


if __name__ == "__main__":
    main()
