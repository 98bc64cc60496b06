"""Write the seeds of the fuzz targets: real saved files, and attacks on each format.

    python scripts/fuzz_seeds.py [FOLDER]

Needs torch and deepnvme. The seeds are checked in; run this again when a format has grown.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import tempfile
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

import deepnvme

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "fuzz" / "seeds"
HUGE = 2**64 - 1


def main() -> None:
    """Write all seeds."""
    with tempfile.TemporaryDirectory() as scratch:
        saved(Path(scratch))
    for attacks in (zip_attacks, safetensors_attacks, index_attacks, pickle_attacks, sums_attacks):
        attacks()
    for seeds in (
        container_seeds, stripes_seeds, history_seeds, settings_seeds, leftover_seeds, shards_seeds, tool_seeds,
    ):  # fmt: skip
        seeds()


def write(target: str, name: str, content: bytes | str) -> None:
    """Write one seed."""
    folder = FOLDER / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def saved(scratch: Path) -> None:
    """Save four states with torch, and contiguous copies of one of them with deepnvme."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    base = torch.arange(6.0)
    states: dict[str, Any] = {
        "model": model.state_dict(),
        "training": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": [None, (1.5, "y")]},
        "views": {"a": base, "b": base[2:], "t": base.view(2, 3).t(), "0": torch.tensor(1), "e": torch.empty(0, 3)},
        "kinds": {
            "bf16": torch.ones(2, dtype=torch.bfloat16), "u16": torch.ones(2, dtype=torch.uint16),
            "f8": torch.ones(2).to(torch.float8_e4m3fn), "p": torch.nn.Parameter(torch.ones(1)), "bytes": b"\xff\x00",
            "big": 2**70, "od": OrderedDict(a=1), "sparse": torch.eye(2).to_sparse(), "size": torch.Size([1]),
            "q": torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), "set": {1}, "c": 1j,
        },
    }  # fmt: skip
    for name, state in states.items():
        for protocol in (2, 4) if name == "kinds" else (2,):
            buffer = io.BytesIO()
            torch.save(state, buffer, pickle_protocol=protocol)
            write("archive", f"torch-{name}-{protocol}", buffer.getvalue())
            with zipfile.ZipFile(buffer) as file:
                write("pickle", f"torch-{name}-{protocol}", file.read("archive/data.pkl"))
    flat = {name: tensor.contiguous() for name, tensor in states["views"].items()}
    deepnvme.save(flat, scratch / "x.pt")
    whole = (scratch / "x.pt").read_bytes()
    write("archive", "deepnvme-2", whole)
    with zipfile.ZipFile(scratch / "x.pt") as file:
        write("sums", "archive-2", file.read("x/deepnvme/checksums.json"))
    for name, checksums in (("sums-2", True), ("plain", False)):
        deepnvme.save(flat, scratch / "x.safetensors", checksums=checksums, metadata={"format": "pt"})
        write("safetensors", name, (scratch / "x.safetensors").read_bytes())
    deepnvme.save(
        {str(index): torch.ones(300) for index in range(4)}, scratch / "model.safetensors", max_shard_bytes=2000
    )
    write("index_json", "saved-2", next(scratch.glob("*.index.json")).read_bytes())


def container_seeds() -> None:
    """Write correct and incorrect descriptions of packed tensors."""
    entries = {
        "lossless": {"shape": [1000], "form": "lossless", "part": 600, "lengths": [700, 500]},
        "int8": {"shape": [10, 100], "form": "int8", "part": 600, "group": 50, "scale": "BF16"},
        "fp8": {"shape": [10, 100], "form": "fp8", "part": 400, "group": 100, "scale": "F32"},
        "far": {"shape": [1000], "form": "lossless", "part": 600, "lengths": [HUGE, 500]},
        "large": {"shape": [HUGE, 3], "form": "lossless", "part": 600, "lengths": [700, 500]},
        "none": {"shape": [0], "form": "lossless", "part": 600, "lengths": []},
    }
    sizes = {"int8": 1000 + 40, "fp8": 1000 + 40}
    for name, entry in entries.items():
        packed = json.dumps({"version": 1, "tensors": {"w": {"dtype": "BF16", **entry}}})
        nbytes = sizes.get(name, 1200)
        tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
        text = json.dumps({"__metadata__": {"deepnvme.packed": packed}, "w": tensor}).encode()
        write("container", name, struct.pack("<Q", len(text)) + text)


def stripes_seeds() -> None:
    """Write correct and incorrect lists of parts."""
    manifest = {"format": "deepnvme-stripes", "version": 1, "stripe_bytes": 1 << 20, "parts": ["a", "b"]}
    members = [["/models/a", "1-1"], ["/models/b", "1-2"]]
    files = {"index": "1-3", "members": members, "token": "0" * 32}
    write("stripes", "plain", json.dumps(manifest))
    # The target replaces a blank checksum by the right one.
    blank = "-".join(["0" * 16] * 3)
    write(
        "stripes", "saved", json.dumps({"deepnvme.checksum": blank, **manifest, "version": 2, "files": files}, indent=2)
    )
    write("stripes", "unsealed", json.dumps({**manifest, "version": 2, "files": files}, indent=2))
    write("stripes", "lies", json.dumps({**manifest, "stripe_bytes": HUGE, "parts": ["../a", "/", "", ".."]}))
    write("stripes", "many", json.dumps({**manifest, "parts": [str(index) for index in range(4097)]}))
    write("stripes", "twice", json.dumps({**manifest, "parts": ["a", "a"]}))


def history_seeds() -> None:
    """Write correct and incorrect lists of checkpoints."""
    entry = {
        "file": "step-00000010.pt", "step": 10, "nbytes": 4096, "time": "2026-01-02T03:04:05+00:00",
        "index_offset": 2048, "index_nbytes": 2048, "index_crc64": "0123456789abcdef",
        "torch": "2.8.0", "deepnvme": "0.1.0",
    }  # fmt: skip
    part = {"file": "step-00000020.pt.part-00-of-02", "nbytes": 2048, "host": "a", "head_crc64": "0" * 16}
    parts = {**entry, "step": 20, "file": "step-00000020.pt.stripes.json", "parts": [part, {**part, "host": "b"}]}
    private = f".{entry['file']}.deepnvme-tmp-1f-2e"
    pending = {**entry, "pending": {entry["file"]: private}}
    for name, manifest in {
        "plain": {"version": 2, "checkpoints": [entry, parts], "retired": [{**entry, "step": 5}]},
        "first": {"version": 1, "checkpoints": [entry]},
        "pending": {"version": 2, "checkpoints": [pending]},
        "empty": {"version": 2, "checkpoints": []},
        "later": {"version": 3, "checkpoints": [entry]},
        "paths": {"version": 2, "checkpoints": [{**entry, "file": "../step-00000010.pt"}]},
        "private": {"version": 2, "checkpoints": [{**entry, "pending": {entry["file"]: "/etc/passwd"}}]},
        "huge": {"version": 2, "checkpoints": [{**entry, "step": HUGE, "nbytes": HUGE, "index_offset": HUGE}]},
        "order": {"version": 2, "checkpoints": [parts, entry, parts]},
    }.items():
        write("history", name, json.dumps(manifest))
    write("history", "deep", '{"version": 2, "checkpoints": ' + "[" * 500)
    write("history", "twice", '{"version": 2, "version": 1, "checkpoints": []}')


def leftover_seeds() -> None:
    """Write what a killed save leaves. The targets put files for ``PATH0`` and their identities for ``MARK0``."""
    intent = {"format": "deepnvme-intent", "version": 1, "members": [["PATH2", "MARK2"], ["PATH0", None]]}
    write("intent", "plain", json.dumps(intent))
    others = [["PATH0", "MARK0"], ["PATH1", "MARK1"], ["PATH3", "MARK3"], ["PATH4", "MARK0"], ["../x", "MARK2"]]
    write("intent", "others", json.dumps({**intent, "members": others}))
    write("intent", "unmarked", json.dumps({**intent, "members": [[f"PATH{number}", None] for number in range(5)]}))
    write("intent", "later", json.dumps({**intent, "version": 2}))
    record: dict[str, Any] = {"index": "MARK0", "name": "index.json", "folder": "FOLDER", "token": "b" * 32}
    for name, members in {"record": [["PATH2", "MARK2"]], "record-others": others}.items():
        write("intent", name, json.dumps({"metadata": {"files": {**record, "members": members}}}))
    blank = "-".join(["0" * 16] * 3)
    for name, files in {
        "plain": {**record, "members": [["PATH1", "MARK1"]]},
        "replaces": {**record, "members": [["PATH1", "MARK1"]], "replaces": [["PATH2", "MARK2"], ["PATH3", "MARK3"]]},
        "foreign": {**record, "members": [["PATH1", "MARK1"], ["PATH3", "MARK3"], ["PATH2", "MARK2"]]},
        "times": {**record, "members": [["PATH1", "MARK1-0"], ["PATH2", "MARK2-ffffffffffffffff"]]},
        "another": {**record, "index": "1-2", "members": [["PATH1", "MARK1"]]},
        "token": {**record, "token": "", "members": [["PATH3", "MARK3"]]},
    }.items():
        metadata = {"deepnvme.checksum": blank, "files": files}
        write("record", name, json.dumps({"metadata": metadata, "weight_map": {"a": "PATH2"}}, indent=2))
    write("record", "unsealed", json.dumps({"metadata": {"files": {**record, "members": [["PATH1", "MARK1"]]}}}))
    for name, content in {
        "plain": b"sub\0sub/b\0a\0x.stripes.json\0",
        "cut": b"a\0sub/b",
        "outside": b"../outside/foreign\0link/foreign\0link\0/etc/passwd\0sub/../../outside/foreign\0",
        "odd": b"\0\0.\0..\0./a\0sub//b\0\xff\0.deepnvme-contents\0",
    }.items():
        write("contents", name, content)


def shards_seeds() -> None:
    """Write indexes of distributed checkpoints, and lock files."""
    shard = "shard-00000-" + "0123456789abcdef" * 2 + ".safetensors"
    entries = {
        "a": {"dtype": "float32", "size": [4, 3], "requires_grad": False,
              "chunks": [[[0, 0], [2, 3], [shard, "a"]], [[2, 0], [2, 3], [shard, "a.1"]]]},
        "n.cfg": {"bytes": [shard, "n.cfg"]},
    }  # fmt: skip
    index = {"version": 1, "entries": entries, "planner_data": {"a": ["a"], "n.cfg": ["n", "cfg"]}}
    files = {shard: {"bytes": 4096, "index_crc64": "0123456789abcdef"}}
    sealed = {"deepnvme.checksum": "-".join(["0" * 16] * 3), "deepnvme.files": files, **index}
    write("shards", "plain", json.dumps(index))
    write("shards", "sealed", json.dumps(sealed))
    replaces = {"bytes": 1, "modified_ns": HUGE >> 1}
    write("shards", "model", json.dumps({**sealed, "weight_map": {"a": shard}, "deepnvme.replaces": replaces}))
    write("shards", "parts", json.dumps({"parts": ["a", "b"], "weight_map": {"a": "x.safetensors", "b": "y"}}))
    for number, file in enumerate(["../x", shard.upper(), "/" + shard, "shard-0-0.safetensors", f"a/{shard}"]):
        others = {"a": {"bytes": [file, "a"]}, "b": {"chunks": [[[0], [1], [file, "b"]]]}}
        write("shards", f"path-{number}", json.dumps({**index, "entries": others, "weight_map": {"a": file}}))
    write("shards", "deep", '{"version": 1, "entries": ' + "[" * 500)
    holder = {"format": "deepnvme-lock", "name": "process 7 on host (since 2026-01-02 03:04:05)", "token": "ab12"}
    write("lock", "plain", json.dumps(holder) + "\n")
    write("lock", "foreign", json.dumps({**holder, "format": "other"}))
    write("lock", "twice", '{"format": "deepnvme-lock", "name": "", "name": "\\u0000", "token": ""}')


def tool_seeds() -> None:
    """Write configurations of sweeps, and of models."""
    lists = {
        "block_size": ["128K", "1M", 4096], "queue_depth": [4, 16], "io_parallel": [1, 2], "single_submit": [True],
        "sequential_requests": [False, True],
    }  # fmt: skip
    write("sweep", "plain", json.dumps(lists))
    write("sweep", "beyond", json.dumps({"block_size": ["99999999999G"], "queue_depth": [HUGE]}))
    write("sweep", "unknown", json.dumps({**lists, "overlap_events": [True]}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32", "hidden_size": 8}
    write("config_json", "plain", json.dumps(config))
    write("config_json", "both", json.dumps({**config, "dtype": None, "text_config": {"dtype": "float16"}}))
    write("config_json", "numbers", '{"dtype": 1e400, "a": 18446744073709551616, "b": -0.0, "c": 1e-400}')
    write("config_json", "digits", '{"dtype": "float32", "a":48e84}')
    write("config_json", "twice", '{"dtype": "float32", "dtype": [], "a": 1, "a": 2}')


def settings_seeds() -> None:
    """Write valid and invalid settings."""
    write(
        "settings",
        "folders",
        '[engine]\nworkers = 2\nqueue_depth = 8\nbackend = "threads"\ndirect = "disabled"\n\n'
        '[[folder]]\npath = "/mnt/nvme"\nengine = { workers = 1 }\nread = { workers = 4 }\n',
    )
    write("settings", "beyond", 'engine = { workers = 99999999999, direct = "never" }\n')
    write("settings", "unknown", "[engine]\nworker = 1\n")
    write("settings", "deep", "a = " + "[" * 500)


def zipped(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Return the bytes of a ZIP file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, content in records.items():
            file.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


#: A directory entry of a ZIP file before its name, and fields in it: both sizes, and the offset of the record.
ENTRY_BYTES, ENTRY_SIZES, ENTRY_OFFSET = 46, 20, 42


def end64(records: int, size: int, offset: int, place: int) -> bytes:
    """Return the end of a ZIP64 file: both end records and the locator between them.

    Args:
        records: entries of the directory.
        size: bytes of the directory.
        offset: start of the directory in the file.
        place: start of the first end record in the file.
    """
    return (
        struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, records, records, size, offset)
        + struct.pack("<IIQI", 0x07064B50, 0, place, 1)
        + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    )


def zip_attacks() -> None:
    """Write archives: sound ones, and ones with false offsets, sizes or names."""
    two = {"x/data.pkl": pickle.dumps({"a": 1}, 2), "x/version": b"3\n", "x/data/0": bytes(16)}
    plain = zipped(two)
    write("archive", "zip", plain)
    write("archive", "bomb", zipped({"x/data.pkl": b"N.", "x/data/0": bytes(100_000)}, zipfile.ZIP_DEFLATED))
    overlap = bytearray(plain)
    entry = plain.rfind(b"x/data/0") - ENTRY_BYTES
    overlap[entry + ENTRY_OFFSET : entry + ENTRY_BYTES] = struct.pack("<I", 0)
    write("archive", "overlap", bytes(overlap))
    beyond = bytearray(plain)
    beyond[entry + ENTRY_SIZES : entry + ENTRY_SIZES + 8] = b"\xff" * 8
    write("archive", "beyond", bytes(beyond))
    write(
        "archive", "paths", zipped({"../data.pkl": b"N.", "../../etc/passwd": b"", "/x": b"", "x\x01": b"", "x//": b""})
    )
    body, begin = plain[: plain.rfind(b"PK\x05\x06")], plain.find(b"PK\x01\x02")
    size = len(body) - begin
    write("archive", "wide", body + end64(3, size, begin, len(body)))
    for name, numbers in {
        "many": (HUGE, size, begin), "long": (3, HUGE, begin), "far": (3, size, HUGE), "wraps": (3, 2**63, 2**63),
        "none": (0, 0, begin), "elsewhere": (3, size, 0),
    }.items():  # fmt: skip
        write("archive", f"wide-{name}", body + end64(*numbers, len(body)))
    write("archive", "comment", plain[:-2] + struct.pack("<H", 22) + plain[-22:])


def safetensors_file(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file with this header."""
    return struct.pack("<Q", len(header) if length is None else length) + header.encode() + data


def safetensors_attacks() -> None:
    """Write files: sound ones, and ones with false lengths, ranges or shapes."""

    def entry(shape: str, begin: int, end: int, dtype: str = "U8") -> str:
        return f'{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}'

    good = f'{{"a":{entry("4", 0, 4)}}}'
    for name, file in {
        "length-huge": safetensors_file(good, bytes(4), HUGE),
        "length-off": safetensors_file(good, bytes(4), len(good) + 1),
        "overlap": safetensors_file(f'{{"a":{entry("4", 0, 4)},"b":{entry("4", 2, 6)}}}', bytes(6)),
        "gap": safetensors_file(f'{{"a":{entry("4", 1, 5)}}}', bytes(5)),
        "twice": safetensors_file(f'{{"a":{entry("4", 0, 4)},"a":{entry("4", 4, 8)}}}', bytes(8)),
        "overflow": safetensors_file(f'{{"a":{entry("4294967296,4294967296", 0, 0, "F64")}}}'),
        "nothing": safetensors_file(f'{{"a":{entry("0,4294967296,4294967296", 0, 0)},"b":{entry("0", 0, 0)}}}'),
        "far": safetensors_file(f'{{"a":{entry("9223372036854775807", HUGE - 7, HUGE)}}}'),
        "large": safetensors_file(f'{{"a":{entry("1073741824,1024", 0, 2**40)}}}'),
        "dims": safetensors_file(f'{{"a":{entry("1," * 999 + "1", 0, 1)}}}', bytes(1)),
        "deep": safetensors_file('{"a":' * 200 + "1" + "}" * 200),
        "metadata": safetensors_file('{"__metadata__":{"a":"b","a":"c"}}'),
        "scalar": safetensors_file(f'{{"":{entry("", 0, 2, "F16")},"é\\u0000":{entry("1", 2, 10, "C64")}}}', bytes(10)),
    }.items():
        write("safetensors", name, file)


def index_attacks() -> None:
    """Write indexes with files outside of the folder, keys given twice, and deep nesting."""
    for number, file in enumerate(["../x", "/etc/passwd", "", ".", "..", "a/b", "a\0b", "a\\b", "\u202ex", "a" * 300]):
        write("index_json", f"path-{number}", json.dumps({"weight_map": {"a": file}}))
    write("index_json", "twice", '{"weight_map":{"a":"x","a":"y"}}')
    write("index_json", "metadata", '{"metadata":[[[{}]]],"weight_map":{"a":"x"},"weight_map":{}}')
    write("index_json", "deep", '{"metadata":' + "[" * 500)


def text(content: str) -> bytes:
    """Return the pickle instruction for a text."""
    return b"X" + struct.pack("<I", len(content.encode())) + content.encode()


def tensor(
    shape: bytes, strides: bytes, elements: int = 4, tail: bytes = b"\x89ccollections\nOrderedDict\n)R"
) -> bytes:
    """Return the pickle instructions for a tensor."""
    head = b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage\n" + text("0")
    return head + text("cpu") + b"\x8a\x08" + struct.pack("<q", elements) + b"tQK\x00" + shape + strides + tail + b"tR"


def pickle_attacks() -> None:
    """Write pickles that call forbidden functions, or expand a small input."""
    one, most = b"(K\x01t", b"(\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7ft"
    for name, body in {
        "system": b"cos\nsystem\n" + text("true") + b"\x85R",
        "dotted": b"\x8c\x05torch\x8c\x0eTensor.__new__\x93",
        "new": b"cbuiltins\ntype\n)}\x92N)b",
        "tuples": b")" + b"2\x86" * 60,
        "tuple-keys": b"})" + b"2\x86" * 60 + b"Ns",
        "frozen": b")" + b"2\x86q\x00(h\x00h\x00\x91" * 30,
        "lists": b"]" + b"q\x00]h\x00ah\x00a" * 60,
        "circle": b"]q\x00h\x00a(h\x00tq\x01h\x00h\x01a",
        "deep": b"]" * 600 + b"a" * 599,
        "deep-states": b"cm\nC\n)R" * 600 + b"b" * 599,
        "long-name": b"}" + text("k" * 5000) + tensor(one, one) + b"s",
        "many-names": b"}" + text("k" * 2000) + b"](" + tensor(one, one) + b"q\x00" + b"h\x00" * 1000 + b"es",
        "tensor": tensor(one, one),
        "expanded": tensor(most, b"(K\x00t"),
        "beyond": tensor(most, most),
        "no-elements": tensor(b"(K\x00t" + most[1:-1] + b"t", b"(K\x01K\x01t"),
        "dims": tensor(b"(" + b"K\x01" * 65 + b"t", b"(" + b"K\x01" * 65 + b"t"),
        "untyped": tensor(one, one).replace(b"FloatStorage", b"UntypedStorage"),
        "nested": tensor(one, one, tail=b"\x89N" + tensor(one, one) + b"}" + text("k") + tensor(one, one) + b"s"),
        "keywords": b"cm\nC\n)}" + text("k") + tensor(one, one) + b"s\x92",
        "shared-arguments": b"(" + b"]" * 99 + b"tq\x00](" + b"cm\nC\nh\x00R" * 99 + b"e",
        "lengths": b"B\xff\xff\xff\xff",
        "lengths-8": b"\x8d" + b"\xff" * 8,
        "long-int": b"\x8b\x00\x20\x00\x00" + b"\x01" * 8192,
        "marks": b"(" * 999 + b"t" * 999,
        "persistent": text("hello") + b"Q",
        "surrogate": b"X\x03\x00\x00\x00\xed\xa0\x80",
    }.items():
        write("pickle", name, b"\x80\x04" + body + b".")


def sums_attacks() -> None:
    """Write malformed lists of checksums."""
    good: dict[str, Any] = {"version": 1, "algorithm": "crc-64/nvme", "cell_bytes": 1 << 20}
    for name, records in {
        "none": {}, "short": {"a": "0" * 15}, "upper": {"a": "ABCDEF0123456789" * 3}, "wide": {"a": "é" * 8},
        "sign": {"a": "+123456789abcdef"}, "odd": {"a": "", "é\0": "0" * 16},
    }.items():  # fmt: skip
        write("sums", name, json.dumps(good | {"records": records}))
    write("sums", "later", json.dumps(good | {"version": 2**32 - 1, "cell_bytes": 0, "records": {}}))
    write("sums", "twice", json.dumps(good)[:-1] + ',"records":{"a":"","a":""}}')


if __name__ == "__main__":
    main()
