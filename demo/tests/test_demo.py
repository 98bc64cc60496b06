"""Tests of the demo's checks: a check that cannot fail would be worthless."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

import layout
import report
import workload
from measure import Cost, cached_share, evict, same_bits
from methods import Method, all_methods


def small_state() -> dict[str, torch.Tensor]:
    return {
        "ragged": torch.rand(3, 5),
        "pages": torch.rand(4096).to(torch.bfloat16),
        "number": torch.tensor(7),
        "nan": torch.tensor([float("nan")]),
        "nothing": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    }


def test_same_bits_sees_every_difference() -> None:
    state = small_state()
    same_bits(state, {name: tensor.clone() for name, tensor in state.items()}, "a copy")
    flipped = state["ragged"].clone()
    flipped.view(torch.uint8).view(-1)[59] ^= 1
    for wrong in (flipped, state["ragged"].double(), state["ragged"].view(5, 3)):
        with pytest.raises(SystemExit, match="ragged"):
            same_bits(state, {**state, "ragged": wrong}, "somebody")
    with pytest.raises(SystemExit, match="names"):
        same_bits(state, {name: state[name] for name in list(state)[1:]}, "somebody")


def test_the_last_lines_say_what_costs_speed() -> None:
    backends = [{"name": "io_uring", "is_chosen": False}, {"name": "aio", "is_chosen": True}]
    place = {"direct": {"works": True}, "file_system": "ext4"}
    found = {"backends": backends, "folders": [place], "findings": []}
    assert report.machine(found).strip().splitlines() == [
        "aio moved the bytes, past the page cache, on ext4",
        "nothing was found that costs speed",
    ]
    found["findings"] = [{"severity": "slow", "text": "no io_uring", "remedy": "allow it"}]
    assert report.machine(found).splitlines()[-2:] == ["slow    no io_uring", "        > allow it"]


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: method.name)
def test_every_method_returns_every_bit(method: Method, tmp_path: Path) -> None:
    state = small_state()
    method.save(state, tmp_path / "state")
    same_bits(state, method.load(tmp_path / "state"), method.name)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_layout_is_that_of_safetensors() -> None:
    state = small_state()
    header, entries = layout.plan(state)
    assert entries == layout.parse(io.BytesIO(header).read)
    assert len(header) % layout.PAGE_BYTES == 0
    assert entries[0].name in ("pages", "nothing")
    data = b"".join(layout.Entry.bytes_of(state[entry.name].contiguous()) for entry in entries)
    safetensors = pytest.importorskip("safetensors.torch")
    same_bits(state, safetensors.load(header + data), "safetensors")


def test_an_evicted_file_is_cold_and_a_read_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert cached_share(path) == 1.0
    evict(path)
    if cached_share(path) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    path.read_bytes()
    assert cached_share(path) > 0


def test_the_size_is_what_was_asked_for_or_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"w": torch.rand(1 << 20)}
    monkeypatch.setenv("DEMO_GB", "0.05")
    monkeypatch.setattr(workload, "disk_pace", lambda *_: (1e-12, 1e-12))
    assert workload.choose_bytes(tmp_path, weights, 4, 3) == (50_000_000, [])
    monkeypatch.setattr(workload, "disk_pace", lambda *_: (1e-6, 1e-7))
    size, reasons = workload.choose_bytes(tmp_path, weights, 4, 3)
    assert size < 50_000_000
    assert len(reasons) == 1
    assert "the disk takes" in reasons[0]


def test_the_state_dict_is_as_large_as_asked_and_random() -> None:
    state = workload.state_dict({"w": torch.rand(8)}, 30_000_000)
    assert 30_000_000 <= workload.total_bytes(state) < 100_000_000
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    sample = state["generated.0.mlp.up.weight"].view(torch.uint8).view(-1)[:100_000]
    assert torch.bincount(sample.long(), minlength=256).min() > 250


def test_ratios_are_taken_round_by_round() -> None:
    slow = [(Cost(2.0, 1.0), Cost(4.0, 2.0)), (Cost(4.0, 1.0), Cost(8.0, 2.0))]
    fast = [(Cost(1.0, 0.5), Cost(1.0, 0.5)), (Cost(2.0, 0.5), Cost(2.0, 0.5))]
    _, _, first, second = report.table({"slow": slow, "fast": fast}, 10**9).splitlines()
    assert first.split() == ["slow", "0.38", "1.00", "1.0x", "0.19", "2.00", "1.0x"]
    assert second.split() == ["fast", "0.75", "0.50", "2.0x", "0.75", "0.50", "4.0x"]


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = report.Progress(2)
    progress.step("one")
    progress.close()
    assert capsys.readouterr() == ("", "")
