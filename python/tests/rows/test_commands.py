"""Tests of ``deepnvme rows inspect``, ``pack`` and ``bench``."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme import __main__
from deepnvme._rows.bench import DrawnIds
from deepnvme._rows.commands import rows_across_pages
from deepnvme._rows.locate import Located

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE = "{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,), }"
QUICK = ("--rounds", "2", "--rows", "4,100", "--memory", "100kB")


@dataclass
class Done:
    status: int
    stdout: str
    stderr: str

    @property
    def answer(self) -> dict[str, Any]:
        assert self.status == 0, self.stderr
        parsed: dict[str, Any] = json.loads(self.stdout)
        return parsed


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run ``deepnvme rows`` in this process."""

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["deepnvme", "rows", *map(str, arguments)])
        status = __main__.main()
        told = capfd.readouterr()
        return Done(status, told.out, told.err)

    return run


@pytest.fixture
def raw(tmp_path: Path) -> tuple[object, ...]:
    deepnvme.write(torch.arange(100 + 3000 * 50, dtype=torch.int32), tmp_path / "raw.bin")
    return tmp_path / "raw.bin", "--shape", "3000,50", "--dtype", "int32", "--offset", 400


def test_inspect_lists_tensors_that_can_be_a_table(source: Path, command: Callable[..., Done]) -> None:
    tables = command("inspect", source, "--json").answer["tables"]
    assert [table["name"] for table in tables] == ["table", "codes", "scales", "cube"]
    assert tables[3] == {"name": "cube", "shape": [2, 3, 4], "dtype": "float64", "row_bytes": 96, "bytes": 192}
    text = command("inspect", source).stdout
    assert text.splitlines()[-1] == f"Name one: deepnvme rows inspect {shlex.quote(str(source))} --tensor table"
    for table in tables:
        assert table["name"] in text


def test_inspect_lists_no_tensor_that_cannot_be_a_table(tmp_path: Path, command: Callable[..., Done]) -> None:
    path = tmp_path / "some.pt"
    torch.save({"turned": torch.ones(3, 4).T, "empty": torch.ones(0, 3), "one": torch.ones(5)}, path)
    done = command("inspect", path)
    assert (done.status, done.stdout) == (1, "")
    assert "no tensor can be a table" in done.stderr


def test_a_listed_name_moves_no_cursor(tmp_path: Path, command: Callable[..., Done]) -> None:
    deepnvme.save({"a\x1b[2J\nb": torch.ones(3, 4)}, tmp_path / "odd.safetensors")
    text = command("inspect", tmp_path / "odd.safetensors").stdout
    assert "\x1b" not in text
    assert r"a\x1b[2J\nb" in text


def test_inspect_describes_a_table_in_place(source: Path, command: Callable[..., Done]) -> None:
    answer = command("inspect", source, "--tensor", "codes", "--scales", "scales", "--json").answer
    assert answer["files"] == [str(source)]
    assert (answer["shape"], answer["dtype"], answer["row_bytes"]) == ([2000, 64], "int8", 64)
    assert answer["bytes"] == 128_000
    assert answer["scales"] == {"count": 4, "dtype": "bfloat16"}
    assert (answer["packed"], answer["rows_in_1gb"]) == (None, 2000)
    text = command("inspect", source, "--tensor", "codes", "--scales", "scales").stdout
    assert "2,000 rows of 64 int8, 64 bytes each, 128,000 bytes in all" in text
    assert "a cache of 1 GB holds all rows" in text


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_least_memory_is_enough_and_less_is_not(
    source: Path, tmp_path: Path, command: Callable[..., Done], is_packed: bool
) -> None:
    names: dict[str, Any] = {"tensor": "codes", "scales": "scales"}
    if is_packed:
        deepnvme.RowStore.create(tmp_path / "rows", source, **names, memory="1MB").close()
        least = command("inspect", tmp_path / "rows", "--json").answer["memory_bytes_min"]
        source, names = tmp_path / "rows", {}
    else:
        least = command("inspect", source, "--tensor=codes", "--scales=scales", "--json").answer["memory_bytes_min"]
    deepnvme.RowStore(source, **names, memory=least).close()
    with pytest.raises(deepnvme.errors.InvalidArgumentError, match=f"takes {least}"):
        deepnvme.RowStore(source, **names, memory=least - 1)


@pytest.mark.parametrize("row_bytes", [1, 24, 160, 4095, 4096, 5000, 12_288])
@pytest.mark.parametrize("offset", [0, 8, 4090, 5000])
def test_rows_across_pages_are_counted(row_bytes: int, offset: int) -> None:
    ranges = [(0, offset, 5000), (0, 7, 3)]
    pages = -(-row_bytes // 4096)
    count = 0
    for _, first, rows in ranges:
        for start in range(first, first + rows * row_bytes, row_bytes):
            count += (start + row_bytes - 1) // 4096 - start // 4096 + 1 > pages
    assert rows_across_pages(Located([], ranges, (row_bytes,), torch.uint8)) == count


def test_pack_writes_a_verified_table(source: Path, tmp_path: Path, command: Callable[..., Done]) -> None:
    target = tmp_path / "rows.safetensors"
    done = command("pack", source, target, "--tensor", "codes", "--scales", "scales")
    assert (done.status, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["packed", "file", "verified", "measure"]
    state = deepnvme.load(source)
    with deepnvme.RowStore(target, memory="1MB") as store:
        expected = state["codes"].float() * state["scales"].float().repeat_interleave(16, 1)
        assert torch.equal(store.gather(torch.arange(2000)), expected)
    again = command("pack", source, target, "--tensor", "table", "--json").answer
    assert (again["rows"], again["bytes"], again["file_bytes"]) == (2000, 320_000, target.stat().st_size)
    described = command("inspect", target, "--json").answer
    assert described["packed"]["rows_per_block"] * 160 < described["packed"]["block_bytes"] == 4096
    assert -(-2000 // described["packed"]["rows_per_block"]) == again["verified_blocks"]
    assert 0 < described["packed"]["overhead"] < 0.1
    assert described["rows_across_pages"] is None
    assert "packed; blocks of 25 rows in 4,096 bytes, 2.3% of them beyond the rows" in command("inspect", target).stdout


def test_copies_of_hot_rows_are_counted(source: Path, tmp_path: Path, command: Callable[..., Done]) -> None:
    deepnvme.RowStore.create(tmp_path / "rows", source, "table", memory="1MB", trace=[5, 9, 5, 9] * 9).close()
    packed = command("inspect", tmp_path / "rows", "--json").answer["packed"]
    assert (packed["hot_rows"], packed["bytes"]) == (2, 81 * 4096)
    assert packed["overhead"] == pytest.approx(1 - 2000 * 160 / (81 * 4096))
    assert "with copies of 2 hot rows" in command("inspect", tmp_path / "rows").stdout


@pytest.mark.parametrize("name", ["ids.npy", "ids.pt", "ids.safetensors"])
def test_pack_copies_the_rows_of_a_trace(source: Path, tmp_path: Path, command: Callable[..., Done], name: str) -> None:
    ids = torch.tensor([[5, 9, 5], [9, 7, 1]], dtype=torch.int32)
    if name.endswith(".npy"):
        np.save(tmp_path / name, ids.numpy())
    else:
        deepnvme.save({"ids": ids}, tmp_path / name, progress=False)
    done = command("pack", source, tmp_path / "rows", "--tensor", "table", "--trace", tmp_path / name)
    assert (done.status, done.stderr) == (0, "")
    assert command("inspect", tmp_path / "rows", "--json").answer["packed"]["hot_rows"] == 2


def test_a_trace_may_have_the_other_byte_order(source: Path, tmp_path: Path, command: Callable[..., Done]) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 300, 300], dtype=">i4"))
    command("pack", source, tmp_path / "rows", "--tensor", "table", "--trace", tmp_path / "ids.npy")
    assert command("inspect", tmp_path / "rows", "--json").answer["packed"]["hot_rows"] == 1


@pytest.mark.parametrize("name", ["ids.npy", "ids.pt"])
def test_a_pipe_is_no_trace(source: Path, tmp_path: Path, command: Callable[..., Done], name: str) -> None:
    os.mkfifo(tmp_path / name)
    done = command("pack", source, tmp_path / "rows", "--tensor", "table", "--trace", tmp_path / name)
    assert done.status in (1, 2)
    assert "it is a pipe" in done.stderr


def test_pack_replaces_no_file_of_its_source(tmp_path: Path, command: Callable[..., Done]) -> None:
    parts = {f"table.{index}": torch.randn(50, 8) for index in range(2)}
    deepnvme.save(parts, tmp_path / "model.safetensors", max_shard_bytes=1700)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 3
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        for target in before:
            done = command("pack", source, target, "--tensor", "table.1")
            assert (done.status, done.stdout) == (2, "")
            assert "is a file of the source" in done.stderr
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_several_tensors_and_raw_files(tmp_path: Path, raw: tuple[object, ...], command: Callable[..., Done]) -> None:
    parts = {"a": torch.randn(30, 8), "b": torch.randn(20, 8)}
    deepnvme.save(parts, tmp_path / "parts.pt")
    command("pack", tmp_path / "parts.pt", tmp_path / "rows", "--tensor=b", "--tensor=a")
    with deepnvme.RowStore(tmp_path / "rows", memory="1MB") as store:
        assert torch.equal(store.gather(torch.arange(50)), torch.cat([parts["b"], parts["a"]]))
    path, *described = raw
    assert command("pack", path, tmp_path / "packed", *described).status == 0
    with deepnvme.RowStore(tmp_path / "packed", memory="1MB") as store:
        assert store.gather([1])[0, 0] == 150


def test_striped_tables_have_parts(tmp_path: Path, command: Callable[..., Done]) -> None:
    stripes = deepnvme.StripeSet([tmp_path / "a", tmp_path / "b"], stripe_bytes=4096)
    deepnvme.write(torch.randn(500, 16), stripes)
    described = (stripes.manifest_path, "--shape=500,16", "--dtype=fp32")
    assert command("inspect", *described, "--json").answer["files"] == [str(tmp_path / "a"), str(tmp_path / "b")]
    measured = command("bench", *described, *QUICK, "--against", "fio,mmap", "--json").answer
    assert set(measured["left_out"]) == {"fio", "mmap"}


def test_bench_measures_and_leaves_nothing(
    tmp_path: Path, raw: tuple[object, ...], command: Callable[..., Done]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    answer = command("bench", *raw, *QUICK, "--zipf", "0.9", "--against", "mmap", "--json").answer
    assert (answer["shape"], answer["zipf"], answer["left_out"]) == ([3000, 50], 0.9, {})
    assert [result["rows_per_gather"] for result in answer["results"]] == [4, 100]
    for result in answer["results"]:
        ours, mmap = result["tools"]["deepnvme"], result["tools"]["mmap"]
        for one in (ours, mmap):
            assert 0 < one["p50_ms"] <= one["p99_ms"]
            assert one["mb_per_s"] == pytest.approx(one["rows_per_s"] * 200 / 1e6)
            assert len(one["rounds_rows_per_s"]) == 2
        assert 0 <= ours["hits"] <= 1
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    text = command("bench", *raw, *QUICK).stdout
    assert "3,000 rows of 50 int32, 200 bytes each, 600,000 bytes in all, in place" in text
    assert text.count("deepnvme") == 2


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_bench_runs_fio(source: Path, tmp_path: Path, command: Callable[..., Done]) -> None:
    command("pack", source, tmp_path / "rows:1", "--tensor", "table")
    answer = command("bench", tmp_path / "rows:1", *QUICK, "--against", "fio,mmap", "--json").answer
    assert answer["left_out"].pop("mmap") == "the rows are packed, or in several tensors"
    if "fio" in answer["left_out"]:
        pytest.skip(f"fio {answer['left_out']['fio']}")
    assert [result["fio_depth"] for result in answer["results"]] == [4, 32]
    fio = answer["results"][1]["tools"]["fio"]
    assert (fio["bytes_read_per_row"], fio["p50_ms"], fio["hits"]) == (4096, None, None)
    assert fio["mean_ms"] > 0


def test_a_baseline_that_is_not_installed_is_left_out(
    raw: tuple[object, ...], command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    done = command("bench", *raw, *QUICK, "--against", "fio")
    assert done.stdout.splitlines()[-1].startswith("fio is left out: it is not installed; install it")


@pytest.mark.usefixtures("raw")
@pytest.mark.parametrize(
    "case",
    [
        ("inspect none", 1, "none: there is no such file; name a checkpoint"),
        (
            "inspect source.safetensors --tensor tabel",
            1,
            "no tensor is named 'tabel'; its tensors are: 'bias', 'codes'",
        ),
        ("inspect rows --tensor rows", 2, "is a packed table, with its scales; leave --tensor out"),
        ("pack rows again --tensor rows", 2, "is a packed table, with its scales; it needs no packing"),
        ("inspect raw.bin", 1, "For a raw file, give --shape and --dtype"),
        ("inspect raw.bin --shape 9999999,50 --dtype int32", 1, "the file ends too early"),
        ("inspect source.safetensors --tensor codes --scales bias", 2, "each row needs one scale"),
        ("inspect source.safetensors --tensor table --scales codes", 2, "cannot have scales of torch.int8"),
        ("pack source.safetensors source.safetensors --tensor table", 2, "is a file of the source; name another"),
        ("pack source.safetensors . --tensor table", 2, "is a folder; name a file in it"),
        ("pack source.safetensors none/rows --tensor table", 1, "check the path, and that its folder exists"),
        ("pack source.safetensors new --tensor table --trace none.npy", 1, "none.npy"),
        ("pack source.safetensors new --tensor table --trace raw.bin", 1, "raw.bin"),
        ("pack source.safetensors new --tensor table --trace source.safetensors", 2, "a trace of ids is one tensor"),
        ("pack source.safetensors new --tensor table --trace bad.npy", 1, "no array of numbers"),
        ("pack source.safetensors new --tensor table --trace objects.npy", 1, "no array of numbers"),
        ("pack source.safetensors new --tensor table --trace far.npy", 2, "the trace of ids has 2000, which is no row"),
        ("pack source.safetensors new --tensor table --trace floats.npy", 2, "they must be integers"),
        (
            "pack source.safetensors new --tensor table --trace words.npy",
            2,
            "words.npy: ids are <U1; they must be integers",
        ),
        ("pack source.safetensors new --tensor table --trace dates.npy", 2, "dates.npy: ids are datetime64[ns]"),
        ("pack source.safetensors new --tensor table --trace fields.npy", 2, "fields.npy: ids are [('a', '<i4')]"),
        ("pack source.safetensors new --tensor table --trace arrays.npy", 2, "arrays.npy: ids are several arrays"),
        ("pack source.safetensors new --tensor table --trace open.npy", 1, "open.npy is no array of numbers"),
        ("pack source.safetensors new --tensor table --trace keys.npy", 1, "keys.npy is no array of numbers"),
        ("pack source.safetensors new --tensor table --trace large.npy", 1, "large.npy: Unable to allocate"),
        ("pack source.safetensors new --tensor table --trace floats.pt", 2, "floats.pt: ids are torch.float32"),
        ("bench source.safetensors", 2, "is no packed table; name a tensor with --tensor"),
        ("bench rows --memory 100", 2, "100 bytes of memory are too few"),
        ("bench raw.bin --shape 0,50 --dtype int32", 2, "the table has no rows"),
    ],
)
def test_mistakes_are_sentences(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., Done],
    case: tuple[str, int, str],
) -> None:
    arguments, status, text = case
    monkeypatch.chdir(tmp_path)
    deepnvme.RowStore.create("rows", source, "table", memory="1MB").close()
    Path("bad.npy").write_bytes(b"\x93NUMPY bad")
    np.save("objects.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.save("far.npy", np.array([1, 2000]))
    np.save("floats.npy", np.ones(3))
    np.save("words.npy", np.array(["a"]))
    np.save("dates.npy", np.zeros(3, dtype="M8[ns]"))
    np.save("fields.npy", np.zeros(3, dtype=[("a", "<i4")]))
    np.savez("arrays", ids=np.arange(3))
    Path("arrays.npz").rename("arrays.npy")
    for name, header in {"open": "((", "keys": "{[]: 1}", "large": LARGE}.items():
        Path(f"{name}.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode())
    torch.save(torch.ones(3), "floats.pt")
    before = sorted(tmp_path.iterdir())
    done = command(*arguments.split())
    assert (done.status, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith("deepnvme: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("rows", [1, 2, 7, 1000, 1 << 40])
@pytest.mark.parametrize("exponent", [None, 0.0, 0.5, 1.0, 1.5, 10.0])
def test_drawn_ids_are_rows(rows: int, exponent: float | None) -> None:
    first, again = DrawnIds(rows, exponent), DrawnIds(rows, exponent)
    ids = first.draw(1000)
    assert 0 <= int(ids.min()) <= int(ids.max()) < rows
    assert torch.equal(ids, again.draw(1000))


def test_zipf_ids_follow_the_exponent() -> None:
    counts = [count for _, count in Counter(DrawnIds(10_000, 1.0).draw(200_000).tolist()).most_common()]
    # The most frequent row has about the logarithm of 2 to the base of the number of rows.
    assert counts[0] / 200_000 == pytest.approx(0.0753, rel=0.05)
    assert 1.5 < counts[0] / counts[1] < 2.0
    uniform = Counter(DrawnIds(10_000, None).draw(200_000).tolist())
    assert max(uniform.values()) < 60
