"""Tensors come back as they were stored and changed, for any dtype, shape and device."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import deepnvme
from deepnvme.errors import ClosedError, InvalidArgumentError

from .bits import bits

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., deepnvme.Swapper]
    InThreads = Callable[[Callable[[int], object], int], None]

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip

# Elements of a tensor of two pages.
ITEM = 2048


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    whole = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    if dtype is torch.bool:
        whole %= 2
    return whole.view(dtype).view(shape)


def evict(swapper: deepnvme.Swapper) -> None:
    """Let other tensors take all memory."""
    for index in range(16):
        swapper.put(f"other {index}", torch.zeros(ITEM))
    assert swapper.stats().evictions > 0


def test_the_text_of_a_swapper_says_how_full_it_is(swapper: Make) -> None:
    made = swapper(memory="1MB")
    made.put("a", torch.ones(3))
    assert repr(made) == f"<deepnvme.Swapper, items=1, memory_bytes={made.stats().memory_bytes}>"


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
        # On disk, so that the ones put first leave memory first.
        mine.flush()
    mine.prefetch(["a", "b"])
    deadline = time.monotonic() + 60
    while (before := mine.stats()).reads < 2:
        assert time.monotonic() < deadline, before
    with mine.borrow("a"), mine.borrow("b"):
        pass
    assert mine.stats().hits == before.hits + 2
    with pytest.raises(KeyError, match="nowhere"):
        mine.prefetch(["a", "nowhere"])


def test_threads(swapper: Make, in_threads: InThreads) -> None:
    mine = swapper(6 * 4096)
    keys = [str(index) for index in range(10)]
    for key in keys:
        mine.put(key, torch.zeros(1000, dtype=torch.int64)[:500])

    def work(seed: int) -> None:
        generator = random.Random(seed)
        for turn in range(150):
            key = generator.choice(keys)
            if turn % 7 == 0:
                mine.put(f"{seed}-{turn % 2}", torch.full((generator.randrange(900),), seed))
            with mine.borrow(key) as borrowed:
                borrowed.add_(1)

    in_threads(work, 4)
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
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        deepnvme.Swapper(tmp_path / "file" / "below", memory="1MB")
    assert caught.value.filename == str(tmp_path / "file" / "below")
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(mine)


def test_memory_that_is_not_pinned_says_why(tmp_path: Path) -> None:
    code = (
        "import resource, sys, deepnvme\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))\n"
        "with deepnvme.Swapper(sys.argv[1], memory='8MB') as swapper:\n"
        "    print(swapper.pinning_error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True)
    # A process with CAP_IPC_LOCK has no limit.
    assert done.stdout == "None\n" or "RLIMIT_MEMLOCK is 4096 bytes" in done.stdout


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


def test_closed(swapper: Make, tmp_path: Path) -> None:
    mine = swapper()
    mine.put("a", torch.ones(4))
    mine.flush()
    written = mine.stats().bytes_written
    with mine.borrow("a") as borrowed:
        mine.close()
        assert borrowed.eq(1).all()
    (tmp_path / "file").write_bytes(b"1")
    with (tmp_path / "file").open("r+b") as file:
        calls: list[Callable[[], object]] = [
            lambda: mine.put("b", torch.ones(1)),
            lambda: mine.create("b", (1,), torch.float32).__enter__(),
            lambda: mine.borrow("a").__enter__(),
            *(lambda: mine.read("a", 0, torch.empty(1)), lambda: mine.write("a", 0, torch.ones(1))),
            *(lambda: mine.prefetch([]), lambda: mine.prefetch(["a"])),
            *(lambda: mine.schedule([]), lambda: mine.schedule(["a"])),
            *(lambda: mine.delete("a"), mine.flush, lambda: mine.flush([])),
            *(lambda: mine.extents("a"), lambda: mine.attach("b", tmp_path / "file", 0, 1)),
            *(lambda: mine.export("a", file.fileno()), lambda: mine.import_("b", file.fileno(), 0, 1)),
            *(mine.keys, lambda: len(mine), lambda: "a" in mine, lambda: bool(mine), mine.__enter__),
        ]
        for index, call in enumerate(calls):
            with pytest.raises(ClosedError, match="the swapper is closed"):
                pytest.fail(f"call {index} returned {call()!r}")
    assert repr(mine).endswith(", closed>")
    assert mine.is_closed
    assert mine.stats().bytes_written >= written > 0
    mine.close()


@pytest.mark.parametrize(
    "change", [lambda t: t.add_(1), lambda t: t[1:].zero_(), lambda t: t.view(torch.int32).fill_(3)]
)
def test_a_change_in_a_shared_block_raises_at_its_end(swapper: Make, change: Callable[[torch.Tensor], object]) -> None:
    mine = swapper()
    mine.put("a", torch.ones(100))
    with pytest.raises(InvalidArgumentError, match='"a" was changed while it was borrowed with shared=True'):  # noqa: SIM117
        with mine.borrow("a", shared=True) as tensor, torch.no_grad():
            change(tensor)
    # The item is returned: a block of its own may change it.
    with mine.borrow("a") as tensor:
        tensor.fill_(2)
    with mine.borrow("a", shared=True) as tensor, torch.inference_mode():
        assert tensor.sum() == 200
    # The block's own error comes first.
    with pytest.raises(ZeroDivisionError), mine.borrow("a", shared=True) as tensor:
        tensor.fill_(3)
        _ = 1 / 0
    with mine.borrow("a", shared=True) as tensor:
        assert tensor.eq(3).all()


@pytest.mark.parametrize("state", ["new", "written", "on disk"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_change_in_a_shared_block_is_kept(swapper: Make, state: str, fails: bool) -> None:
    mine = swapper()
    mine.put("a", torch.ones(ITEM))
    if state != "new":
        mine.flush()
    if state == "on disk":
        evict(mine)
    with pytest.raises(ZeroDivisionError if fails else InvalidArgumentError, match=r"division|the change is kept"):  # noqa: SIM117
        with mine.borrow("a", shared=True) as tensor:
            tensor.add_(1)
            _ = 1 // (not fails)
    evict(mine)
    with mine.borrow("a", shared=True) as tensor:
        assert tensor.eq(2).all()


def test_a_change_of_an_attached_tensor_never_reaches_its_file(swapper: Make, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    deepnvme.write(torch.ones(ITEM), path)
    mine = swapper()
    mine.attach("a", path, 0, 4 * ITEM, dtype=torch.float32, shape=(ITEM,))
    with pytest.raises(InvalidArgumentError, match=r"the change is lost when .* put a copy under another key"):  # noqa: SIM117
        with mine.borrow("a", shared=True) as tensor:
            tensor.add_(1)
    evict(mine)
    with mine.borrow("a", shared=True) as tensor:
        assert tensor.eq(1).all()
    assert path.read_bytes() == torch.ones(ITEM).numpy().tobytes()
