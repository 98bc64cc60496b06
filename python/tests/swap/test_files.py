"""The files of a swapper: parts, attached and exported ranges, damage, and a disk without room."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme
from deepnvme.errors import CorruptFileError

from .bits import bits

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., deepnvme.Swapper]


def test_parts_in_memory_and_on_disk(swapper: Make) -> None:
    for checksums in (False, True):
        mine = swapper(8 * 4096, checksums=checksums)
        whole = torch.arange(6000, dtype=torch.int32)
        for key in ("there", "away"):
            mine.put(key, whole)
        # Only one of the two is in memory.
        for key in ("there", "away"):
            for start, count in [(0, 6000), (1, 1), (1500, 2049), (5999, 1), (6000, 0)]:
                out = torch.empty(count, dtype=torch.int32)
                assert mine.read(key, start * 4, out) is out
                assert torch.equal(out, whole[start : start + count])
            strided = torch.empty(100, 2, dtype=torch.int32)[:, 0]
            assert torch.equal(mine.read(key, 400, strided), whole[100:200])
            assert torch.equal(mine.read(key, 3, torch.empty(5, dtype=torch.uint8)), deepnvme.as_bytes(whole)[3:8])
            misaligned = mine.read(key, 2, torch.empty(3, dtype=torch.int32))
            assert bits(misaligned) == bits(whole)[2:14]
            mine.write(key, 8, torch.tensor([-1, -2], dtype=torch.int32))
            mine.write(key, 5999 * 4, torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).t()[1:, :1])
            mine.write(key, 1, torch.full((2,), 0x0101, dtype=torch.int16))
        expected = whole.clone()
        expected[2:4] = torch.tensor([-1, -2])
        expected[5999] = 2
        deepnvme.as_bytes(expected)[1:5] = 1
        for key in ("there", "away"):
            with mine.borrow(key) as borrowed:
                assert torch.equal(borrowed, expected)
            with pytest.raises(ValueError, match="outside"):
                mine.read(key, 5999 * 4, torch.empty(2, dtype=torch.int32))
            with pytest.raises(ValueError, match="offset is -4"):
                mine.write(key, -4, torch.empty(2, dtype=torch.int32))


def test_a_part_is_read_without_the_rest(swapper: Make) -> None:
    mine = swapper(64 * 4096)
    for key in ("large", "other"):
        mine.put(key, torch.ones(40 * 1024))
    mine.flush()
    before = mine.stats()
    mine.read("large", 80_000, torch.empty(10))
    after = mine.stats()
    assert after.bytes_read - before.bytes_read == 40
    assert after.evictions == before.evictions


def test_attached_from_a_file(swapper: Make, tmp_path: Path) -> None:
    mine = swapper(8 * 4096)
    weights = torch.randn(20_000)
    deepnvme.write(weights, tmp_path / "weights")
    for index in range(4):
        mine.attach(str(index), tmp_path / "weights", index * 20_000, 20_000, dtype=torch.float32, shape=(50, 100))
    for _ in range(2):
        for index in range(4):
            with mine.borrow(str(index), shared=True) as borrowed:
                assert torch.equal(borrowed, weights[index * 5000 :][:5000].view(50, 100))
    with pytest.raises(ValueError, match="read-only"), mine.borrow("1"):
        pass
    with pytest.raises(ValueError, match="read-only"):
        mine.write("1", 0, torch.ones(1))
    with pytest.raises(ValueError, match="has 80000 bytes"):
        mine.attach("x", tmp_path / "weights", 60_001, 20_000)
    with pytest.raises(ValueError, match="does not have 12 bytes"):
        mine.attach("x", tmp_path / "weights", 0, 12, dtype=torch.float32, shape=(4,))
    assert mine.stats().bytes_written == 0


@pytest.mark.parametrize("checksums", [False, True])
def test_export_and_import(swapper: Make, tmp_path: Path, checksums: bool) -> None:
    mine = swapper(8 * 4096, checksums=checksums)
    tensors = {str(index): torch.randn(3000 + index) for index in range(6)}
    for key, tensor in tensors.items():
        mine.put(key, tensor)
    path = tmp_path / "checkpoint"
    with path.open("w+b") as file:
        offset, places = 0, {}
        for key, tensor in tensors.items():
            with mine.borrow(key) as borrowed:
                borrowed.mul_(2)
            how = mine.export(key, file.fileno(), offset)
            assert sum(how.values()) == tensor.nbytes
            places[key] = offset
            offset += -(-tensor.nbytes // 4096) * 4096 + (100 if key == "3" else 0)
        for key, tensor in tensors.items():
            out = torch.empty_like(tensor)
            deepnvme.read(out, path, places[key])
            assert torch.equal(out, tensor * 2)
        for key, tensor in tensors.items():
            mine.import_(
                f"back {key}", file.fileno(), places[key], tensor.nbytes, dtype=torch.float32, shape=tensor.shape
            )
        with pytest.raises(deepnvme.EndOfFileError) as caught:
            mine.import_("beyond", file.fileno(), offset, 30_000)
        assert caught.value.filename == str(path)
        assert "beyond" not in mine
    for key, tensor in tensors.items():
        with mine.borrow(f"back {key}") as borrowed:
            assert torch.equal(borrowed, tensor * 2)


def test_extents_contain_the_tensor(swapper: Make) -> None:
    for named in (False, True):
        mine = swapper(8 * 4096, named=named)
        tensor = torch.randn(5000)
        mine.put("a", tensor)
        found = b""
        for path, _fd, offset, nbytes in mine.extents("a"):
            with Path(path).open("rb") as file:
                file.seek(offset)
                found += file.read(nbytes)
        assert found == bits(tensor)


def test_damage_is_found(swapper: Make) -> None:
    mine = swapper(4 * 4096, checksums=True, named=True)
    mine.put("victim", torch.zeros(2000))
    ((path, _, offset, _),) = mine.extents("victim")
    mine.put("other", torch.zeros(4096))
    with Path(path).open("r+b") as file:
        file.seek(offset + 7000)
        file.write(b"!")
    with pytest.raises(CorruptFileError, match="victim") as caught, mine.borrow("victim"):
        pass
    assert (caught.value.filename, caught.value.offset) == (path, offset)


def test_a_disk_without_room(swapper: Make, tmp_path: Path) -> None:
    """The limit of file sizes simulates a full disk without root."""
    import resource
    import signal

    before, deaf = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    mine = swapper(4 * 4096)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 * 4096, before[1]))
        kept = [str(index) for index in range(6)]
        for key in kept:
            mine.put(key, torch.full((1024,), float(key)))
        with pytest.raises(deepnvme.Error) as caught:
            mine.put("more", torch.zeros(1024))
        assert caught.value.errno == errno.EFBIG
        assert "more" not in mine
        for key in kept:
            with mine.borrow(key) as borrowed:
                assert borrowed.eq(float(key)).all()
        mine.delete("3")
        mine.put("more", torch.ones(1024))
        with mine.borrow("more") as borrowed:
            assert borrowed.eq(1).all()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, deaf)


def test_a_named_file_goes_though_the_process_went_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swap").mkdir()
    monkeypatch.chdir(tmp_path)
    with deepnvme.Swapper("swap", memory="1MB", named=True) as swapper:
        swapper.put("a", torch.ones(10))
        assert len(list((tmp_path / "swap").iterdir())) == 1
        monkeypatch.chdir("/")
    assert not list((tmp_path / "swap").iterdir())
