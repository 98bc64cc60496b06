"""Tensors come back as they were stored and changed, for any dtype, shape and device."""

from __future__ import annotations

import copy
import errno
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme
from deepnvme.errors import ClosedError, CorruptFileError

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., deepnvme.Swapper]

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(deepnvme.as_bytes(tensor.detach().contiguous()).numpy())


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    whole = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        whole %= 2
    return whole.view(dtype).view(shape)


@pytest.mark.parametrize("checksums", [False, True])
def test_all_dtypes_and_shapes_come_back(swapper: Make, checksums: bool) -> None:
    mine = swapper(checksums=checksums)
    kept = {}
    for dtype in DTYPES:
        for shape in [(), (0,), (7,), (33, 5), (3, 1, 4, 2)]:
            key = f"{dtype}{shape}"
            kept[key] = make(dtype, *shape)
            mine.put(key, kept[key])
    assert len(mine) == len(kept)
    assert set(mine.keys()) == set(kept)
    for key, tensor in kept.items():
        with mine.borrow(key, shared=True) as borrowed:
            assert borrowed.dtype is tensor.dtype
            assert borrowed.shape == tensor.shape
            assert bits(borrowed) == bits(tensor)
    stats = mine.stats()
    assert stats.evictions > 0
    assert stats.resident_bytes_peak <= stats.memory_bytes == 16 * 4096
    assert 0 < stats.hit_rate <= 1


def test_strided_lazy_and_wanted_by_autograd(swapper: Make) -> None:
    mine = swapper("1MB")
    base = torch.randn(40, 30, dtype=torch.complex64)
    for key, tensor in {
        "transposed": base.t(),
        "every third": base[::3, 1::2],
        "conjugate": base.conj(),
        "imaginary": base.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "expanded": torch.randn(1, 4).expand(3, 4),
    }.items():
        mine.put(key, tensor)
        with mine.borrow(key) as borrowed:
            assert torch.equal(borrowed, tensor)
            assert not borrowed.requires_grad
            assert borrowed.is_contiguous()


def test_changes_are_kept_and_clean_tensors_are_not_written(swapper: Make) -> None:
    mine = swapper(4 * 4096)
    for key in "abcdefgh":
        mine.put(key, torch.zeros(1024))
    for _ in range(3):
        for key in "abcdefgh":
            with mine.borrow(key) as borrowed:
                borrowed.add_(1)
    mine.flush()
    written = mine.stats().bytes_written
    for key in "abcdefgh":
        with mine.borrow(key, shared=True) as borrowed:
            assert borrowed.eq(3).all()
        borrow = mine.borrow(key)
        with borrow:
            borrow.mark_clean()
    mine.flush()
    assert mine.stats().bytes_written == written
    with pytest.raises(ValueError, match="with block"):
        borrow.mark_clean()


def test_lent_tensors_do_not_share_version_counters(swapper: Make) -> None:
    mine = swapper()
    mine.put("weight", torch.ones(4))
    mine.put("moment", torch.ones(4))
    with mine.borrow("weight", shared=True) as weight, mine.borrow("moment") as moment:
        total = (torch.ones(4, requires_grad=True) * weight).square().sum()
        moment.add_(1)
        total.backward()  # type: ignore[no-untyped-call]


def test_types_that_torch_does_not_copy(swapper: Make) -> None:
    one = swapper()
    for dtype in (getattr(torch, name) for name in ("int4", "uint1", "uint7")):
        source = torch.arange(5, dtype=torch.uint8).view(dtype)
        one.put("few bits", source)
        with one.borrow("few bits") as borrowed:
            assert borrowed.dtype == dtype
            assert borrowed.view(torch.uint8).equal(source.view(torch.uint8))


def test_a_key_takes_tensors_of_other_sizes(swapper: Make) -> None:
    mine = swapper()
    generator = random.Random(5)
    last: dict[str, torch.Tensor] = {}
    peak = 0
    for _ in range(300):
        key = generator.choice("abcdef")
        if key in last and generator.random() < 0.3:
            mine.delete(key)
            del last[key]
            assert key not in mine
            continue
        last[key] = make(torch.float32, generator.randrange(9000))
        mine.put(key, last[key])
        peak = max(peak, sum(-(-tensor.nbytes // 4096) * 4096 for tensor in last.values()))
    for key, tensor in last.items():
        with mine.borrow(key) as borrowed:
            assert torch.equal(borrowed.view(torch.int32), tensor.view(torch.int32))
    # Reserved beyond the last byte, and wasted by changing sizes.
    assert mine.stats().file_bytes <= (peak + 9000 * 4 + 4096) * 1.25 * 1.125 + 4096


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


def test_an_order_is_read_ahead(swapper: Make) -> None:
    mine = swapper(8 * 4096)
    keys = [str(index) for index in range(20)]
    for key in keys:
        mine.put(key, torch.full((1024,), float(key)))
    mine.schedule(keys)
    for _ in range(4):
        for key in keys:
            with mine.borrow(key) as borrowed:
                assert borrowed[0] == float(key)
    stats = mine.stats()
    assert stats.reads < 80 + 20
    assert stats.resident_bytes_peak <= stats.memory_bytes
    mine.schedule([])
    mine.schedule(["not there yet", "3"], repeat=False)
    with mine.borrow("3", shared=True) as borrowed:
        assert borrowed[0] == 3


def test_prefetched_is_a_hit(swapper: Make) -> None:
    mine = swapper(4 * 4096)
    for key in "abcdef":
        mine.put(key, torch.zeros(1024))
    mine.prefetch(["a", "b"])
    while True:
        before = mine.stats()
        if before.reads >= 2:
            break
    with mine.borrow("a"), mine.borrow("b"):
        pass
    assert mine.stats().hits == before.hits + 2
    with pytest.raises(KeyError, match="nowhere"):
        mine.prefetch(["a", "nowhere"])


def test_threads(swapper: Make) -> None:
    mine = swapper(6 * 4096)
    keys = [str(index) for index in range(10)]
    for key in keys:
        mine.put(key, torch.zeros(1000, dtype=torch.int64)[:500])
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        generator = random.Random(seed)
        try:
            for turn in range(150):
                key = generator.choice(keys)
                if turn % 7 == 0:
                    mine.put(f"{seed}-{turn % 2}", torch.full((generator.randrange(900),), seed))
                with mine.borrow(key) as borrowed:
                    borrowed.add_(1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    total = 0
    for key in keys:
        with mine.borrow(key, shared=True) as borrowed:
            assert borrowed.eq(borrowed[0]).all()
            total += int(borrowed[0])
    assert total == 600
    assert mine.stats().resident_bytes_peak <= 6 * 4096


def test_a_thread_that_holds_too_much_gets_an_error(swapper: Make) -> None:
    mine = swapper(2 * 4096)
    for key in "abc":
        mine.put(key, torch.zeros(1024))
    with mine.borrow("a"), mine.borrow("b", shared=True):
        with pytest.raises(RuntimeError, match="2 items are borrowed, 2 of them by this thread"), mine.borrow("c"):
            pass
        with pytest.raises(RuntimeError, match="return it first"), mine.borrow("a", shared=True):
            pass
        with pytest.raises(RuntimeError):
            mine.put("a", torch.zeros(1024))
        with mine.borrow("b", shared=True):
            pass
    with mine.borrow("c"):
        pass


def test_errors_teach(swapper: Make, tmp_path: Path) -> None:
    mine = swapper(4 * 4096)
    with pytest.raises(MemoryError, match="use memory=20480 or more"):
        mine.put("large", torch.zeros(5 * 1024))
    with pytest.raises(KeyError, match="put it first, or attach it"), mine.borrow("nowhere"):
        pass
    for call in (mine.delete, mine.extents):
        with pytest.raises(KeyError):
            call("nowhere")
    with pytest.raises(TypeError, match="torch tensor"):
        mine.put("array", [1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="to_dense"):
        mine.put("sparse", torch.zeros(3).to_sparse())
    with pytest.raises(ValueError, match="memory"):
        deepnvme.Swapper(tmp_path, memory="lots")
    with pytest.raises(ValueError, match="at least"):
        deepnvme.Swapper(tmp_path, memory=1)
    with pytest.raises(FileNotFoundError) as caught:
        deepnvme.Swapper(tmp_path / "nowhere", memory="1MB")
    assert caught.value.filename == str(tmp_path / "nowhere")
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(mine)


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
        with pytest.raises(deepnvme.EndOfFileError):
            mine.import_("beyond", file.fileno(), offset, 30_000)
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


def test_gradients_are_put_accumulated_and_consumed(swapper: Make) -> None:
    """Three typical policies, each in a few lines."""
    mine = swapper(6 * 4096)
    names = [f"layer.{index}" for index in range(8)]
    for name in names:
        mine.put(f"{name}.moment", torch.zeros(1024))
    mine.schedule([f"{name}.moment" for name in names])
    for _step in range(2):
        for micro in range(3):
            for name in reversed(names):
                if micro == 0:
                    mine.put(f"{name}.grad", torch.ones(1024))
                else:
                    with mine.borrow(f"{name}.grad") as grad:
                        grad.add_(1)
        for name in names:
            with mine.borrow(f"{name}.grad", shared=True) as grad, mine.borrow(f"{name}.moment") as moment:
                moment.add_(grad)
            mine.delete(f"{name}.grad")
    assert len(mine) == 8
    for name in names:
        with mine.borrow(f"{name}.moment") as moment:
            assert moment.eq(6).all()


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "swapping.md"
    if not page.exists():
        pytest.skip("the page is not there: the tests run without the tree around them")
    code = page.read_text().split("```python")[1].split("```")[0]
    model = torch.nn.Linear(4, 3)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    names: dict[str, object] = {"model": model, "steps": 2}
    exec(code.replace("/mnt/nvme", str(tmp_path)).replace("8GB", "8MB"), names)
    for old, parameter in zip(before, model.parameters(), strict=True):
        assert torch.allclose(parameter, old - 0.01 * (1 + 1.9))
    swapper = names["swapper"]
    assert isinstance(swapper, deepnvme.Swapper)
    swapper.close()


def test_closed(swapper: Make) -> None:
    mine = swapper()
    mine.put("a", torch.ones(4))
    with mine.borrow("a") as borrowed:
        mine.close()
        assert borrowed.eq(1).all()
    for call in (lambda: mine.put("b", torch.ones(1)), lambda: mine.borrow("a").__enter__(), mine.flush):
        with pytest.raises(ClosedError):
            call()
    mine.close()


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


def test_a_shape_with_a_negative_dimension_is_refused_and_nothing_is_there(swapper: Make) -> None:
    mine = swapper()
    with pytest.raises(ValueError, match="a dimension of 'a' is -1"), mine.create("a", (-1, -4), torch.float32):
        pass
    # The borrower is told at once.
    with pytest.raises(KeyError), mine.borrow("a"):
        pass
    assert mine.keys() == []


def test_a_create_that_raises_leaves_nothing(swapper: Make) -> None:
    mine = swapper()
    for shape in [(5,), (9,)]:
        mine.put("a", torch.ones(5))
        with pytest.raises(ZeroDivisionError), mine.create("a", shape, torch.float32) as held:
            held.fill_(1 / 0)
        with pytest.raises(KeyError), mine.borrow("a"):
            pass
    with pytest.raises(RuntimeError, match="size"), mine.create("a", (5,), torch.float32) as held:
        held.copy_(torch.ones(6))
    assert "a" not in mine


# If a generator is discarded, Python swallows the interrupt and reports it. Nothing was interrupted then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", ["put", "attach", "import_", "create"])
def test_a_put_that_is_interrupted_anywhere_is_all_there_or_not_at_all(
    swapper: Make, tmp_path: Path, verb: str, interrupted: Any
) -> None:
    mine = swapper("1MB")
    new, data = torch.arange(300.0), tmp_path / "data"
    data.write_bytes(bits(new))

    def act() -> None:
        if verb == "put":
            mine.put("a", new)
        elif verb == "attach":
            mine.attach("a", data, 0, 1200, dtype=torch.float32)
        elif verb == "import_":
            with data.open("rb") as file:
                mine.import_("a", file.fileno(), 0, 1200, dtype=torch.float32)
        else:
            with mine.create("a", (300,), torch.float32) as held:
                held.copy_(new)

    with interrupted() as points:
        act()
    for point in range(1, points.count + 1):
        mine.put("a", torch.zeros(3, 3, dtype=torch.int64))
        try:
            with interrupted(point):
                act()
        except KeyboardInterrupt:
            pass
        if "a" in mine:
            with mine.borrow("a", shared=True) as borrowed:
                assert torch.equal(
                    borrowed, new if borrowed.dtype is torch.float32 else torch.zeros(3, 3, dtype=torch.int64)
                )
        else:
            with pytest.raises(KeyError), mine.borrow("a"):
                pass
        act()
        with mine.borrow("a", shared=True) as borrowed:
            assert torch.equal(borrowed, new)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lend_that_is_interrupted_anywhere_is_returned(swapper: Make, interrupted: Any) -> None:
    mine = swapper("1MB")
    mine.put("a", torch.ones(300))

    def act() -> None:
        with mine.borrow("a") as borrowed:
            borrowed.add_(0)

    with interrupted() as points:
        act()
    for point in range(1, points.count + 1):
        try:
            with interrupted(point):
                act()
        except KeyboardInterrupt:
            pass
        with mine.borrow("a") as borrowed:
            assert torch.equal(borrowed, torch.ones(300))


def test_a_named_file_goes_though_the_process_went_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swap").mkdir()
    monkeypatch.chdir(tmp_path)
    with deepnvme.Swapper("swap", memory="1MB", named=True) as swapper:
        swapper.put("a", torch.ones(10))
        assert len(list((tmp_path / "swap").iterdir())) == 1
        monkeypatch.chdir("/")
    assert not list((tmp_path / "swap").iterdir())
