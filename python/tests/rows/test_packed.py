"""Packed tables have the rows of their source, and damaged ones are refused."""

from __future__ import annotations

import json
import os
import random
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from deepnvme import errors
from deepnvme._rows import row_store
from packed_header import compact, sealed

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    state = deepnvme.load(source)
    ids = torch.randint(0, 2000, (3, 100))
    with deepnvme.RowStore.create(tmp_path / "rows", source, "table", memory="1MB") as store:
        assert (store.shape, store.dtype) == ((2000, 40), torch.float32)
        assert torch.equal(store.gather(ids), state["table"][ids])
    with deepnvme.RowStore(tmp_path / "rows", memory="1MB") as store:
        assert torch.equal(store.gather(ids, dtype=torch.bfloat16), state["table"][ids].bfloat16())
        # A row is one read, even where its source crosses a page.
        store.gather([1234])
    with deepnvme.RowStore.create(tmp_path / "again", source, "table", memory="1MB") as store:
        for row in range(0, 2000, 37):
            store.gather([row])
        assert store.stats().bytes_read == 4096 * store.stats().reads


def test_scales_come_with_their_rows(source: Path, tmp_path: Path) -> None:
    state = deepnvme.load(source)
    ids = torch.randint(0, 2000, (100,))
    expected = state["codes"][ids].float() * state["scales"].float().repeat_interleave(16, 1)[ids]
    deepnvme.RowStore.create(tmp_path / "rows", source, "codes", scales="scales", memory="1MB").close()
    with deepnvme.RowStore(tmp_path / "rows", memory="1MB") as store:
        assert store.gathered_dtype == torch.float32
        assert torch.equal(store.gather(ids), expected)
        assert torch.equal(deepnvme.nn.DiskEmbedding(store)(ids), expected)


def test_raw_files_and_stripe_sets(tmp_path: Path) -> None:
    content = torch.randint(0, 255, (500, 3, 7), dtype=torch.uint8)
    deepnvme.write(content, tmp_path / "raw")
    stripes = deepnvme.StripeSet([tmp_path / "a", tmp_path / "b"], stripe_bytes=8192)
    made = deepnvme.RowStore.create(stripes, tmp_path / "raw", shape=(500, 3, 7), dtype=torch.uint8, memory="1MB")
    assert torch.equal(made.gather(torch.arange(500)), content)
    with pytest.raises(deepnvme.Error):
        deepnvme.RowStore.create(tmp_path / "twice", stripes, memory="1MB")


@pytest.mark.parametrize("kind", ["shards", "raw", "stripes", "link"])
def test_no_file_of_the_source_is_replaced(tmp_path: Path, kind: str) -> None:
    rows = torch.randn(50, 8)
    source: Any = tmp_path / "source"
    named: dict[str, Any] = {"tensor": "table.1"}
    if kind == "shards":
        source = tmp_path / "model.safetensors.index.json"
        deepnvme.save({"table.0": rows, "table.1": rows}, tmp_path / "model.safetensors", max_shard_bytes=1700)
    elif kind == "raw":
        source.write_bytes(rows.numpy().tobytes())
        named = {"shape": (50, 8), "dtype": torch.float32}
    elif kind == "stripes":
        folders = [tmp_path / "a", tmp_path / "b"]
        for folder in folders:
            folder.mkdir()
        stripes = deepnvme.StripeSet([folder / "s" for folder in folders], stripe_bytes=4096)
        deepnvme.save({"table.1": rows}, stripes)
        source = stripes.manifest_path
    else:
        deepnvme.save({"table.1": rows}, source)
        (tmp_path / "link").symlink_to(source)
        source = tmp_path / "link"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target in before:
        with pytest.raises(errors.InvalidArgumentError, match="is a file of the source; name another file"):
            deepnvme.RowStore.create(target, source, memory="1MB", **named)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with deepnvme.RowStore.create(tmp_path / "new", source, memory="1MB", **named) as packed:
        assert torch.equal(packed.gather([49]), rows[49:])


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "x.stripes.json"])
def test_no_list_of_files_is_replaced(source: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("before")
    with pytest.raises(errors.InvalidArgumentError, match="names a list of files"):
        deepnvme.RowStore.create(tmp_path / name, source, "table", memory="1MB")
    assert (tmp_path / name).read_text() == "before"


def test_a_new_table_that_was_replaced_is_not_opened(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "rows", tmp_path / "other"
    deepnvme.RowStore.create(other, source, "table", memory="1MB").close()
    pack = row_store._pack_rows  # type: ignore[attr-defined]

    def packs_and_is_overtaken(*arguments: Any) -> Any:
        number = pack(*arguments)
        other.replace(path)
        return number

    monkeypatch.setattr(row_store, "_pack_rows", packs_and_is_overtaken)
    with pytest.raises(errors.ChangedFileError, match="another table was packed into this file") as raised:
        deepnvme.RowStore.create(path, source, "table", memory="1MB")
    assert raised.value.filename == str(path)


def test_a_path_that_is_no_text(source: Path, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/rows-\xff"
    with deepnvme.RowStore.create(path, source, "table", memory="1MB") as store:
        assert store.verify() == 80
    with deepnvme.RowStore(path, memory="1MB") as store:
        assert len(store) == 2000


def test_progress_is_reported(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = lambda done, total: seen.append((done, total))  # noqa: E731
    deepnvme.RowStore.create(tmp_path / "rows", source, "table", memory="1MB", progress=report)
    assert seen[-1] == (2000 * 160, 2000 * 160)


@pytest.mark.parametrize("columns", [None, 2048])
def test_no_flipped_bit_is_taken_for_a_row(source: Path, tmp_path: Path, columns: int | None) -> None:
    """Neither with checksums in the blocks, nor with checksums in a list."""
    path, count = tmp_path / "rows", 2000
    if columns is not None:
        source, count = tmp_path / "wide", 40
        deepnvme.save({"table": torch.randn(count, columns).bfloat16()}, source)
    deepnvme.RowStore.create(path, source, "table", memory="1MB").close()
    sound = path.read_bytes()
    generator = random.Random(5)
    places = [*range(0, 700, 5), *(generator.randrange(len(sound)) for _ in range(150))]
    noticed = 0
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            with deepnvme.RowStore(path, memory="1MB") as store:
                store.gather(torch.arange(count))
        except (deepnvme.Error, ValueError, KeyError):
            noticed += 1
    assert noticed == len(places)


def test_several_tables_keep_their_first_rows(tmp_path: Path) -> None:
    tables = {f"layers.{index}": torch.randn(rows, 24) for index, rows in enumerate((10, 0, 7, 300))}
    deepnvme.save(tables, tmp_path / "source")
    names = ["layers.2", "layers.1", "layers.3", "layers.0"]
    with deepnvme.RowStore(tmp_path / "source", names, memory="1MB") as store:
        assert store.first_rows == (0, 7, 7, 307)
        firsts = [store.first_rows[names.index(f"layers.{index}")] for index in (0, 2, 3)]
        rows = store.gather(torch.tensor(firsts)[:, None] + torch.tensor([6, 0]))
        assert torch.equal(rows, torch.stack([tables[f"layers.{index}"][[6, 0]] for index in (0, 2, 3)]))
    with deepnvme.RowStore.create(tmp_path / "rows", tmp_path / "source", names, memory="1MB") as store:
        assert store.first_rows == (0, 7, 7, 307)
        assert torch.equal(store.gather([308]), tables["layers.0"][1:2])
    with deepnvme.RowStore(tmp_path / "source", "layers.0", memory="1MB") as store:
        assert store.first_rows == (0,)


@pytest.mark.parametrize("columns", [1024, 2048, 4096])
def test_rows_of_whole_pages_are_read_alone(tmp_path: Path, columns: int) -> None:
    table = torch.randn(50, columns).bfloat16()
    deepnvme.save({"table": table}, tmp_path / "source")
    with deepnvme.RowStore.create(tmp_path / "rows", tmp_path / "source", "table", memory="1MB") as store:
        assert torch.equal(store.gather([31, 7]), table[[31, 7]])
        assert store.stats().bytes_read == 2 * max(columns * 2, 4096)
        assert torch.equal(store.gather(torch.arange(50)), table)
        assert store.verify() == 50 * columns * 2 // max(columns * 2, 4096)
    nbytes = (tmp_path / "rows").stat().st_size
    assert nbytes <= table.nbytes + 8192 + 4 * 51
    assert deepnvme.verify(tmp_path / "rows")["is_sound"]
    damaged = bytearray((tmp_path / "rows").read_bytes())
    damaged[-20] ^= 1
    (tmp_path / "rows").write_bytes(damaged)
    with pytest.raises(errors.CorruptFileError, match="the list of checksums is damaged") as raised:
        deepnvme.RowStore(tmp_path / "rows", memory="1MB")
    assert raised.value.filename == str(tmp_path / "rows")
    assert deepnvme.verify(tmp_path / "rows", check=False)["files"][0]["verdict"] == "damaged"


def test_a_whole_table_is_verified(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with deepnvme.RowStore.create(path, source, "table", memory="1MB") as store:
        assert store.verify() == 80
    damaged = bytearray(path.read_bytes())
    damaged[-5000] ^= 1
    path.write_bytes(damaged)
    with deepnvme.RowStore(path, memory="1MB") as store, pytest.raises(errors.ChecksumError, match="rows 1950 to"):
        store.verify()
    with deepnvme.RowStore(source, "table", memory="1MB") as store, pytest.raises(ValueError, match="no checksums"):
        store.verify()


@pytest.mark.parametrize("trace", [None, [1, 1, 5, 5]])
def test_verify_compares_the_blocks_of_a_table(source: Path, tmp_path: Path, trace: Any) -> None:
    path = tmp_path / "rows.safetensors"
    deepnvme.RowStore.create(path, source, "table", memory="1MB", trace=trace).close()
    (file,) = deepnvme.verify(path)["files"]
    assert (file["verdict"], file["coverage"]) == ("sound", "file")
    assert file["bytes"] == 4096 * (80 if trace is None else 81)
    sound = path.read_bytes()
    for place in (len(sound) - 4500, *([] if trace is None else [len(sound) - 3])):
        damaged = bytearray(sound)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert deepnvme.verify(path, check=False)["files"][0]["verdict"] == "damaged"
    path.write_bytes(sound)
    described(path, other("rows_per_block", 24))
    assert deepnvme.verify(path, check=False)["files"][0]["verdict"] == "damaged"


def described(path: Path, change: Any) -> None:
    """Change the description of a packed table."""
    content = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + nbytes])
    description = json.loads(header["__metadata__"]["deepnvme.rows"])
    change(description)
    header["__metadata__"]["deepnvme.rows"] = compact(json.dumps(description))
    path.write_bytes(sealed(content[:8] + json.dumps(header).encode().ljust(nbytes) + content[8 + nbytes :]))


def other(keys: str, value: Any) -> Any:
    def change(description: Any) -> None:
        *path, last = keys.split(".")
        for key in path:
            description = description[key]
        description[last] = value

    return change


SIZES = ("rows", "row_bytes", "rows_per_block", "block_bytes")
NO_SIZES: list[Any] = [0, -1, 1 << 61, 1.5, "x", None, True, [1]]
CHANGES = [
    *(other(key, value) for key in SIZES for value in NO_SIZES),
    *(other("row.dtype", value) for value in ("float64", "nn", "__name__", "save", "qint32", 3, None)),
    *(other("row.shape", value) for value in ([], [41], [40, 2], [-40], "x", None, [1 << 40, 1 << 40])),
    *(other("row.scales", value) for value in ({"dtype": "float32", "count": 1}, {"count": 1}, 7)),
    # As many bytes, but no scales.
    lambda description: description["row"].update(shape=[38], scales={"dtype": "int64", "count": 1}),
    lambda description: description["row"].update(shape=[37], scales={"dtype": "float32", "count": 3}),
    lambda description: description["row"].update(dtype="int32", shape=[38], scales={"dtype": "float32", "count": 2}),
    lambda description: description["row"].update(scales={"dtype": "float32", "count": 0}),
    # Of a tensor that the file does not have.
    lambda description: description.update(hot={"rows": 0, "crc32c": 0}),
    *(other("row.first_rows", value) for value in ([], [1], [0, 9, 8], [0, 2001], [0, -1], "x", [[0]], 0)),
    *(other("checksums", value) for value in ("list", "none", None, 3)),
    *(other("id", value) for value in ("0123", "+123456789abcdef", "0123456789abcdeg", None, 7)),
    *(other("header_crc32c", value) for value in ("0123ABCD", "123", "", None, 7)),
    lambda description: description.pop("row"),
    lambda description: description.pop("checksums"),
    lambda description: description.pop("id"),
    lambda description: description.pop("header_crc32c"),
    lambda description: description.clear(),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_hostile_description_is_refused(source: Path, tmp_path: Path, change: Any) -> None:
    path = tmp_path / "rows"
    deepnvme.RowStore.create(path, source, "table", memory="1MB")
    described(path, change)
    with pytest.raises(errors.CorruptFileError, match="rows"):
        deepnvme.RowStore(path, memory="1MB")
    assert deepnvme.verify(path, check=False)["files"][0]["verdict"] == "damaged"


DTYPES = {
    kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and not str(kind).startswith("torch.q")
}


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_each_type_can_be_packed(tmp_path: Path, dtype: torch.dtype) -> None:
    deepnvme.write(torch.arange(0, 160, dtype=torch.uint8), tmp_path / "raw")
    options: dict[str, Any] = {"shape": (10, 16 // dtype.itemsize), "dtype": dtype, "memory": "1MB"}
    with deepnvme.RowStore.create(tmp_path / "rows.safetensors", tmp_path / "raw", **options) as store:
        assert (store.shape, store.dtype, store.verify()) == (options["shape"], dtype, 1)
    assert deepnvme.verify(tmp_path / "rows.safetensors")["is_sound"]


def test_a_later_version_is_named(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    deepnvme.RowStore.create(path, source, "table", memory="1MB")
    described(path, other("version", 2))
    with pytest.raises(errors.UnsupportedError, match="needs a later deepnvme"):
        deepnvme.RowStore(path, memory="1MB")


def zipf(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw rows, of which few are frequent. Frequent ones are scattered over the table."""
    weights = 1 / torch.arange(1, 2001, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True, generator=generator) * 617 % 2000


def test_hot_rows_are_read_together(source: Path, tmp_path: Path) -> None:
    table = deepnvme.load(source)["table"]
    generator = torch.Generator().manual_seed(8)
    trace, ids = zipf(20_000, generator), torch.arange(60) * 617 % 2000  # the most frequent rows
    read = []
    for name, given in (("plain", None), ("hot", trace.reshape(10, -1).numpy())):
        with deepnvme.RowStore.create(tmp_path / name, source, "table", memory="1MB", trace=given) as store:
            assert store.shape == (2000, 40)
            assert torch.equal(store.gather(ids), table[ids])
            read.append(store.stats().bytes_read)
            assert torch.equal(store.gather(torch.arange(2000)), table)
            assert store.start_gather(trace).result().equal(table[trace])
            store.prefetch([0, 1999])
            store.keep(ids[:3])
            with pytest.raises(IndexError, match="id 2000 at position 1"):
                store.gather([0, 2000])
            assert store.verify() == (80 if given is None else 90)
    assert read[1] < read[0] / 3
    assert (tmp_path / "hot").stat().st_size < (tmp_path / "plain").stat().st_size * 1.15


@pytest.mark.parametrize("trace", [None, list(range(200)) * 2])
def test_too_little_memory_replaces_nothing(source: Path, tmp_path: Path, trace: Any) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="bytes of memory are too few") as raised:
        deepnvme.RowStore.create(path, source, "table", memory="1kB", trace=trace)
    assert path.read_bytes() == b"before"
    least = raised.value.memory_bytes_min  # type: ignore[attr-defined]
    deepnvme.RowStore.create(path, source, "table", memory=least, trace=trace).close()
    with pytest.raises(ValueError, match="bytes of memory are too few"):
        deepnvme.RowStore(path, memory=least - 1)
    path.write_bytes(b"before")
    with pytest.raises(ValueError, match="bytes of memory are too few"):
        deepnvme.RowStore.create(path, source, "table", memory=least - 1, trace=trace)
    assert path.read_bytes() == b"before"


def test_a_long_list_of_hot_rows_is_not_read_beyond_the_memory(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    deepnvme.RowStore.create(path, source, "table", memory="1MB", trace=[9, 9, 4, 4]).close()
    content = path.read_bytes()
    (nbytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + nbytes])
    hot, rows = 1 << 27, 1 << 31
    description: dict[str, Any] = {
        "version": 1,
        "rows": rows,
        "row_bytes": 1,
        "rows_per_block": 4092,
        "block_bytes": 4096,
        "checksums": "block",
        "header_crc32c": "00000000",
        "id": "0" * 16,
    }
    description |= {"row": {"shape": [1], "dtype": "uint8"}, "hot": {"rows": hot, "crc32c": 0}}
    blocks = -(-(rows + hot) // 4092)
    header["__metadata__"]["deepnvme.rows"] = compact(json.dumps(description))
    header["rows"] = {"dtype": "U8", "shape": [blocks, 4096], "data_offsets": [0, blocks * 4096]}
    header["hot_rows"] |= {"shape": [hot], "data_offsets": [blocks * 4096, blocks * 4096 + hot * 4]}
    text = json.dumps(header).encode().ljust(nbytes)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + blocks * 4096 + hot * 4)
    with pytest.raises(ValueError, match="bytes of memory are too few"):
        deepnvme.RowStore(path, memory="1MB")


def test_hot_rows_have_their_scales(source: Path, tmp_path: Path) -> None:
    state = deepnvme.load(source)
    options: dict[str, Any] = {"scales": "scales", "memory": "1MB", "trace": [7, 7, 1999, 1999, 1999, 3]}
    with deepnvme.RowStore.create(tmp_path / "rows", source, "codes", **options) as store:
        expected = state["codes"].float() * state["scales"].float().repeat_interleave(16, 1)
        assert torch.equal(store.gather(torch.arange(2000)), expected)


@pytest.mark.parametrize("trace", [[], [5], [1, 2, 3], torch.tensor([], dtype=torch.uint8)])
def test_a_trace_without_hot_rows(source: Path, tmp_path: Path, trace: Any) -> None:
    for path, given in ((tmp_path / "a", None), (tmp_path / "b", trace)):
        deepnvme.RowStore.create(path, source, "table", memory="1MB", trace=given).close()
    assert (tmp_path / "a").stat().st_size == (tmp_path / "b").stat().st_size


@pytest.mark.parametrize(
    ("trace", "wrong"), [([0, 2000], 2000), ([-1], -1), (torch.tensor([1 << 63], dtype=torch.uint64), 1 << 63)]
)
def test_a_trace_of_no_rows_is_refused(source: Path, tmp_path: Path, trace: Any, wrong: int) -> None:
    with pytest.raises(IndexError, match=f"has {wrong}, which is no row: the table has 2000 rows"):
        deepnvme.RowStore.create(tmp_path / "rows", source, "table", memory="1MB", trace=trace)
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("value", [*NO_SIZES, 3, 5, 1 << 33])
@pytest.mark.parametrize("key", ["hot.rows", "hot.crc32c"])
def test_a_hostile_list_of_hot_rows_is_refused(source: Path, tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "rows"
    deepnvme.RowStore.create(path, source, "table", memory="1MB", trace=[9, 9, 4, 4, 8, 8, 1, 1])
    described(path, other(key, value))
    with pytest.raises(errors.CorruptFileError, match="rows"):
        deepnvme.RowStore(path, memory="1MB")


def test_a_list_of_hot_rows_beyond_the_table_is_damaged(source: Path, tmp_path: Path) -> None:
    # Found by the fuzz target `packed_table`.
    path = tmp_path / "rows"
    deepnvme.RowStore.create(path, source, "table", memory="1MB", trace=[9, 9, 1999, 1999]).close()
    described(path, other("rows", 1999))
    with pytest.raises(errors.CorruptFileError, match="the list of hot rows is damaged") as raised:
        deepnvme.RowStore(path, memory="1MB")
    assert raised.value.filename == str(path)


def test_other_files_are_no_packed_tables(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no packed table"):
        deepnvme.RowStore(source, memory="1MB")
    torch.save({"rows": torch.ones(3, 3)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="no packed table"):
        deepnvme.RowStore(tmp_path / "x.pt", memory="1MB")
