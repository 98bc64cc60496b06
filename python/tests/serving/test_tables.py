"""Tables that stay in their checkpoint, without a model server: torch's embeddings and loaders like the servers'."""

from __future__ import annotations

import copy
import io
import itertools
import json
import mmap
import os
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
from torch.nn import functional

import deepnvme
from deepnvme.errors import ChangedFileError, UnsupportedError
from deepnvme.integrations._tables.loading import iterate_but_tables
from deepnvme.integrations._tables.mapped import _check_identity, find_file
from deepnvme.integrations._tables.scaled import ScaledRows, scale_parameter
from deepnvme.integrations._tables.settings import MEMORY_BYTES, NAMES, TableSettings
from deepnvme.integrations._tables.shard import OwnedRows
from deepnvme.integrations._tables.table import DiskTable, TableGroup, refuse_capture
from deepnvme.integrations._tables.weight import RowWeight, ids_of_tables, row_parameter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS, COLUMNS = 600, 48


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("DEEPNVME_TABLES", "all")
    monkeypatch.setenv("DEEPNVME_TABLES_MEMORY", "4MB")
    monkeypatch.setattr(TableGroup, "_open", None)
    yield


def numbers(
    rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16, seed: int = 1
) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def mapped(path: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write tensors, and return views of the mapped file, as safetensors makes them."""
    deepnvme.save(tensors, path)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    storage: Any = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    found = json.loads(path.read_bytes()[8 : 8 + header])
    views = {}
    for name, tensor in tensors.items():
        start, end = (8 + header + offset for offset in found[name]["data_offsets"])
        everything = torch.empty(0, dtype=torch.uint8).set_(storage)
        views[name] = everything[start:end].view(tensor.dtype).view(tensor.shape)
    return views


def parameter(rows: int = ROWS, used_rows: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    return row_parameter(DiskTable("table", (rows, COLUMNS), dtype, used_rows=used_rows))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


IDS = torch.tensor([[5, 599, 5], [0, 17, 300]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_rows_are_those_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    table = numbers(dtype=dtype) if dtype.is_floating_point else torch.randint(0, 255, (ROWS, COLUMNS)).to(dtype)
    views = mapped(tmp_path / "model.safetensors", other=torch.ones(3), table=table)
    weight = parameter(dtype=dtype)
    weight.data.copy_(views["table"])
    assert isinstance(weight, torch.nn.Parameter)
    assert isinstance(weight.data, RowWeight)
    assert (weight.shape, weight.dtype, weight.device.type) == (table.shape, dtype, "cpu")
    assert same(functional.embedding(IDS, weight), table[IDS])
    assert same(weight[IDS[0]], table[IDS[0]])
    assert same(weight.index_select(0, IDS[1]), table[IDS[1]])
    assert functional.embedding(torch.empty(0, 2, dtype=torch.int64), weight).shape == (0, 2, COLUMNS)


@pytest.mark.parametrize("ids", [torch.tensor([600]), torch.tensor([-1])])
def test_an_id_beyond_the_table_is_an_error(tmp_path: Path, ids: torch.Tensor) -> None:
    weight = parameter()
    weight.data.copy_(mapped(tmp_path / "m.safetensors", table=numbers())["table"])
    with pytest.raises(IndexError):
        functional.embedding(ids, weight)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rows_are_converted_as_a_copy_would(tmp_path: Path, stored: torch.dtype) -> None:
    table = numbers(dtype=stored)
    weight = parameter(dtype=torch.float32)
    weight.data.copy_(mapped(tmp_path / "m.safetensors", table=table)["table"])
    assert same(functional.embedding(IDS, weight), table.float()[IDS])


def test_a_lossy_conversion_is_refused_while_loading(tmp_path: Path) -> None:
    weight = parameter(dtype=torch.float8_e4m3fn)
    with pytest.raises(UnsupportedError, match=r"bfloat16 in the checkpoint, and torch.float8_e4m3fn"):
        weight.data.copy_(mapped(tmp_path / "m.safetensors", table=numbers())["table"])


def test_shards_of_several_files_in_any_order(tmp_path: Path) -> None:
    table = numbers()
    weight = parameter()
    bounds = [0, 130, 131, 400, ROWS]
    pieces = [*itertools.pairwise(bounds)]
    for index in (2, 0, 3, 1):
        start, end = pieces[index]
        piece = mapped(tmp_path / f"{index}.safetensors", a=torch.ones(index + 1), piece=table[start:end].clone())
        weight.data[start:end].copy_(piece["piece"])
    assert same(functional.embedding(IDS, weight), table[IDS])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_partition(tmp_path: Path, rank: int) -> None:
    """As the servers' loaders and look-ups do: a part, padding, masked ids, and a sum over the ranks."""
    table = numbers(rows=500)
    view = mapped(tmp_path / "m.safetensors", table=table)["table"]
    start, end = rank * 320, min(500, (rank + 1) * 320)
    weight = parameter(rows=320, used_rows=end - start)
    part = view.narrow(0, start, end - start)
    weight[: part.shape[0]].data.copy_(part)
    weight[part.shape[0] :].data.fill_(0)
    ids = torch.tensor([0, 319, 320, 499])
    foreign = (ids < start) | (ids >= end)
    rows = functional.embedding((ids - start).masked_fill(foreign, 0), weight)
    rows.masked_fill_(foreign.unsqueeze(-1), 0)
    assert same(rows, table[ids].masked_fill(foreign.unsqueeze(-1), 0))
    assert not functional.embedding(torch.tensor([319]), weight).any() or end - start == 320
    assert same(OwnedRows(weight.table, start).start(ids).finish(), rows)
    # All of another rank.
    assert not OwnedRows(weight.table, start).start(ids[foreign]).finish().any()


def test_a_rank_without_rows_reads_zeros() -> None:
    weight = parameter(rows=64, used_rows=0)
    weight.data.fill_(0)
    assert not functional.embedding(torch.tensor([0, 3]), weight).any()


def test_modules_of_torch_keep_it(tmp_path: Path) -> None:
    table = numbers()
    with torch.device("meta"):
        module = torch.nn.Embedding(ROWS, COLUMNS, padding_idx=3, dtype=torch.bfloat16)
    module.weight.loader = print  # type: ignore[attr-defined]
    module.weight = row_parameter(DiskTable("table", (ROWS, COLUMNS), torch.bfloat16), module.weight)
    assert module.weight.loader is print  # type: ignore[attr-defined]
    module.weight.data.copy_(mapped(tmp_path / "m.safetensors", table=table)["table"])
    # As servers move parameters to a GPU and back around functions that finish loading.
    weight: Any = module.weight
    staged = weight.data.to("meta")
    weight.data = staged
    assert weight.data.data_ptr() == staged.data_ptr()
    weight.data = torch.empty_like(weight.data, device="cpu", pin_memory=False).copy_(weight.data)
    assert not weight.is_pinned()
    module.to("cpu").eval()
    with torch.inference_mode():
        assert same(module(IDS), table[IDS])
    assert ids_of_tables(torch.nn.Sequential(module, torch.nn.Linear(2, 2))) == {id(module.weight)}


def test_a_loader_may_find_another_dtype_out(tmp_path: Path) -> None:
    table = numbers(dtype=torch.float8_e4m3fn)
    weight = torch.nn.Parameter(torch.empty_like(parameter().data, dtype=torch.float8_e4m3fn), requires_grad=False)
    weight.data.copy_(mapped(tmp_path / "m.safetensors", table=table)["table"])
    assert same(functional.embedding(IDS, weight), table[IDS])


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: functional.linear(torch.ones(1, COLUMNS).bfloat16(), weight),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.data.normal_(),
        lambda weight: weight.data.fill_(1),
        lambda weight: weight.data.fill_(0),
        lambda weight: weight.float(),
        lambda weight: weight[:, :3],
        lambda weight: weight[torch.ones(ROWS, dtype=torch.bool)],
        lambda weight: weight + 1,
        lambda weight: torch.empty(ROWS, COLUMNS).copy_(weight),
        lambda weight: torch.save(weight, io.BytesIO()),
        copy.deepcopy,
        lambda weight: weight.data[:5].copy_(numbers(rows=5)),
    ],
)
def test_other_uses_are_refused(tmp_path: Path, use: Any) -> None:
    weight = parameter()
    weight.data.copy_(mapped(tmp_path / "m.safetensors", table=numbers())["table"])
    with pytest.raises(UnsupportedError, match="table"):
        use(weight)


def test_other_weights_are_refused_once_it_is_loaded(tmp_path: Path) -> None:
    weight = parameter()
    view = mapped(tmp_path / "m.safetensors", table=numbers())["table"]
    weight.data.copy_(view)
    # The same rows again are no change.
    weight.data.copy_(view)
    with pytest.raises(UnsupportedError, match="start the server again"):
        weight.data.copy_(mapped(tmp_path / "other.safetensors", table=numbers(seed=2))["table"])


def test_a_look_up_inside_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    refuse_capture("table", torch.device("cpu"))
    with pytest.raises(RuntimeError, match="table: rows that are on disk cannot be looked up inside a CUDA graph"):
        refuse_capture("table", torch.device("cuda"))


def test_rows_that_are_not_loaded_are_an_error(tmp_path: Path) -> None:
    weight = parameter()
    with pytest.raises(UnsupportedError, match="row 0 of 600 was not loaded"):
        functional.embedding(IDS, weight)
    weight.data[:100].copy_(mapped(tmp_path / "m.safetensors", table=numbers(rows=100))["table"])
    with pytest.raises(UnsupportedError, match="row 100 of 600 was not loaded"):
        functional.embedding(IDS, weight)


def test_tensors_in_memory_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="--load-format deepnvme"):
        parameter().data.copy_(numbers())
    with pytest.raises(UnsupportedError, match="not contiguous"):
        parameter().data.copy_(numbers(rows=COLUMNS, columns=ROWS).t())


def test_anonymous_mappings_are_refused() -> None:
    memory = mmap.mmap(-1, 1 << 16)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    with pytest.raises(UnsupportedError, match="cannot be opened again"):
        find_file(tensor, "table")


def test_a_changed_mapping_is_refused(tmp_path: Path) -> None:
    view = mapped(tmp_path / "m.safetensors", table=numbers())["table"]
    view[-1] += 1
    with pytest.raises(UnsupportedError, match="its loader changed the rows"):
        parameter().data.copy_(view)


def test_replaced_and_deleted_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    view = mapped(path, table=numbers())["table"]
    path.rename(tmp_path / "aside")
    mapped(path, table=numbers(seed=2))
    # The kernel knows the file by its new name.
    assert find_file(view, "table").path == str(tmp_path / "aside")
    (tmp_path / "aside").unlink()
    with pytest.raises(UnsupportedError, match="cannot be opened again"):
        find_file(view, "table")


def test_a_file_that_changes_later_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    weight = parameter()
    weight.data.copy_(mapped(path, table=numbers())["table"])
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(ChangedFileError):
        functional.embedding(IDS, weight)


def test_a_link_leads_to_its_file(tmp_path: Path) -> None:
    """As in the cache of the Hugging Face Hub."""
    (tmp_path / "blobs").mkdir()
    mapped(tmp_path / "saved.safetensors", table=numbers())
    (tmp_path / "saved.safetensors").rename(tmp_path / "blobs" / "0a1b")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "0a1b")
    size = (tmp_path / "model.safetensors").stat().st_size
    storage: Any = torch.UntypedStorage.from_file(str(tmp_path / "model.safetensors"), False, size)
    place = find_file(torch.empty(0, dtype=torch.uint8).set_(storage), "table")
    assert (place.path, place.offset) == (str(tmp_path / "blobs" / "0a1b"), 0)


def test_another_file_of_the_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    view = mapped(path, table=numbers())["table"]
    place = find_file(view, "table")
    with pytest.raises(UnsupportedError, match="was replaced"):
        _check_identity(place._replace(identity=(place.identity[0], place.identity[1] + 1)), "table")
    # A file system whose mappings have other numbers.
    _check_identity(place._replace(identity=(1, 1)), "table")


@pytest.mark.parametrize("name", ["line\nend", "space end", "ü", "deleted (deleted)"])
def test_names_of_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    data = b"\1" * 5000
    path.write_bytes(data)
    storage: Any = torch.UntypedStorage.from_file(str(path), False, len(data))
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    place = find_file(tensor[100:200], "table")
    assert (place.path, place.offset) == (str(path), 100)


def test_tables_share_the_memory(tmp_path: Path) -> None:
    weights = [parameter(), parameter(rows=3 * ROWS)]
    views = mapped(tmp_path / "m.safetensors", a=numbers(), b=numbers(rows=3 * ROWS))
    for weight, view in zip(weights, views.values(), strict=True):
        weight.data.copy_(view)
    bounds = [weight.table.store().stats().memory_bytes for weight in weights]
    assert bounds[0] <= 1_000_000
    assert sum(bounds) <= 4_000_000
    # A model that is built later has memory of its own.
    assert TableGroup.join(5).nbytes == 5


def test_too_little_memory_is_refused_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPNVME_TABLES_MEMORY", "1KB")
    view = mapped(tmp_path / "m.safetensors", table=numbers())["table"]
    with pytest.raises(ValueError, match=r"DEEPNVME_TABLES_MEMORY: the share of table is 1000 bytes"):
        parameter().data.copy_(view)


@pytest.mark.parametrize("memory", ["4MB", "200KB"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str, dtype: torch.dtype) -> None:
    """In memory or on disk, by the setting; the formula is that of both servers."""
    monkeypatch.setenv("DEEPNVME_TABLES_MEMORY", memory)
    rows = 40_000
    codes = numbers(rows=rows, dtype=torch.float8_e4m3fn)
    scales = torch.randint(100, 140, (rows, 3), dtype=torch.uint8)
    views = mapped(tmp_path / "m.safetensors", codes=codes, scales=scales.view(dtype))
    table = DiskTable("engram", (rows - 100, COLUMNS), torch.float8_e4m3fn)
    weight, factors = row_parameter(table), scale_parameter(table, "scales", 3, dtype)
    assert isinstance(factors, RowWeight) == (memory == "200KB")
    weight.data.copy_(views["codes"][100:])
    factors.data.copy_(views["scales"][100:])
    scaled = ScaledRows(weight, factors, 100)
    ids = torch.tensor([[100, 99, 39_999], [7_000, 100, 0]])
    scaled.prefetch(ids)
    wanted = codes[ids].float().view(*ids.shape, 3, -1) * scales.view(torch.float8_e8m0fnu)[ids].float().unsqueeze(-1)
    foreign = (ids < 100).unsqueeze(-1)
    assert same(scaled.start(ids).finish(), wanted.flatten(-2).bfloat16().masked_fill(foreign, 0))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", TableSettings()),
        ("all", TableSettings(frozenset(NAMES))),
        ("1GB", TableSettings(frozenset(NAMES), 10**9)),
        ("engram, oe_embedder", TableSettings(frozenset({"engram", "oe_embedder"}))),
    ],
)
def test_settings(monkeypatch: pytest.MonkeyPatch, text: str, wanted: TableSettings) -> None:
    monkeypatch.setenv("DEEPNVME_TABLES", text)
    monkeypatch.delenv("DEEPNVME_TABLES_MEMORY")
    settings = TableSettings.from_environment()
    assert settings == wanted
    assert settings.memory == MEMORY_BYTES
    assert settings.is_enabled == bool(text)
    assert settings.keeps_on_disk("engram", 10**9) == bool(text)
    assert settings.keeps_on_disk("engram", 10**9 - 1) == (bool(text) and text != "1GB")
    assert not settings.keeps_on_disk("embed_tokens", 10**12)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DEEPNVME_TABLES", "embed_tokens", "DEEPNVME_TABLES is 'embed_tokens'; it must be all, a size"),
        ("DEEPNVME_TABLES", ",", "DEEPNVME_TABLES is ','"),
        ("DEEPNVME_TABLES", "1XB", "DEEPNVME_TABLES"),
        ("DEEPNVME_TABLES_MEMORY", "much", "DEEPNVME_TABLES_MEMORY is 'much'"),
    ],
)
def test_invalid_settings_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        TableSettings.from_environment()


def test_names_of_tensors_in_checkpoints() -> None:
    settings = TableSettings(frozenset(NAMES))
    tables = [
        "model.language_model.embed_tokens_per_layer.weight",
        "model.layers.3.ple.ple_embedding.ngram_embedding.shard_511.weight",
        "layers.1.engram.embed.weight",
        "layers.1.engram.embed.scale",
        "model.ngram_embeddings.embedders.11.weight",
    ]
    assert all(settings.is_tensor_of_table(name) for name in tables)
    others = [
        "model.embed_tokens.weight",
        "x.ngram_embedding.weight_scale",
        "layers.1.engram.wkv.weight",
        "lm_head.weight",
    ]
    assert not any(settings.is_tensor_of_table(name) for name in others)


def test_the_load_format_maps_tables_and_reads_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = {"a": numbers(), "m.embed_tokens_per_layer.weight": numbers(seed=2), "z": numbers(seed=3)}
    path = tmp_path / "model.safetensors"
    deepnvme.save(state, path)
    found = dict(iterate_but_tables([str(path)], prefetch_bytes="1MB"))
    assert found.keys() == state.keys()
    assert all(same(found[name], tensor) for name, tensor in state.items())
    weight = parameter()
    weight.data.copy_(found["m.embed_tokens_per_layer.weight"])
    assert same(functional.embedding(IDS, weight), state["m.embed_tokens_per_layer.weight"][IDS])
    with pytest.raises(UnsupportedError):
        find_file(found["a"], "a")
    assert list(dict(iterate_but_tables([str(path)], wanted=lambda name: name == "z"))) == ["z"]
