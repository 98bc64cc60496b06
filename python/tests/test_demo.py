"""``deepnvme demo``: its checks can fail, and it runs as a whole where accelerate is missing."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from deepnvme._demo import command, comparison, weights  # noqa: E402
from deepnvme._demo.command import compare_bits  # noqa: E402
from deepnvme._demo.comparison import Comparison, WrongResultError, cached_share, drop  # noqa: E402


def small_state() -> weights.State:
    return {
        "ragged": torch.rand(3, 5),
        "pages": torch.rand(4096).to(torch.bfloat16),
        "number": torch.tensor(7),
        "nan": torch.tensor([float("nan")]),
        "nothing": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
    }


def test_every_difference_is_seen() -> None:
    state = small_state()
    compare_bits(state, {name: tensor.clone() for name, tensor in state.items()}, "a copy")
    flipped = state["ragged"].clone()
    flipped.view(torch.uint8).view(-1)[59] ^= 1
    for wrong in (flipped, state["ragged"].double(), state["ragged"].view(5, 3)):
        with pytest.raises(WrongResultError, match="ragged"):
            compare_bits(state, {**state, "ragged": wrong}, "a tool")
    with pytest.raises(WrongResultError, match="names"):
        compare_bits(state, {name: state[name] for name in list(state)[1:]}, "a tool")


def test_torch_files_return_every_bit(tmp_path: Path) -> None:
    state = small_state()
    command.torch_save(state, tmp_path / "state.pt")
    compare_bits(state, command.torch_load(tmp_path / "state.pt"), "torch")


def test_a_dropped_file_is_cold_and_a_read_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert cached_share(path) == 1.0
    if not drop(path):
        pytest.skip("this file system keeps its files in memory")
    path.read_bytes()
    assert cached_share(path) > 0


def test_a_smaller_size_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "write_pace", lambda _: 1e12)
    assert weights.choose_bytes(50_000_000, tmp_path, 6) == (50_000_000, [])
    monkeypatch.setattr(weights, "write_pace", lambda _: 1e6)
    size, (reason,) = weights.choose_bytes(50_000_000, tmp_path, 6)
    assert size == 5_000_000
    assert "the disk writes" in reason


def test_a_disk_or_a_machine_that_is_too_small_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = json.dumps({"folder": str(tmp_path), "size": "1KB", "json": False})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000_000))
        assert command.run(options) == 1
    told = capfd.readouterr().err
    assert "the demo needs 2.5 GB of disk at least, and 1.0 GB are free; free some space" in told
    assert str(tmp_path) in told
    monkeypatch.setattr(weights, "available_memory_bytes", lambda: 500_000_000)
    assert command.run(options) == 1
    assert "the demo needs 2.5 GB of memory at least, and 0.5 GB are free" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", ["0", "-1", "1e3", "99999999999999999999TB", "1XB", ""])
def test_a_size_that_is_none_names_the_range(tmp_path: Path, size: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.run(json.dumps({"folder": str(tmp_path), "size": size, "json": False})) == 2
    assert "a number of bytes between 1 and 9223372036854775807" in capfd.readouterr().err


def test_the_state_dict_is_as_large_as_asked_and_random() -> None:
    state = weights.enlarge({"w": torch.rand(8)}, 30_000_000)
    assert 30_000_000 <= weights.total_bytes(state) < 100_000_000
    sample = state["generated.0.mlp.up.weight"].view(torch.uint8).view(-1)[:100_000]
    assert torch.bincount(sample.long(), minlength=256).min() > 250


def test_the_rates_and_the_ratio_are_those_of_the_round_with_the_median_ratio() -> None:
    one = Comparison("save", "GB/s", "torch", theirs=[1.0, 2.0, 4.0], ours=[2.0, 2.0, 12.0])
    assert one.ratio == 2.0
    unsteady = Comparison("load", "GB/s", "torch", theirs=[1.0, 1.65, 4.0], ours=[1.5, 1.3, 8.0])
    assert unsteady.ratio == 1.5
    assert comparison.table([unsteady]).splitlines()[1].split() == ["load", "torch", "1.00", "1.50", "GB/s", "1.5x"]
    missing = Comparison("generate", "tokens/s", "accelerate", missing="pip install accelerate")
    shown = comparison.table([one, missing])
    assert shown.splitlines()[1].split() == ["save", "torch", "1.00", "2.00", "GB/s", "2.0x"]
    assert "not measured: pip install accelerate" in shown


def test_the_picture_is_valid(tmp_path: Path) -> None:
    one = Comparison("save & load", "GB/s", "torch <2>", theirs=[1.0], ours=[2.0])
    comparison.write_picture(tmp_path / "bars.svg", [one, Comparison("a", "b", "c", missing="d")])
    texts = [element.text for element in ET.parse(tmp_path / "bars.svg").iter() if element.text]
    assert "torch <2>: 1.00 GB/s" in texts


def test_progress_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    progress = comparison.StepProgress(2)
    progress.step("one")
    progress.close()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_it_runs_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """The generation stage needs accelerate, and is named as missing."""
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "accelerate" else name)
    options = {"folder": str(tmp_path), "size": "20MB", "json": as_json}
    assert command.run(json.dumps(options)) == 0
    said = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [command.PICTURE]
    if as_json:
        rows = {row["work"]: row for row in json.loads(said)["comparisons"]}
        assert rows["generate"]["missing"] == "pip install accelerate"
        assert all(len(rows[work]["ours"]) == 3 for work in ("save, durable", "load, cold", "AdamW step"))
    else:
        assert "not measured: pip install accelerate" in said
        assert "embed 5 sentences as before" in said or "generated weights only" in said


def test_a_wrong_result_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "torch_load", lambda _: {"other": torch.ones(1)})
    assert command.run(json.dumps({"folder": str(tmp_path), "size": "1MB", "json": False})) == 1
    assert "FAILED: torch returned other names" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []
