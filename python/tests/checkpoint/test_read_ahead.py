"""Lazy states: tensors that are used in the order of the file are read ahead, others one by one."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import deepnvme
from deepnvme._checkpoint.lazy import WINDOW_BYTES_MAX, ReadAhead
from deepnvme._checkpoint.load_request import LoadRequest, SourceFile
from deepnvme.errors import ChecksumError, ClosedError
from forked_child import status_of_child

COUNT = 400
SUFFIXES = (".pt", ".safetensors")


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {f"layer.{i:03}": torch.randn(2000 + 17 * i, generator=generator) for i in range(COUNT)}


@pytest.fixture(scope="module", params=SUFFIXES)
def path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, state: dict[str, torch.Tensor]
) -> Path:
    path = tmp_path_factory.mktemp("ahead") / f"state{request.param}"
    deepnvme.save(state, path)
    return path


def in_file_order(path: Path, state: dict[str, torch.Tensor]) -> list[str]:
    if path.suffix == ".pt":
        return [*state]
    with safe_open(path, "pt") as file:
        return [*file.offset_keys()]


def test_tensors_in_the_order_of_the_file_are_read_together(path: Path, state: dict[str, torch.Tensor]) -> None:
    with deepnvme.Engine() as engine:
        lazy = deepnvme.load(path, lazy=True, engine=engine, verify="off")
        before = engine.stats()
        for name in in_file_order(path, state):
            assert torch.equal(lazy[name] + 0, state[name])
        after = engine.stats()
    nbytes = sum(tensor.nbytes for tensor in state.values())
    assert after.ops - before.ops <= nbytes / (1 << 20) + 30
    assert after.bytes_read - before.bytes_read <= nbytes * 1.05


def test_headers_that_checksums_cover_are_read_with_the_tensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    with deepnvme.Engine() as engine:
        lazy = deepnvme.load(path, lazy=True, engine=engine)
        assert engine.stats().ops <= 4
        for name in in_file_order(path, state):
            assert torch.equal(lazy[name] + 0, state[name])
        nbytes = sum(tensor.nbytes for tensor in state.values())
        assert engine.stats().ops <= nbytes / (1 << 20) + 40


@pytest.mark.parametrize("order", ["in order", "reversed"])
def test_a_damaged_header_is_an_error_of_its_tensor_only(
    state: dict[str, torch.Tensor], tmp_path: Path, order: str
) -> None:
    damaged = tmp_path / "state.pt"
    deepnvme.save(state, damaged)
    data, names = bytearray(damaged.read_bytes()), [*state]
    bad = names[COUNT // 2]
    # The date in the header of the record, which stands 20 bytes before its name.
    at = data.index(f"/data/{COUNT // 2}".encode(), data.index(state[names[COUNT // 2 - 1]].numpy().tobytes()))
    at = data.rindex(b"PK\x03\x04", 0, at) + 10
    data[at] ^= 1
    damaged.write_bytes(data)
    lazy = deepnvme.load(damaged, lazy=True)
    for name in names if order == "in order" else names[::-1]:
        if name == bad:
            with pytest.raises(ChecksumError, match=f"data/{COUNT // 2}"):
                lazy[name] + 0
        else:
            assert torch.equal(lazy[name] + 0, state[name])


def test_tensors_out_of_order_are_read_alone(path: Path, state: dict[str, torch.Tensor]) -> None:
    names = in_file_order(path, state)[::2]
    random.Random(3).shuffle(names)
    names = names[:40]
    with deepnvme.Engine() as engine:
        lazy = deepnvme.load(path, lazy=True, engine=engine, verify="off")
        before = engine.stats()
        for name in names:
            assert torch.equal(lazy[name] + 0, state[name])
        after = engine.stats()
    # Each with the page that it shares with its neighbours.
    assert after.bytes_read - before.bytes_read <= sum(state[name].nbytes for name in names) + len(names) * 3 * 4096


def test_at_most_two_windows_are_read_that_nobody_uses(tmp_path: Path) -> None:
    state = {f"t{i:03}": torch.randn(1 << 18) for i in range(80)}
    deepnvme.save(state, tmp_path / "state.pt")
    with deepnvme.Engine() as engine:
        lazy = deepnvme.load(tmp_path / "state.pt", lazy=True, engine=engine, verify="off")
        before = engine.stats().bytes_read
        for count, name in enumerate([*state][:40], 1):
            assert torch.equal(lazy[name] + 0, state[name])
            used = sum(tensor.nbytes for tensor in [*state.values()][:count])
            assert engine.stats().bytes_read - before <= used + 2 * WINDOW_BYTES_MAX + (1 << 20)
            del lazy[name]


@pytest.mark.parametrize("seed", range(4))
def test_unused_read_ahead_is_given_up(tmp_path: Path, seed: int) -> None:
    state = {f"t{i:03}": torch.randn(1 << 18) for i in range(160)}
    deepnvme.save(state, tmp_path / "state.pt", durability="none")
    request = LoadRequest(path=tmp_path / "state.pt", device=torch.device("cpu"), verify="off")
    reader = request.open(SourceFile(tmp_path / "state.pt"), headers="read")
    source = ReadAhead(request, reader, range(reader.storage_count))
    values, choose = [*state.values()], random.Random(seed)
    for _ in range(20):
        start, length = choose.randrange(150), choose.randrange(1, 10)
        for index in range(start, min(start + length, len(values))):
            found = torch.empty(0).set_(source.read(index))
            assert torch.equal(found, values[index])
            kept = {id(window): window.nbytes for window in source._ahead.values()}
            assert sum(kept.values()) <= 2 * WINDOW_BYTES_MAX


def test_threads_read_each_tensor_once(path: Path, state: dict[str, torch.Tensor]) -> None:
    with deepnvme.Engine() as engine, ThreadPoolExecutor(6) as pool:
        lazy = deepnvme.load(path, lazy=True, engine=engine)
        names = in_file_order(path, state) * 2
        found = [*pool.map(lambda name: torch.equal(lazy[name] + 0, state[name]), names)]
        assert all(found)
        assert engine.stats().bytes_read <= sum(tensor.nbytes for tensor in state.values()) * 1.3


@pytest.mark.parametrize("verify", ["full", "auto"])
def test_a_damaged_neighbour_is_an_error_of_its_own_only(
    path: Path, state: dict[str, torch.Tensor], tmp_path: Path, verify: Any
) -> None:
    damaged = tmp_path / path.name
    data = bytearray(path.read_bytes())
    names = in_file_order(path, state)
    bad = names[COUNT // 2]
    at = data.index(state[bad].numpy().tobytes())
    data[at + 100] ^= 1
    damaged.write_bytes(data)
    lazy = deepnvme.load(damaged, lazy=True, verify=verify)
    for name in names:
        if name == bad and verify == "full":
            for _ in range(2):
                with pytest.raises(ChecksumError, match=bad if path.suffix != ".pt" else "data/"):
                    lazy[name] + 0
        elif name != bad:
            assert torch.equal(lazy[name] + 0, state[name])


def test_a_forked_child_waits_for_nothing_that_the_parent_reads_ahead(
    path: Path, state: dict[str, torch.Tensor]
) -> None:
    # One operation at a time, so that the windows are in flight when the process forks.
    with deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096) as engine:
        lazy = deepnvme.load(path, lazy=True, engine=engine, verify="off")
        names = in_file_order(path, state)
        for name in names[:4]:
            assert torch.equal(lazy[name] + 0, state[name])

        def work() -> None:
            with pytest.raises(ClosedError):
                lazy[names[4]] + 0

        assert status_of_child(work) == 0
        for name in names[4:]:
            assert torch.equal(lazy[name] + 0, state[name])
