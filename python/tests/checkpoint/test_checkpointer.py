"""A folder of checkpoints: retention, resuming, saving in the background."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import deepnvme
from deepnvme import errors
from programs import program

from .states import assert_same


def state_of(step: int) -> dict[str, Any]:
    return {"a": torch.full((300_000,), float(step)), "b": torch.full((10,), step), "step": step}


def steps_in(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in deepnvme.Checkpointer(folder).checkpoints]


@pytest.mark.parametrize("async_", [False, True])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, async_: bool) -> None:
    with deepnvme.Checkpointer(tmp_path / "c", keep=2, async_=async_) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(FileNotFoundError):
            checkpointer.restore()
        for step in range(5):
            assert checkpointer.save(step, state_of(step))
        assert_same(checkpointer.restore(), state_of(4))
        assert_same(checkpointer.restore(3, verify="full"), state_of(3))
    with pytest.raises(FileNotFoundError, match="step 1"):
        checkpointer.restore(1)
    assert steps_in(tmp_path / "c") == [3, 4]
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert names == ["manifest.json", "step-00000003.pt", "step-00000004.pt"]
    latest = checkpointer.latest()
    assert latest is not None
    assert latest.nbytes == latest.path.stat().st_size
    assert latest.torch == torch.__version__
    assert abs(dt.datetime.fromisoformat(latest.time).timestamp() - time.time()) < 100
    assert_same(torch.load(latest.path, weights_only=True), state_of(4))
    stats = checkpointer.stats()
    assert stats.saves == 5
    assert stats.stall_s > 0
    assert stats.write_s > 0


def test_which_steps_are_saved(tmp_path: Path) -> None:
    by_number = deepnvme.Checkpointer(tmp_path / "n", keep=None, every=3)
    assert [by_number.save(step, state_of(step)) for step in range(7)] == [True, False, False, True, False, False, True]
    assert by_number.save(8, state_of(8), force=True)
    assert steps_in(tmp_path / "n") == [0, 3, 6, 8]
    by_time = deepnvme.Checkpointer(tmp_path / "t", every=dt.timedelta(hours=1))
    assert [by_time.save(step, state_of(step)) for step in range(3)] == [True, False, False]


def test_going_back_keeps_the_latest_save(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path, keep=2)
    for step in (10, 20, 5, 5):
        checkpointer.save(step, state_of(step))
    assert steps_in(tmp_path) == [20, 5]


def test_safetensors(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path, format="safetensors", async_=True)
    state = {"w": torch.randn(1000)}
    checkpointer.save(7, state)
    assert_same(checkpointer.restore(), state)
    assert_same(load_file(tmp_path / "step-00000007.safetensors"), state)


def test_tensors_may_change_when_save_returns(tmp_path: Path) -> None:
    state = {"a": torch.zeros(8 << 20)}
    with deepnvme.Checkpointer(tmp_path, async_=True, memory=8 << 20) as checkpointer:
        for step in range(6):
            state["a"].fill_(step)
            checkpointer.save(step, state)
            state["a"].fill_(-1)
    for checkpoint in checkpointer.checkpoints:
        loaded = deepnvme.load(checkpoint.path, verify="full")["a"]
        assert loaded.min() == loaded.max() == checkpoint.step


def test_a_slow_disk_stalls_only_the_next_save(tmp_path: Path, slow_engine: deepnvme.Engine) -> None:
    # One system call for every 4 KiB, so that writing the file takes much longer than copying the state.
    state = {"a": torch.randn(4 << 20)}
    first = state["a"].clone()
    with deepnvme.Checkpointer(tmp_path, async_=True, memory=32 << 20, engine=slow_engine) as checkpointer:
        checkpointer.save(0, state)
        assert checkpointer.latest() is None, "the save has returned, and the disk is at work"
        # Freed and made again, as FSDP does with a parameter's memory.
        storage = state["a"].untyped_storage()
        storage.resize_(0)
        storage.resize_(16 << 20)
        state["a"].fill_(-1)
        stall_s = checkpointer.stats().stall_s
        checkpointer.save(1, state)
        latest = checkpointer.latest()
        assert latest is not None, "the next save has waited for the first"
        assert latest.step == 0
        assert checkpointer.stats().stall_s > stall_s
    assert checkpointer.stats().stall_s < checkpointer.stats().write_s
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == [0, 1]
    assert torch.equal(checkpointer.restore(0, verify="full")["a"], first)
    assert checkpointer.restore(1, verify="full")["a"].max() == -1


def test_training_goes_on_between_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(500, 2000)
    optimizer = torch.optim.AdamW(model.parameters())
    expected = []
    with deepnvme.Checkpointer(tmp_path, keep=None) as checkpointer, checkpointer.overlap(optimizer):
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 500)).pow(2).sum().backward()
            optimizer.step()
            checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            expected.append(model.weight.detach().clone())
    assert [checkpoint.step for checkpoint in checkpointer.checkpoints] == list(range(6))
    for checkpoint, weight in zip(checkpointer.checkpoints, expected, strict=True):
        assert torch.equal(deepnvme.load(checkpoint.path, verify="full")["model"]["weight"], weight)
    before = optimizer.step
    assert before is not None
    optimizer.step()


def test_background_errors_are_raised_by_the_next_call(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path / "c", async_=True)
    checkpointer.save(1, state_of(1))
    checkpointer.wait()
    (tmp_path / "c" / "manifest.json").rename(tmp_path / "manifest.json")
    (tmp_path / "c" / "manifest.json").mkdir()
    checkpointer.save(2, state_of(2))
    with pytest.raises(deepnvme.errors.CorruptFileError):
        checkpointer.save(3, state_of(3))
    (tmp_path / "c" / "manifest.json").rmdir()
    (tmp_path / "manifest.json").rename(tmp_path / "c" / "manifest.json")
    (tmp_path / "c").rename(tmp_path / "gone")
    with pytest.raises(FileNotFoundError):
        checkpointer.save(2, state_of(2))
    (tmp_path / "gone").rename(tmp_path / "c")
    checkpointer.save(4, state_of(4))
    checkpointer.close()
    assert steps_in(tmp_path / "c") == [1, 4]


def test_unpicklable_states_raise_at_once(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path, async_=True)
    with pytest.raises(TypeError):
        checkpointer.save(1, {"lock": threading.Lock()})
    assert checkpointer.checkpoints == []


def test_a_file_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    checkpointer = deepnvme.Checkpointer(tmp_path)
    checkpointer.save(1, state_of(1))
    deepnvme.save(state_of(2), tmp_path / "step-00000001.pt")
    with pytest.raises(errors.ChecksumError, match="step 1"):
        checkpointer.restore()
    (tmp_path / "step-00000001.pt").unlink()
    assert deepnvme.Checkpointer(tmp_path).latest() is None


@pytest.mark.parametrize(("suffix", "checksums", "is_told"),
    [("pt", True, True), ("pt", False, True), ("safetensors", True, True), ("safetensors", False, False)])  # fmt: skip
def test_the_index_checksum_distinguishes_files(tmp_path: Path, suffix: Any, checksums: bool, is_told: bool) -> None:
    indexes = {}
    for name, value in (("a", 1.0), ("a", 2.0), ("b", 1.0)):
        checkpointer = deepnvme.Checkpointer(tmp_path / f"{name}{value}", format=suffix, checksums=checksums)
        checkpointer.save(1, {name: torch.full((3000,), value)})
        indexes[name, value] = checkpointer.checkpoints[0].index_crc64
    assert indexes["a", 1.0] != indexes["b", 1.0]
    assert (indexes["a", 1.0] != indexes["a", 2.0]) == is_told


def test_only_listed_checkpoints_are_ever_removed(tmp_path: Path) -> None:
    mine = ["notes.txt", "step-1.pt", "step-00000009.pt.bak", "model.pt", "step-00000077.pt"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    with deepnvme.Checkpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.warns(UserWarning, match=r"not in the manifest: step-00000077\.pt;"):
            checkpointer.save(0, state_of(0))
        for step in range(1, 3):
            checkpointer.save(step, state_of(step))
    assert {path.name for path in tmp_path.iterdir()} == {*mine, "manifest.json", "step-00000002.pt"}
    assert all((tmp_path / name).read_text() == "mine" for name in mine)


def test_retired_checkpoints_free_their_space(tmp_path: Path) -> None:
    def held() -> int:
        count = 0
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(FileNotFoundError):
                count += str(tmp_path) in str(link.readlink())
        return count

    with deepnvme.Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in range(4):
            checkpointer.save(step, {"a": torch.randn(1000)})
    assert steps_in(tmp_path) == [3]
    deadline = time.monotonic() + 20
    while held() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() == 0


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 1, "checkpoints": [{"file": "../x"}]}', '{"version": 9}']
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(errors.CorruptFileError, match=r"manifest\.json"):
        deepnvme.Checkpointer(tmp_path)


def test_invalid_settings(tmp_path: Path) -> None:
    for options in ({"keep": 0}, {"every": 0}, {"format": "zip"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            deepnvme.Checkpointer(tmp_path, **options)
    with pytest.raises(ValueError, match="step"):
        deepnvme.Checkpointer(tmp_path).save(-1, {})


TRAINER = """
import sys, torch, deepnvme
checkpointer = deepnvme.Checkpointer(sys.argv[1], keep=2, async_=True, durability="data")
latest = checkpointer.latest()
step = latest.step if latest else 0
state = {"a": torch.zeros(2 << 20), "b": torch.zeros(1000)}
while True:
    step += 1
    state["a"].fill_(step); state["b"].fill_(step)
    checkpointer.save(step, state)
    print(step, flush=True)
"""


def test_a_killed_trainer_goes_on_where_it_was(tmp_path: Path) -> None:
    last = 0
    for round_ in range(12):
        with program(TRAINER, tmp_path) as trainer:
            said = int(trainer.stdout.readline())
            time.sleep(0.03 * (round_ % 4))
            trainer.kill()
            said = max([said, *(int(line) for line in trainer.stdout.read().split())])
        checkpointer = deepnvme.Checkpointer(tmp_path)
        latest = checkpointer.latest()
        if latest is None:
            assert said <= 2
            continue
        # The last save may have been running in the background, and so may the one before it.
        assert said - 2 <= latest.step <= said + 1
        assert latest.step >= last
        last = latest.step
        loaded = checkpointer.restore(verify="full")
        assert loaded["a"].min() == loaded["a"].max() == loaded["b"].max() == latest.step
    json.loads((tmp_path / "manifest.json").read_text())


def test_the_program_ends_when_its_save_is_done(tmp_path: Path) -> None:
    code = (
        "import sys, torch, deepnvme\n"
        "deepnvme.Checkpointer(sys.argv[1], async_=True).save(3, {'a': torch.ones(16 << 20)})\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert steps_in(tmp_path) == [3]


@pytest.mark.parametrize("async_", [False, True])
def test_the_folder_stays_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, async_: bool
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    with deepnvme.Checkpointer("run", async_=async_) as checkpointer:
        checkpointer.save(1, state_of(1))
        monkeypatch.chdir(tmp_path / "other")
        checkpointer.save(2, state_of(2))
        checkpointer.wait()
        assert_same(checkpointer.restore(1), state_of(1))
    assert steps_in(tmp_path / "one/run") == [1, 2]
    assert not list((tmp_path / "other").iterdir())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"keep": 0}, "^keep is 0; it must be a whole number of at least 1, or None to keep all$"),
        ({"every": "10m"}, r"^every is '10m'; .*or a time such as datetime\.timedelta\(minutes=10\)$"),
        ({"writers_per_node": 0}, "^writers_per_node is 0; .*, or None for all$"),
        ({"memory": "1MB"}, "pass async_=True as well"),
    ],
)
def test_a_refused_argument_names_the_other_choices(tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        deepnvme.Checkpointer(tmp_path / "run", **arguments)


def test_the_lock_of_this_process_is_called_its_own(tmp_path: Path) -> None:
    with deepnvme.Checkpointer(tmp_path) as first, deepnvme.Checkpointer(tmp_path) as second:
        first.save(1, {"a": torch.ones(3)})
        with pytest.raises(deepnvme.errors.LockedError, match="another Checkpointer of this process saves into"):
            second.save(2, {"a": torch.ones(3)})
