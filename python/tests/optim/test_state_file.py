"""State files: identical bits, other numbers of ranks, damage, killed savers."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deepnvme import optim
from deepnvme._swap import Swapper
from deepnvme.errors import ChecksumError, CorruptFileError, Error, NotFoundError, UnsupportedError
from deepnvme.optim import _state_file
from forked_child import status_of_child

from .nets import KINDS, MEMORY, assert_same_parameters, groups, train, twins


def pair(tmp_path: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    one, other = twins(dtype)
    mine = kind(groups(one), **settings, swap_dir=tmp_path, memory=MEMORY)
    return one, mine, other, kind(groups(other), **settings, swap_dir=tmp_path, memory=MEMORY)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits(tmp_path: Path, kind: Any, settings: dict[str, Any], dtype: torch.dtype, moments: str) -> None:
    one, mine, other, his = pair(tmp_path, kind, {**settings, "moments": moments}, dtype)
    train(one, mine, range(4))
    mine.param_groups[1]["lr"] = 0.125
    how = mine.save_state(tmp_path / "state")
    assert how.get("memory_bytes", 0) == 0
    train(other, his, range(7, 9))  # what it had is replaced
    other.load_state_dict(one.state_dict())
    how = his.load_state(tmp_path / "state")
    assert his.param_groups[1]["lr"] == 0.125
    assert his.param_groups[0].keys() == mine.param_groups[0].keys()
    ours, theirs = mine.state_dict(), his.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in ours["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(theirs["state"][index][name]), torch.as_tensor(value)), (index, name)
    if moments == "fp32":
        train(one, mine, range(4, 7))
        train(other, his, range(4, 7))
        assert_same_parameters(one, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_no_trip_through_memory(tmp_path: Path) -> None:
    one, mine, _, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(2))
    saved = mine.save_state(tmp_path / "state")
    loaded = his.load_state(tmp_path / "state")
    size = (tmp_path / "state").stat().st_size
    for how in (saved, loaded):
        assert how.get("memory_bytes", 0) == 0
        assert 0.9 * size < how.get("shared_bytes", 0) + how.get("kernel_bytes", 0) <= size
    # Loaded state is used without an initial step.
    assert his.swap_stats().resident_bytes_peak <= MEMORY


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    one, mine, _, _ = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(2))
    with pytest.raises(ValueError, match=r"names a torch archive; name it state\.safetensors"):
        mine.save_state(tmp_path / "state.pt")
    mine.save_state(tmp_path / "state.safetensors")
    tensors = load_file(tmp_path / "state.safetensors")
    state = mine.state_dict()["state"][0]
    begin, found = 0, []
    while f"0.exp_avg.{begin}" in tensors:
        found.append(tensors[f"0.exp_avg.{begin}"])
        begin += len(found[-1])
    assert torch.equal(torch.cat(found), state["exp_avg"].flatten())


def test_formats_can_be_changed(tmp_path: Path) -> None:
    one, mine, other, _ = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(3))
    mine.save_state(tmp_path / "state")
    his = optim.AdamW(groups(other), lr=1e-3, moments="8bit", swap_dir=tmp_path, memory=MEMORY)
    how = his.load_state(tmp_path / "state")
    assert how["memory_bytes"] > 0
    for index, state in mine.state_dict()["state"].items():
        theirs = his.state_dict()["state"][index]["exp_avg_sq"]
        torch.testing.assert_close(theirs, state["exp_avg_sq"], rtol=0.07, atol=1e-8)


class Rank:
    """A rank with a contiguous range of all weights, as ZeRO and FSDP split them."""

    def __init__(self, folder: Path, weights: dict[str, torch.Tensor], rank: int, ranks: int) -> None:
        total = sum(map(len, weights.values()))
        low, high = total * rank // ranks, total * (rank + 1) // ranks
        # Each parameter with its name and its range in it.
        self.params: dict[nn.Parameter, tuple[str, int, int]] = {}
        at = 0
        for name, weight in weights.items():
            begin, end = max(low - at, 0), min(high - at, len(weight))
            if begin < end:
                self.params[nn.Parameter(weight[begin:end].clone())] = (name, begin, end)
            at += len(weight)
        self.optimizer = optim.AdamW(self.params, lr=1e-2, swap_dir=folder, memory="128KiB")
        self.shards = {param: (name, begin) for param, (name, begin, _) in self.params.items()}

    def step(self, slopes: dict[str, torch.Tensor]) -> None:
        for param, (name, begin, end) in self.params.items():
            param.grad = slopes[name][begin:end].clone()
        self.optimizer.step()


def together(ranks: list[Rank], weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    whole = {name: torch.empty_like(weight) for name, weight in weights.items()}
    for rank in ranks:
        for param, (name, begin, end) in rank.params.items():
            whole[name][begin:end] = param.detach()
    return whole


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (3, 1), (2, 5), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_number_of_ranks(tmp_path: Path, saving: int, loading: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    weights = {name: torch.randn(count).to(dtype) for name, count in (("big", 90_001), ("small", 77), ("other", 5_000))}
    slopes = [{name: torch.randn_like(weight) for name, weight in weights.items()} for _ in range(6)]
    alone = Rank(tmp_path, weights, 0, 1)
    first = [Rank(tmp_path, weights, rank, saving) for rank in range(saving)]
    for slope in slopes[:3]:
        for rank in [alone, *first]:
            rank.step(slope)
    paths = [tmp_path / f"state-{rank}" for rank in range(saving)]
    for rank, path in zip(first, paths, strict=True):
        rank.optimizer.save_state(path, shards=rank.shards)
    half = together(first, weights)
    second = [Rank(tmp_path, half, rank, loading) for rank in range(loading)]
    for rank in second:
        rank.optimizer.load_state(paths, shards=rank.shards)
    for slope in slopes[3:]:
        for rank in [alone, *second]:
            rank.step(slope)
    expected, found = together([alone], weights), together(second, weights)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    with pytest.raises(ValueError, match="no name for"):
        second[0].optimizer.load_state(paths, shards={})
    if saving > 1:
        whole = Rank(tmp_path, weights, 0, 1)
        with pytest.raises(ValueError, match="files of all ranks"):
            whole.optimizer.load_state(paths[:1], shards=whole.shards)


@pytest.mark.parametrize("harm", ["cut", "header", "longer", "version", "count", "infinite", "empty", "other"])
def test_damaged_files(tmp_path: Path, harm: str) -> None:
    one, mine, _, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(1))
    path = tmp_path / "state"
    mine.save_state(path)
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    told = json.loads(bytes(data[8 : 8 + length]))
    inside = json.loads(told["__metadata__"]["deepnvme.optimizer"])
    if harm == "cut":
        data = data[: len(data) // 2]
    elif harm == "header":
        data[8:20] = os.urandom(12)
    elif harm == "longer":
        data[:8] = (1 << 62).to_bytes(8, "little")
    elif harm == "empty":
        data = bytearray()
    elif harm == "other":
        data = bytearray((2).to_bytes(8, "little") + b"{}")
    else:
        if harm == "version":
            inside["version"] = 99
        elif harm == "infinite":
            inside["stretches"][0][3] = float("inf")
        else:
            inside["stretches"][0][3] = 1 << 60
        told["__metadata__"]["deepnvme.optimizer"] = json.dumps(inside)
        text = json.dumps(told).encode()
        data = bytearray(len(text).to_bytes(8, "little") + text + data[8 + length :])
    path.write_bytes(data)
    before = copy.deepcopy(his.state_dict())
    with pytest.raises(CorruptFileError, match="state"):
        his.load_state(path)
    assert his.state_dict()["param_groups"] == before["param_groups"]


def test_a_load_that_fails_half_way_must_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(3))
    mine.save_state(tmp_path / "state")
    train(other, his, range(7, 9))
    real, brought = Swapper.import_, []

    def bring(self: Swapper, key: str, *arguments: Any) -> Any:
        brought.append(key)
        if len(brought) == 3:
            raise Error(errno.EIO, "read at offset 0: Input/output error", "state")
        return real(self, key, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Swapper, "import_", bring)
        with pytest.raises(Error, match="Input/output"):
            his.load_state(tmp_path / "state")
    for go_on in (his.step, his.state_dict, lambda: his.save_state(tmp_path / "other")):
        with pytest.raises(RuntimeError, match="load it again"):
            go_on()
    his.load_state(tmp_path / "state")
    other.load_state_dict(one.state_dict())
    train(one, mine, range(3, 5))
    train(other, his, range(3, 5))
    assert_same_parameters(one, other)


def test_state_dicts_of_torch_leave_small_parameters_together(tmp_path: Path) -> None:
    """They have no master weights. The first step adds those, which moves the parameters to other places."""
    params = [nn.Parameter(torch.randn(10).bfloat16()) for _ in range(60)]
    theirs = torch.optim.AdamW(params, lr=1e-3)
    mine = optim.AdamW(params, lr=1e-3, swap_dir=tmp_path, memory="64KiB")
    for param in params:
        param.grad = torch.randn(10).bfloat16()
    theirs.step()
    mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for _ in range(3):
        mine.step()
    stats = mine.swap_stats()
    assert stats is not None
    assert stats.items <= 2


def test_a_killed_save_leaves_the_old_file(tmp_path: Path) -> None:
    one, mine, _, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(1))
    path = tmp_path / "state"
    mine.save_state(path)
    first = path.read_bytes()
    train(one, mine, range(1, 2))

    # The same in a process that is killed when its file is written but has no name yet.
    def work() -> None:
        one, mine, _, _ = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
        train(one, mine, range(2))
        Swapper.export = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
        mine.save_state(path)

    assert status_of_child(work) == -signal.SIGKILL
    assert path.read_bytes() == first
    assert len(list(tmp_path.iterdir())) == 2, "a private file is left"
    mine.save_state(path)
    assert [one.name for one in tmp_path.iterdir()] == ["state"], "and removed by the next save"
    his.load_state(path)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    one, mine, _, _ = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(1))
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        mine.save_state(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(FileNotFoundError):
        mine.save_state(tmp_path / "nowhere" / "state")
    mine.param_groups[0]["what"] = object()
    with pytest.raises(TypeError, match="what="):
        mine.save_state(tmp_path / "state")


def small(tmp_path: Path) -> Any:
    """Return an optimizer with the smallest state."""
    param = nn.Parameter(torch.randn(9))
    param.grad = torch.randn(9)
    optimizer = optim.AdamW([param], lr=1e-3, swap_dir=tmp_path, memory="64KiB")
    optimizer.step()
    return optimizer


def test_any_changed_byte_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "state"
    small(tmp_path).save_state(path)
    data = path.read_bytes()
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    assert len(data) == header_bytes + 4096
    # The text of the header and the tensors completely; of spaces and padding every 61st byte, and the last.
    text_bytes = len(data[:header_bytes].rstrip(b" "))
    spaces, padding = range(text_bytes, header_bytes, 61), range(header_bytes + 72, len(data), 61)
    places = [*range(text_bytes), *spaces, *range(header_bytes, header_bytes + 72), *padding, len(data) - 1]
    with path.open("r+b", buffering=0) as out:
        for at in places:
            byte = data[at]
            os.pwrite(out.fileno(), bytes([byte ^ (1 + at * 37 % 255)]), at)
            # Any load verifies every byte of the header.
            with pytest.raises((CorruptFileError, ChecksumError, UnsupportedError), match="state"):
                _state_file.read(path, "full" if at >= header_bytes else "auto")
            os.pwrite(out.fileno(), bytes([byte]), at)
    assert _state_file.read(path, "full").extents == _state_file.read(path, "off").extents


@pytest.mark.parametrize("cut", [1, 4096, 5000, 8191])
def test_a_file_that_was_cut_or_grew_is_reported(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "state"
    small(tmp_path).save_state(path)
    data = path.read_bytes()
    for other in (data[:-cut], data + bytes(cut)):
        path.write_bytes(other)
        with pytest.raises(CorruptFileError, match="state"):
            _state_file.read(path, "auto")


def test_damage_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    one, mine, other, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(2))
    train(other, his, range(3))
    path = tmp_path / "state"
    mine.save_state(path)
    with path.open("r+b") as out:
        out.seek(-9, os.SEEK_END)
        last = out.read(1)[0]
        out.seek(-9, os.SEEK_END)
        out.write(bytes([last ^ 4]))
    before = copy.deepcopy(his.state_dict())
    with pytest.raises(ChecksumError, match=r"state.*CRC-64") as caught:
        his.load_state(path, verify="full")
    assert caught.value.filename == str(path)
    for index, state in his.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], before["state"][index]["exp_avg"])
    his.load_state(path, verify="off")
    # Without checksums nothing can be compared, and a file that had some cannot pass for one without.
    mine.save_state(path, checksums=False)
    his.load_state(path)
    with pytest.raises(ValueError, match="no checksums"):
        his.load_state(path, verify="full")
    with pytest.raises(ValueError, match="verify"):
        his.load_state(path, verify="some")


def test_the_command_vouches_for_every_byte(tmp_path: Path, python: Any) -> None:
    path = tmp_path / "state.safetensors"
    small(tmp_path).save_state(path)
    check = f"import sys; from deepnvme._deepnvme import _run_command as run; sys.exit(run(['verify', {str(path)!r}]))"
    python(check)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    python(check, status=1)


def test_a_file_that_is_replaced_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, mine, _, his = pair(tmp_path, optim.AdamW, {"lr": 1e-3})
    train(one, mine, range(2))
    path, real = tmp_path / "state", Swapper.import_
    mine.save_state(path)

    def bring(self: Swapper, *arguments: Any) -> Any:
        mine.save_state(path)
        return real(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Swapper, "import_", bring)
        with pytest.raises(CorruptFileError, match="file was replaced"):
            his.load_state(path)
    with pytest.raises(RuntimeError, match="load it again"):
        his.step()
    his.load_state(path)


def test_names_links_and_modes(tmp_path: Path) -> None:
    optimizer = small(tmp_path)
    path = tmp_path / ("long-" + "n" * 235)
    path.touch(mode=0o640)
    path.chmod(0o640)
    (tmp_path / "link").symlink_to(path.name)
    # Names of private files, current and former.
    foreign = [f".{path.name[:180]}.deepnvme-tmp-{end}" for end in ("1-0", "1f-0-0123456789abcdef", "0123456789ab")]
    for name in foreign:
        (tmp_path / name).write_text("foreign")
    before = {one.name for one in tmp_path.iterdir()}
    for _ in range(2):
        optimizer.save_state(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert {one.name for one in tmp_path.iterdir()} == before
    assert all((tmp_path / name).read_text() == "foreign" for name in foreign)
    optimizer.load_state(path, verify="full")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name, error in (("dangling", FileNotFoundError), ("pipe", ValueError), (".", IsADirectoryError)):
        with pytest.raises(error, match=re.escape(str(tmp_path / name))) as caught:
            optimizer.save_state(tmp_path / name)
        assert isinstance(caught.value, Error)
        with pytest.raises((error, CorruptFileError)) as caught:
            optimizer.load_state(tmp_path / name)
        assert isinstance(caught.value, Error)
    with pytest.raises(NotFoundError, match="nowhere"):
        optimizer.load_state([path, tmp_path / "nowhere"])
    in_bytes = os.fsencode(path)
    optimizer.save_state(in_bytes)
    optimizer.load_state(in_bytes)
    with pytest.raises(TypeError):
        optimizer.load_state([3])


def test_a_refusal_of_the_kernel_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = small(tmp_path)
    path = tmp_path / "state"
    optimizer.save_state(path)
    first = path.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Swapper, "export", refuse)
        with pytest.raises(Error, match="make room") as caught:
            optimizer.save_state(path)
    assert caught.value.filename == str(path)
    assert path.read_bytes() == first
    assert [one.name for one in tmp_path.iterdir()] == ["state"]


def test_state_in_memory_is_for_state_dicts(tmp_path: Path) -> None:
    optimizer = optim.AdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="state_dict"):
        optimizer.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="load_state_dict"):
        optimizer.load_state(tmp_path / "state")


def test_with_gradients_on_disk(tmp_path: Path) -> None:
    """They are stored next to the state, but are not saved."""
    one, other = twins()
    mine = optim.AdamW(groups(one), lr=1e-3, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    train(one, mine, range(3))
    mine.save_state(tmp_path / "state")
    his = optim.AdamW(groups(other), lr=1e-3, swap_dir=tmp_path, memory=MEMORY, swap_gradients=True)
    other.load_state_dict(one.state_dict())
    his.load_state(tmp_path / "state")
    train(one, mine, range(3, 6))
    train(other, his, range(3, 6))
    assert_same_parameters(one, other)
