"""``pinned_empty`` and ``as_bytes``."""

import gc
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme
from process_memory import PROCESS_MEMORY

torch = pytest.importorskip("torch")

RandomBytes = Callable[[int], bytes]

DTYPES = [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool, torch.uint64, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [1, 1000, (33, 5), [7, 0, 2], (), 0], ids=str)
def test_any_shape_and_dtype(dtype: Any, shape: Any) -> None:
    tensor = deepnvme.pinned_empty(shape, dtype)
    expected = torch.empty(shape, dtype=dtype)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == (expected.shape, dtype, "cpu")
    assert tensor.is_contiguous()
    assert not tensor.requires_grad
    if tensor.numel():
        assert tensor.data_ptr() % 4096 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not deepnvme.as_bytes(tensor).any(), "zero at first"


def test_it_is_a_tensor_of_its_own() -> None:
    tensor = deepnvme.pinned_empty((3, 4), torch.float32)
    assert tensor._base is None
    assert tensor.is_leaf
    torch.autograd.backward(tensor.requires_grad_().square().sum())
    assert tensor.grad is not None


def test_the_default_is_bytes() -> None:
    assert deepnvme.pinned_empty(5).dtype is torch.uint8
    assert deepnvme.pinned_empty(torch.Size([2, 3])).shape == (2, 3)


def test_impossible_shapes() -> None:
    with pytest.raises(ValueError, match="a size of shape is -"):
        deepnvme.pinned_empty((3, -1))
    with pytest.raises(TypeError):
        deepnvme.pinned_empty(1.5)  # type: ignore[arg-type]
    with pytest.raises(deepnvme.errors.OutOfMemoryError, match="ask for less") as caught:
        deepnvme.pinned_empty(1 << 60)
    assert caught.value.errno is not None


def test_other_threads_go_on_while_the_memory_is_made(python: Callable[..., Any]) -> None:
    # The kernel may need seconds to provide it.
    told = python("""
        import mmap, threading, time
        import torch
        import deepnvme

        longest, is_made = 0.0, False

        def map_memory():
            global longest
            while not is_made:
                began = time.monotonic()
                mmap.mmap(-1, 1 << 20).close()
                longest = max(longest, time.monotonic() - began)
                time.sleep(0.001)

        thread = threading.Thread(target=map_memory)
        thread.start()
        memory = deepnvme.pinned_empty(2 << 30, dtype=torch.uint8)
        is_made = True
        thread.join()
        print(longest)
    """)
    assert float(told.stdout) < 0.5


def test_the_memory_is_locked_and_freed_with_the_tensor(python: Callable[..., Any]) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < 1 << 20:
        pytest.skip(f"RLIMIT_MEMLOCK is {soft}")
    python(
        PROCESS_MEMORY
        + """
import gc, torch, deepnvme

assert memory_bytes("VmLck") == 0
tensor = deepnvme.pinned_empty(1 << 20)
assert memory_bytes("VmLck") == 1 << 20
view = tensor.view(torch.int64)[5:]
del tensor
gc.collect()
assert memory_bytes("VmLck") == 1 << 20, "a view keeps it"
assert view.sum() == 0
del view
gc.collect()
assert memory_bytes("VmLck") == 0
"""
    )


def test_a_thousand_of_them_leave_nothing() -> None:
    def mapped_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0])

    before = mapped_pages()
    for _ in range(1000):
        deepnvme.pinned_empty((1024, 1024), torch.uint8)
    assert mapped_pages() * resource.getpagesize() < (before * resource.getpagesize()) + (100 << 20)


def test_transfers_need_no_copy(tmp_path: Path) -> None:
    source = deepnvme.pinned_empty((1 << 20,), torch.float32)
    source.uniform_()
    with deepnvme.Engine() as engine:
        engine.write(source, tmp_path / "file")
        target = deepnvme.pinned_empty((1 << 20,), torch.float32)
        engine.read(target, tmp_path / "file")
        assert torch.equal(source, target)
        stats = engine.stats()
        if stats.buffered_reason is None:
            assert (stats.bytes_direct, stats.bytes_bounced) == (8 << 20, 0)


def test_it_lives_as_long_as_its_request(tmp_path: Path, slow_engine: deepnvme.Engine) -> None:
    tensor = deepnvme.pinned_empty(2 << 20)
    tensor[:] = torch.arange(2 << 20) % 251
    expected = bytes(tensor.numpy())
    pending = slow_engine.start_write(tensor, tmp_path / "file")
    del tensor
    gc.collect()
    assert pending.result() == 2 << 20
    assert (tmp_path / "file").read_bytes() == expected


ALL_DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits", "torch.bcomplex"))
    },
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_as_bytes_of_every_dtype(random_bytes: RandomBytes, dtype: Any) -> None:
    for shape in ((), (0,), (7,), (3, 5), (2, 0, 3)):
        tensor = torch.empty(shape, dtype=dtype)
        alias = deepnvme.as_bytes(tensor)
        assert (alias.dtype, alias.shape) == (torch.uint8, (tensor.nbytes,))
        if tensor.nbytes:
            assert alias.data_ptr() == tensor.data_ptr()
            data = torch.frombuffer(bytearray(random_bytes(tensor.nbytes)), dtype=torch.uint8)
            alias.copy_(data)
            assert torch.equal(deepnvme.as_bytes(tensor), data), "it is the same memory"


def test_as_bytes_keeps_the_memory_alive() -> None:
    alias = deepnvme.as_bytes(torch.full((1000, 1000), 3, dtype=torch.int16))
    gc.collect()
    assert np.array_equal(alias.numpy(), np.full((1000, 1000), 3, np.int16).view(np.uint8).reshape(-1))


def test_as_bytes_of_views_and_leaves() -> None:
    base = torch.randn(100, 10)
    rows = deepnvme.as_bytes(base[20:30])
    assert rows.data_ptr() == base.data_ptr() + 20 * 40
    leaf = torch.nn.Parameter(torch.randn(5))
    alias = deepnvme.as_bytes(leaf)
    assert not alias.requires_grad
    alias.zero_()
    assert not leaf.any()
    assert leaf.requires_grad
    assert deepnvme.as_bytes(torch.empty(3, 4, device="meta", dtype=torch.float32)).device.type == "meta"


@pytest.mark.filterwarnings("ignore")
def test_as_bytes_refuses_all_but_blocks_of_bytes() -> None:
    eye = torch.eye(4)
    for view in (torch.randn(3, 4).t(), torch.randn(10)[::2], torch.randn(1, 3).expand(2, 3)):
        with pytest.raises(ValueError, match=r"not contiguous.*tensor\.contiguous\(\)"):
            deepnvme.as_bytes(view)
    with pytest.raises(ValueError, match="resolve_conj"):
        deepnvme.as_bytes(torch.ones(3, dtype=torch.complex64).conj())
    for tensor in (eye.to_sparse(), eye.to_sparse_csr(), torch.nested.nested_tensor([eye, eye])):
        with pytest.raises(TypeError, match="not one block"):
            deepnvme.as_bytes(tensor)
    for thing in (np.zeros(3), b"bytes", None):
        with pytest.raises(TypeError, match="takes a torch tensor, not"):
            deepnvme.as_bytes(thing)  # type: ignore[arg-type]


def test_missing_torch_is_reported(python: Callable[..., Any]) -> None:
    python("""
        import sys
        sys.modules["torch"] = None
        import deepnvme, pytest
        for call in (lambda: deepnvme.pinned_empty(5), lambda: deepnvme.as_bytes(b"")):
            with pytest.raises(ImportError, match="pip install torch") as raised:
                call()
            assert raised.value.name == "torch"
    """)


def test_a_torch_that_cannot_be_imported_says_so_itself(python: Callable[..., Any]) -> None:
    python("""
    import sys
    import deepnvme, pytest

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("torch"):
                raise ImportError("libtorch.so: cannot open shared object file")

    sys.meta_path.insert(0, Broken())
    for call in (lambda: deepnvme.load("x.pt"), lambda: deepnvme.pinned_empty(4)):
        with pytest.raises(ImportError, match="libtorch.so"):
            call()
    """)
