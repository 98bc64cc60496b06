"""Gathers from every kind of source equal indexing of the table, and wrong calls are refused where they are made."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import os
import pickle
import random
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import deepnvme
from deepnvme import errors
from deepnvme._rows import locate

if TYPE_CHECKING:
    from collections.abc import Callable

INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.fixture
def table() -> torch.Tensor:
    return torch.randn(3000, 80)


def raw(table: torch.Tensor, path: Path, memory: str = "1MB") -> deepnvme.RowStore:
    deepnvme.write(table, path)
    return deepnvme.RowStore(path, shape=table.shape, dtype=table.dtype, memory=memory)


def as_safetensors(table: torch.Tensor, folder: Path) -> deepnvme.RowStore:
    deepnvme.save({"other": torch.ones(5), "table": table}, folder / "x.safetensors")
    return deepnvme.RowStore(folder / "x.safetensors", "table", memory="1MB")


def as_archive(table: torch.Tensor, folder: Path) -> deepnvme.RowStore:
    torch.save({"model": {"table": table}, "step": 3}, folder / "x.pt")
    return deepnvme.RowStore(folder / "x.pt", "model.table", memory="1MB")


def as_shards(table: torch.Tensor, folder: Path) -> deepnvme.RowStore:
    parts = {f"table.{index}": part.clone() for index, part in enumerate(torch.split(table, 700))}
    deepnvme.save(parts, folder / "model.safetensors", max_shard_bytes=300_000)
    return deepnvme.RowStore(folder, list(parts), memory="1MB")


def as_stripes(table: torch.Tensor, folder: Path) -> deepnvme.RowStore:
    stripes = deepnvme.StripeSet([folder / "a", folder / "b"], stripe_bytes=8192)
    deepnvme.save({"table": table}, stripes)
    return deepnvme.RowStore(stripes, "table", memory="1MB")


def as_raw(table: torch.Tensor, folder: Path) -> deepnvme.RowStore:
    (folder / "x.bin").write_bytes(b"head" + table.numpy().tobytes())
    return deepnvme.RowStore(folder / "x.bin", shape=(3000, 80), dtype=torch.float32, offset=4, memory="1MB")


@pytest.mark.parametrize("save", [as_safetensors, as_archive, as_shards, as_stripes, as_raw])
def test_every_source(
    tmp_path: Path, table: torch.Tensor, save: Callable[[torch.Tensor, Path], deepnvme.RowStore]
) -> None:
    with save(table, tmp_path) as store:
        assert (store.shape, store.dtype, len(store)) == ((3000, 80), torch.float32, 3000)
        for shape in [(), (1,), (17,), (4, 300), (0,), (2, 0, 3)]:
            ids = torch.randint(0, 3000, shape)
            assert torch.equal(store.gather(ids), table[ids])
        everything = torch.randperm(3000)
        assert torch.equal(store.gather(everything), table[everything])


@pytest.mark.parametrize("name", INTEGERS)
def test_every_integer_dtype(tmp_path: Path, table: torch.Tensor, name: str) -> None:
    dtype = getattr(torch, name)
    with raw(table, tmp_path / "x") as store:
        ids = torch.randint(0, 127, (50,))
        assert torch.equal(store.gather(ids.to(dtype)), table[ids])
        assert torch.equal(store.gather(ids.repeat(2).to(dtype)[::2]), table[ids.repeat(2)[::2]])
        if dtype.is_signed:
            with pytest.raises(IndexError, match="id -3 at position 1 is out of range"):
                store.gather(torch.tensor([1, -3], dtype=dtype))


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64", "complex64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("row_shape", [(1,), (3, 5), (2000,)])
def test_every_row(tmp_path: Path, dtype: str, row_shape: tuple[int, ...]) -> None:
    content = torch.randint(0, 2, (100, *row_shape)).to(getattr(torch, dtype))
    deepnvme.save({"table": content}, tmp_path / "x.safetensors")
    with deepnvme.RowStore(tmp_path / "x.safetensors", "table", memory="500kB") as store:
        ids = torch.randint(0, 100, (40,))
        assert torch.equal(store.gather(ids).view(torch.uint8), content[ids].view(torch.uint8))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [None, 2.5, 45.254834])
def test_conversions(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, scale: float | None) -> None:
    content = torch.randn(200, 33).to(stored)
    with raw(content, tmp_path / "x") as store:
        ids = torch.randint(0, 200, (64,))
        expected = content[ids].to(wanted) if scale is None else (content[ids].float() * scale).to(wanted)
        assert torch.equal(store.gather(ids, dtype=wanted, scale=scale), expected)
        assert torch.equal(store.gather(ids, out=torch.empty(64, 33, dtype=wanted), scale=scale), expected)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_one_byte(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    content = torch.arange(256, dtype=torch.uint8).repeat(4).view(16, 64).view(stored)
    with raw(content, tmp_path / "x") as store:
        ids = torch.randint(0, 16, (64,))
        expected = content.view(torch.int8).view(stored)[ids].to(torch.float32).to(wanted)
        assert torch.equal(store.gather(ids, dtype=wanted).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("groups", [None, 1, 8])
def test_scales(tmp_path: Path, stored: torch.dtype, kind: torch.dtype, groups: int | None) -> None:
    codes = torch.randint(-100, 100, (300, 64)).to(stored)
    scales = torch.rand(300 if groups is None else (300, groups)).add(0.01).to(kind)
    parts = {"w.0": codes[:100].clone(), "w.1": codes[100:].clone(), "s": scales}
    torch.save(parts, tmp_path / "x.pt")
    with deepnvme.RowStore(tmp_path / "x.pt", ["w.0", "w.1"], scales="s", memory="1MB") as store:
        ids = torch.randint(0, 300, (90,))
        factors = scales.float().view(300, -1).repeat_interleave(64 // (groups or 1), 1)
        expected = codes[ids].float() * factors[ids]
        for _ in range(2):
            assert torch.equal(store.gather(ids), expected)
            assert torch.equal(store.gather(ids, dtype=torch.bfloat16), expected.bfloat16())
            assert torch.equal(store.gather(ids, scale=0.5), expected * 0.5)
        assert store.stats().memory_bytes <= 1_000_000


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    wrong: dict[str, tuple[torch.Tensor, type[Exception], str]] = {
        "few": (torch.ones(9), ValueError, "9 rows of 1 scales"),
        "uneven": (torch.ones(10, 3), ValueError, "10 rows of 3 scales"),
        "ints": (torch.ones(10, dtype=torch.int32), TypeError, "cannot have scales"),
    }
    deepnvme.save(
        {"w": torch.ones(10, 64).char(), **{name: case[0] for name, case in wrong.items()}}, tmp_path / "x.pt"
    )
    for name, (_, error, text) in wrong.items():
        with pytest.raises(error, match=text):
            deepnvme.RowStore(tmp_path / "x.pt", "w", scales=name, memory="1MB")
    with pytest.raises(ValueError, match="raw file"):
        deepnvme.RowStore(tmp_path / "x.pt", scales="few", shape=(3, 3), dtype=torch.int8, memory="1MB")


def test_a_given_tensor_is_filled_and_counts_as_changed(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        out = torch.empty(2, 80)
        version = out._version
        assert store.gather([4, 5], out=out) is out
        assert out._version > version
        assert torch.equal(out, table[4:6])


def test_gathers_in_the_background(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        wanted = [torch.randint(0, 3000, (random.randrange(500),)) for _ in range(20)]
        started = [store.start_gather(ids) for ids in wanted]
        store.prefetch(torch.arange(2000, 2100))
        for ids, gather in zip(wanted, started, strict=True):
            assert torch.equal(gather.result(timeout=60), table[ids])
            assert gather.done()
            assert "done" in repr(gather)


def test_a_dropped_gather_fills_its_tensor(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        out = torch.zeros(3000, 80)
        store.start_gather(torch.arange(3000), out=out)
        gc.collect()
        store.start_gather([0]).result()
        # Gathers end in their order if nobody waits for them.
        assert torch.equal(store.gather(torch.arange(3000)), table)


def test_a_cancelled_gather_says_so(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x", "20kB") as store:
        for _ in range(20):
            gather = store.start_gather(torch.randint(0, 3000, (2000,)))
            gather.cancel()
            try:
                gather.result()
            except errors.CancelledError:
                break
        else:
            pytest.fail("no gather was cancelled")
        assert torch.equal(store.gather([5]), table[[5]])


def test_counters_and_memory(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        store.gather([1, 1, 2])
        store.gather([1])
        stats = store.stats()
        assert (stats.rows, stats.hits, stats.rows_read, stats.reads) == (4, 1, 2, 1)
        assert stats.memory_bytes <= 1_000_000
        assert 0 < stats.cached_rows_max <= 3000


def test_the_least_memory_works(tmp_path: Path, table: torch.Tensor) -> None:
    deepnvme.write(table, tmp_path / "x")
    with pytest.raises(ValueError, match="takes 8192; give at least that"):
        raw(table, tmp_path / "x", "4096")
    with raw(table, tmp_path / "x", "8192") as store:
        ids = torch.randint(0, 3000, (500,))
        assert torch.equal(store.gather(ids), table[ids])
        assert store.stats().memory_bytes <= 8192


def test_many_threads(tmp_path: Path, table: torch.Tensor) -> None:
    failures: list[BaseException] = []
    store = raw(table, tmp_path / "x", "200kB")

    def use(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(30):
                ids = torch.randint(0, 3000, (200,), generator=generator)
                if seed % 3 == 0:
                    store.prefetch(ids)
                assert torch.equal(store.gather(ids), table[ids])
        except BaseException as error:
            failures.append(error)

    with store:
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_kept_rows_stay(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x", "200kB") as store:
        store.keep(torch.arange(50))
        store.gather(torch.arange(3000))
        before = store.stats()
        assert torch.equal(store.gather(torch.arange(50)), table[:50])
        assert store.stats().hits - before.hits == 50
        with pytest.raises(ValueError, match="more rows cannot be kept: memory has room for"):
            store.keep(torch.arange(3000))
        with pytest.raises(IndexError):
            store.keep([3000])


def test_a_changed_file_is_noticed(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        store.gather([1])
        deepnvme.write(-table, tmp_path / "x", 0)
        with pytest.raises(errors.ChangedFileError, match="open the table again") as caught:
            store.gather([2999])
        assert caught.value.filename == os.fspath(tmp_path / "x")
        with (tmp_path / "x").open("r+b") as file:
            file.truncate(100_000)
        with pytest.raises(errors.ChangedFileError):
            store.gather([2500])


def test_a_closed_table_refuses_calls(tmp_path: Path, table: torch.Tensor) -> None:
    store = raw(table, tmp_path / "x")
    store.close()
    store.close()
    assert store.is_closed
    assert "closed" in repr(store)
    for call in (store.gather, store.start_gather, store.prefetch, store.keep):
        with pytest.raises(errors.ClosedError):
            call([0])


def descriptors(path: Path) -> int:
    """Count the descriptors of a file that this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        # That of the list itself is closed by now.
        with contextlib.suppress(FileNotFoundError):
            count += link.readlink() == path
    return count


def test_a_closed_table_releases_its_file_and_keeps_its_counters(tmp_path: Path, table: torch.Tensor) -> None:
    # Otherwise a file system could not be unmounted as long as anything refers to the table.
    store = raw(table, tmp_path / "x")
    gather = store.start_gather([1, 2, 3])
    store.prefetch([1000, 2000])
    before = store.stats()
    assert descriptors(tmp_path / "x") > 0
    store.close()
    assert torch.equal(gather.result(), table[1:4])
    del gather
    until = time.monotonic() + 10
    while descriptors(tmp_path / "x") and time.monotonic() < until:
        time.sleep(0.01)
    assert descriptors(tmp_path / "x") == 0
    assert store.stats().memory_bytes == before.memory_bytes
    assert store.stats().rows >= 3


WRONG_IDS: list[tuple[Any, type[Exception], str]] = [
    ([3000], IndexError, "id 3000 at position 0 is out of range: ids of this table are 0 to 2999"),
    ([[0, 1], [2, 7000]], IndexError, "id 7000 at position 3"),
    ([-1], IndexError, "id -1 at position 0"),
    ([1.0], TypeError, "must be integers"),
    ([True], TypeError, "must be integers"),
    (torch.tensor([1j]), TypeError, "must be integers"),
    ([[1], [1 << 70]], IndexError, "at position 1 is no row, and exceeds 64 bits"),
    (5.0, TypeError, "must be integers"),
    (None, TypeError, "a tensor, an array or a list of integers"),
    ({1: 2}, TypeError, "a tensor, an array or a list of integers"),
    ([None], TypeError, "a tensor, an array or a list of integers"),
    (torch.empty(3, dtype=torch.int64, device="meta"), TypeError, "on meta"),
    (torch.ones(3, dtype=torch.int64).to_sparse(), TypeError, "sparse"),
]


@pytest.mark.parametrize(("ids", "error", "text"), WRONG_IDS)
def test_wrong_ids(tmp_path: Path, table: torch.Tensor, ids: Any, error: type[Exception], text: str) -> None:
    with raw(table, tmp_path / "x") as store:
        for call in (store.gather, store.start_gather, store.prefetch):
            with pytest.raises(error, match=text):
                call(ids)


def test_wrong_targets(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        wrong: list[tuple[Any, type[Exception], str]] = [
            (torch.empty(2, 80), ValueError, r"of the shape \(1, 80\)"),
            (torch.empty(1, 160)[:, ::2], ValueError, "must be contiguous"),
            (torch.empty(1, 80, dtype=torch.int32), TypeError, "the result would be torch.int32, and converted"),
            ([0.0] * 80, TypeError, "must be a torch tensor"),
        ]
        for out, error, text in wrong:
            with pytest.raises(error, match=text):
                store.gather([0], out=out)
        with pytest.raises(TypeError, match="leave dtype out"):
            store.gather([0], out=torch.empty(1, 80), dtype=torch.float16)
        for scale in ("2", True, [1.0]):
            with pytest.raises(TypeError, match="scale"):
                store.gather([0], scale=scale)  # type: ignore[arg-type]
        for deadline in (-1, float("nan"), "soon", True, 10**400):
            with pytest.raises(ValueError, match="deadline_s"):
                store.prefetch([0], deadline_s=deadline)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.int8, "the result would be torch.int8, and converted or scaled rows are bfloat16"),
        (torch.int64, "rows of torch.int64 cannot be converted or scaled"),
    ],
)
def test_scaled_rows_of_integers_are_refused(tmp_path: Path, dtype: torch.dtype, text: str) -> None:
    with raw(torch.ones(10, 8, dtype=dtype), tmp_path / "x") as store, pytest.raises(TypeError, match=text):
        store.gather([0], scale=2.0)


def test_wrong_sources(tmp_path: Path, table: torch.Tensor) -> None:
    path = tmp_path / "x.safetensors"
    deepnvme.save({"a": table, "narrow": table[:, :3].clone(), "half": table.half(), "flat": torch.tensor(3.0)}, path)
    deepnvme.save({"a": table.t()}, tmp_path / "x.pt")
    known: dict[str, Any] = {"memory": "1MB"}
    open_table: Any = deepnvme.RowStore
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: deepnvme.RowStore(path, **known), ValueError, "tensor is missing"),
        (lambda: deepnvme.RowStore(path, "b", **known), KeyError, "no tensor is named 'b'; its tensors are: 'a'"),
        (lambda: deepnvme.RowStore(path, ["a", "narrow"], **known), ValueError, "rows of one kind"),
        (lambda: deepnvme.RowStore(path, ["a", "half"], **known), ValueError, "rows of one kind"),
        (lambda: deepnvme.RowStore(path, ["a", "a"], **known), ValueError, "twice"),
        (lambda: deepnvme.RowStore(path, [], **known), TypeError, "name of a tensor"),
        (lambda: deepnvme.RowStore(path, "flat", **known), errors.UnsupportedError, "no table of plain rows"),
        (lambda: deepnvme.RowStore(tmp_path / "x.pt", "a", **known), errors.UnsupportedError, "no contiguous rows"),
        (lambda: deepnvme.RowStore(path, "a", shape=(3,), **known), ValueError, "both shape and dtype"),
        (lambda: deepnvme.RowStore(path, "a", shape=(3,), dtype=torch.int8, **known), ValueError, "raw file"),
        (lambda: deepnvme.RowStore(path, shape=(3, 0), dtype=torch.int8, **known), ValueError, "no elements"),
        (lambda: deepnvme.RowStore(path, shape=(9**9, 80), dtype=torch.int8, **known), EOFError, "ends too early"),
        (lambda: deepnvme.RowStore(tmp_path / "none", "a", **known), FileNotFoundError, "none"),
        (lambda: open_table(7, shape=(3, 3), dtype=torch.int8, **known), TypeError, "by a path"),
        (lambda: deepnvme.RowStore(path, "a", memory="many"), ValueError, "many"),
    ]
    for call, error, text in calls:
        with pytest.raises(error, match=text):
            call()


def test_arrays_and_single_ids(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        array = np.array([[5, 6]], dtype=np.uint16)
        array.setflags(write=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(store.gather(array), table[5:7].unsqueeze(0))
            assert torch.equal(store.gather(array[:, ::-1]), table[[6, 5]].unsqueeze(0))
        nested: list[Any] = [[], []]
        assert torch.equal(store.gather(7), table[7])  # type: ignore[arg-type]
        assert store.gather(nested).shape == (2, 0, 80)


def test_it_cannot_be_copied(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store:
        model = torch.nn.Sequential(deepnvme.nn.DiskEmbedding(store))
        for act in (copy.copy, copy.deepcopy, pickle.dumps):
            for thing in (store, model) if act is not copy.copy else (store,):
                with pytest.raises(TypeError, match="open the table again by its path"):
                    act(thing)


def test_traces_are_refused(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x") as store, pytest.raises(errors.UnsupportedError, match="without tracing"):
        torch.jit.trace(deepnvme.nn.DiskEmbedding(store), torch.tensor([1]))  # type: ignore[no-untyped-call]


def test_it_can_be_awaited(tmp_path: Path, table: torch.Tensor) -> None:
    async def main() -> torch.Tensor:
        return await store.start_gather([3])

    with raw(table, tmp_path / "x") as store:
        assert torch.equal(asyncio.run(main()), table[[3]])


def test_a_file_that_is_replaced_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deepnvme.save({"a": torch.full((500, 64), 7.0), "t": torch.full((500, 64), 1.0)}, tmp_path / "model.safetensors")
    deepnvme.save({"t": torch.full((500, 64), 2.0), "z": torch.full((500, 64), 8.0)}, tmp_path / "new")
    found: Any = locate.__dict__["locate_tensors"]

    def locate_and_replace(*arguments: Any) -> Any:
        located = found(*arguments)
        (tmp_path / "new").rename(tmp_path / "model.safetensors")
        return located

    monkeypatch.setattr(locate, "locate_tensors", locate_and_replace)
    store = deepnvme.RowStore(tmp_path / "model.safetensors", "t", memory="1MB")
    with pytest.raises(errors.ChangedFileError):
        store.gather([5])
    monkeypatch.setattr(locate, "locate_tensors", found)
    deepnvme.save({"t": torch.full((500, 64), 3.0), "z": torch.full((500, 64), 9.0)}, tmp_path / "new")
    monkeypatch.setattr(locate, "locate_tensors", locate_and_replace)
    with pytest.raises(errors.ChangedFileError):
        deepnvme.RowStore.create(tmp_path / "packed", tmp_path / "model.safetensors", "t", memory="1MB")
    assert not (tmp_path / "packed").exists()


def test_prefetches_in_flight_are_bounded(tmp_path: Path, table: torch.Tensor) -> None:
    with raw(table, tmp_path / "x", "100kB") as store:
        for _ in range(200):
            store.prefetch(torch.randint(0, 3000, (5000,)))
        stats = store.stats()
        assert stats.rows_not_prefetched > 200 * 4000


def test_a_forked_child_opens_its_own(tmp_path: Path, table: torch.Tensor) -> None:
    store = raw(table, tmp_path / "x")
    gather = store.start_gather(torch.arange(3000))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (lambda: store.gather([0]), lambda: store.keep([0]), store.stats, gather.result):
                try:
                    call()
                except errors.ClosedError:
                    continue
                os._exit(2)
            del store, gather
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(gather.result(), table)
    store.close()


def test_a_shape_that_no_file_has(tmp_path: Path, table: torch.Tensor) -> None:
    raw(table, tmp_path / "x").close()
    for shape in ((2**62, 2**62), (2**63 - 1, 2)):
        with pytest.raises(ValueError, match="no file is as large"):
            deepnvme.RowStore(tmp_path / "x", shape=shape, dtype=torch.float32, memory="1MB")
