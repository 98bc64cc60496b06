"""Torch tensors as memory: every dtype, layout and kind."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

torch = pytest.importorskip("torch")

RandomBytes = Callable[[int], bytes]

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tensor"


@pytest.fixture
def values(random_bytes: RandomBytes) -> Callable[..., Any]:
    """Return a function that makes a contiguous tensor of random bits."""

    def make(shape: tuple[int, ...], dtype: Any = torch.float32) -> Any:
        count = torch.empty(shape, dtype=dtype, device="meta").nbytes
        bits = torch.frombuffer(bytearray(random_bytes(count) or b"\0"), dtype=torch.uint8)[:count]
        if dtype is torch.bool:
            bits = bits & 1
        return bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)

    return make


def bits_of(tensor: Any) -> bytes:
    """Return the elements in row-major order, as bytes."""
    return bytes(tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (1000,), (33, 5, 17), (3, 0, 2)], ids=str)
def test_every_dtype_and_shape(values: Callable[..., Any], path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = values(shape, dtype)
    assert deepnvme.write(tensor, path) == tensor.nbytes
    assert path.read_bytes() == bits_of(tensor)
    target = torch.zeros(shape, dtype=torch.uint8).to(dtype)
    assert deepnvme.read(target, path) == tensor.nbytes
    assert bits_of(target) == bits_of(tensor)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transpose": lambda tensor: tensor.t(),
    "every second column": lambda tensor: tensor[:, ::2],
    "every third row": lambda tensor: tensor[::3],
    "a column": lambda tensor: tensor[:, 3],
    "an inner block": lambda tensor: tensor[5:50, 7:20],
    "three dimensions": lambda tensor: tensor.reshape(4, 25, 60).permute(2, 0, 1),
    "the diagonal": lambda tensor: tensor.diagonal(),
    "an unaligned slice": lambda tensor: tensor.reshape(-1)[1:5000],
    "one element": lambda tensor: tensor[3, 4],
    "nothing": lambda tensor: tensor[:, 5:5],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128], ids=str)
def test_strided_views(engine: deepnvme.Engine, values: Callable[..., Any], path: Path, view: str, dtype: Any) -> None:
    whole = values((100, 60), dtype)
    part = VIEWS[view](whole)
    assert engine.write(part, path) == part.nbytes
    assert path.read_bytes() == bits_of(part), "the file holds what contiguous() would"
    other = values((100, 60), dtype)
    expected = other.clone()
    VIEWS[view](expected).copy_(part)
    assert engine.read(VIEWS[view](other), path) == part.nbytes
    assert bits_of(other) == bits_of(expected), "only the view's elements change"


def test_a_large_strided_tensor_needs_no_staging_copy(values: Callable[..., Any], path: Path) -> None:
    whole = values((2048, 2048))
    with deepnvme.Engine(workers=2, queue_depth=4, block_bytes=65536) as engine:
        engine.write(whole.t(), path, offset=13)
        target = torch.zeros(2048, 2048)
        engine.read(target.t(), path, offset=13)
        assert torch.equal(target.view(torch.int32), whole.view(torch.int32))
        assert engine.stats().pool_bytes <= engine.pool_bytes < whole.nbytes // 8


def test_expanded_tensors_are_written_but_not_read_into(values: Callable[..., Any], path: Path) -> None:
    tensor = values((1, 500))
    for shared in (tensor.expand(20, 500), tensor.reshape(-1).unfold(0, 10, 1)):
        deepnvme.write(shared, path)
        assert path.read_bytes() == bits_of(shared)
        with pytest.raises(ValueError, match=r"share their memory .* tensor\.contiguous\(\)"):
            deepnvme.read(shared, path)
    deepnvme.read(tensor.expand(1, 500), path)


def test_lazy_conjugates_are_resolved_for_writes_and_refused_for_reads(values: Callable[..., Any], path: Path) -> None:
    tensor = torch.randn(300, dtype=torch.complex64)
    for lazy, message in ((tensor.conj(), "conjugate"), (tensor.conj().imag, "negative")):
        assert lazy.is_conj() or lazy.is_neg()
        deepnvme.write(lazy, path)
        assert path.read_bytes() == bits_of(lazy.resolve_conj().resolve_neg())
        with pytest.raises(ValueError, match=f"lazy {message} view"):
            deepnvme.read(lazy, path)


def refused() -> dict[str, tuple[Callable[[], Any], type[Exception], str]]:
    eye = torch.eye(4)
    return {
        "sparse": (eye.to_sparse, TypeError, r"layout torch.sparse_coo.*to_dense\(\)"),
        "csr": (eye.to_sparse_csr, TypeError, r"layout torch.sparse_csr.*to_dense\(\)"),
        "mkldnn": (eye.to_mkldnn, TypeError, r"layout torch._mkldnn.*to_dense\(\)"),
        "meta": (lambda: eye.to("meta"), TypeError, "meta device.*torch.empty_like"),
        "nested": (lambda: torch.nested.nested_tensor([eye, eye]), TypeError, r"nested.*unbind\(\)"),
        "jagged": (
            lambda: torch.nested.nested_tensor([eye, eye], layout=torch.jagged),
            TypeError,
            r"nested.*unbind\(\)",
        ),
        "quantised": (
            lambda: torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8),
            TypeError,
            r"quantised.*int_repr\(\)",
        ),
        "zero": (lambda: torch._efficientzerotensor(3), ValueError, "no memory of its own"),
        "functional": (lambda: torch._to_functional_tensor(eye), ValueError, "no memory of its own"),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", refused())
def test_tensors_without_a_block_of_host_memory_are_refused_by_name(path: Path, kind: str) -> None:
    make, error, message = refused()[kind]
    tensor = make()
    with pytest.raises(error, match=message):
        deepnvme.write(tensor, path)
    with pytest.raises(error, match=message):
        deepnvme.read(tensor, path)
    assert not path.exists()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fake_tensors_and_those_inside_vmap_are_refused(path: Path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    with pytest.raises(ValueError, match=r"FakeTensor has no memory of its own"):
        deepnvme.write(fake, path)

    def write(row: Any) -> Any:
        with pytest.raises(ValueError, match="no memory of its own"):
            deepnvme.write(row, path)
        return row

    torch.vmap(write)(torch.ones(3, 2))


class _Elsewhere(torch.Tensor):  # type: ignore[misc, name-defined]
    """A tensor that says it is on a GPU, for machines that have none."""

    is_cpu = False
    device = torch.device("xpu:1")


def test_a_tensor_on_another_accelerator_is_refused_with_the_remedy(path: Path) -> None:
    tensor: Any = torch.ones(3).as_subclass(_Elsewhere)
    for call in (deepnvme.write, deepnvme.read, deepnvme.start_write):
        with pytest.raises(TypeError, match=r"is on xpu:1, and .* CUDA devices; write tensor\.cpu\(\)"):
            call(tensor, path)
    assert not path.exists()


def test_parameters_and_subclasses(values: Callable[..., Any], path: Path) -> None:
    class Labelled(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    leaf = torch.nn.Parameter(torch.zeros(50, 20))
    expected = values((50, 20))
    deepnvme.write(expected.as_subclass(Labelled), path)
    deepnvme.read(leaf, path)
    assert bits_of(leaf) == bits_of(expected)
    assert leaf.requires_grad
    assert leaf.is_leaf
    layer = torch.nn.Linear(20, 50)
    deepnvme.read(layer.weight, path)
    assert bits_of(layer.weight) == bits_of(expected)


def test_shared_and_mapped_memory(values: Callable[..., Any], path: Path, tmp_path: Path) -> None:
    expected = values((10_000,))
    deepnvme.write(expected, path)
    shared = torch.zeros(10_000).share_memory_()
    mapped = torch.from_file(str(tmp_path / "mapped"), shared=True, size=10_000)
    for target in (shared, mapped):
        deepnvme.read(target, path)
        assert bits_of(target) == bits_of(expected)


def test_the_storage_outlives_the_tensor(slow_engine: deepnvme.Engine, values: Callable[..., Any], path: Path) -> None:
    tensor = values((1 << 20,))
    expected = bits_of(tensor)
    pending = slow_engine.start_write(tensor, path)
    gone = weakref.ref(tensor)
    tensor.data = torch.empty(0)
    del tensor
    assert gone() is None, "the tensor object itself is not held"
    rivals = [torch.full((1 << 20,), 1.0) for _ in range(4)]
    assert pending.result() == 4 << 20
    assert path.read_bytes() == expected, "the bytes are those of the storage at the time of the call"
    assert rivals


def test_torch_is_not_imported_for_others(python: Callable[..., Any]) -> None:
    python("""
        import sys
        import deepnvme
        assert not {"torch", "numpy"} & set(sys.modules), "importing is cheap"
        deepnvme.write(b"12345", "file")
        target = bytearray(5)
        deepnvme.read(target, "file")
        assert target == b"12345"
        assert not {"torch", "numpy", "asyncio"} & set(sys.modules)
        import torch
        deepnvme.write(torch.arange(3), "file")
    """)


def test_a_read_into_a_slice_leaves_its_neighbours_alone(values: Callable[..., Any], path: Path) -> None:
    """A tensor may start at any address. Direct I/O needs aligned memory, so its edges take another path."""
    buffer = torch.frombuffer(bytearray(os.urandom(100_000)), dtype=torch.uint8)
    for start, stop in ((1, 99_999), (511, 40_000), (64, 4160)):
        before = buffer.clone()
        payload = values((stop - start,), torch.uint8)
        deepnvme.write(payload, path)
        deepnvme.read(buffer[start:stop], path)
        before[start:stop] = payload
        assert torch.equal(buffer, before)


@pytest.mark.parametrize("kind", ["plain", "parameter", "subclass", "first dimension of one", "empty", "number"])
def test_tensors_on_the_fast_and_on_the_full_path_are_read_and_written_alike(kind: str, path: Path) -> None:
    values = torch.randn(7, 30)
    tensor = {
        "plain": lambda: values,
        "parameter": lambda: torch.nn.Parameter(values),
        "subclass": lambda: values.as_subclass(type("Mine", (torch.Tensor,), {})),
        "first dimension of one": lambda: values[2:3, 5:20],
        "empty": lambda: values[3:3],
        "number": lambda: values[3, 4],
    }[kind]()
    assert deepnvme.write(tensor, path) == tensor.nbytes
    assert path.read_bytes() == bits_of(tensor.detach())
    target = torch.zeros_like(tensor.detach())
    assert deepnvme.read(target, path) == tensor.nbytes
    assert torch.equal(target, tensor)


def test_autograd_notices_that_a_tensor_was_read_into(values: Callable[..., Any], path: Path) -> None:
    deepnvme.write(values((64,)), path)
    reads: dict[str, Callable[[Any], object]] = {
        "read": lambda tensor: deepnvme.read(tensor, path),
        "start_read": lambda tensor: deepnvme.start_read(tensor, path).result(),
        "read_batch": lambda tensor: deepnvme.read_batch([(path, 0, tensor), (path, 0, bytearray(8))]),
        "readinto": lambda tensor: deepnvme.open(path).readinto(tensor),
    }
    for name, read in reads.items():
        x, weight = torch.ones(64), torch.nn.Parameter(torch.ones(64))
        loss = (x * weight).sum()
        before = x._version
        read(x)
        assert x._version > before, name
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


#: Calls that access a tensor, given the tensor and a folder.
CALLS: dict[str, Callable[[Any, Path], object]] = {
    "read": lambda tensor, folder: deepnvme.read(tensor, folder / "file"),
    "write": lambda tensor, folder: deepnvme.write(tensor, folder / "other"),
    "save": lambda tensor, folder: deepnvme.save({"a": tensor}, folder / "other.pt"),
    "save safetensors": lambda tensor, folder: deepnvme.save({"a": tensor}, folder / "other.safetensors"),
    "load": lambda tensor, folder: deepnvme.load(folder / "state.pt", into={"a": tensor}),
    "put": lambda tensor, folder: deepnvme.Swapper(folder, memory="8MB").put("a", tensor),
}


@pytest.mark.parametrize("storage_bytes", [4, 1200, 1_199_500])
@pytest.mark.parametrize("call", CALLS)
def test_a_storage_that_is_smaller_than_its_tensor_is_refused(tmp_path: Path, call: str, storage_bytes: int) -> None:
    (tmp_path / "file").write_bytes(bytes(1_200_000))
    deepnvme.save({"a": torch.randn(300_000)}, tmp_path / "state.pt")
    whole = torch.zeros(300_000)
    for tensor in (whole, torch.zeros(600, 500)[:, :400]):
        tensor.untyped_storage().resize_(storage_bytes)
        if call == "load" and tensor is not whole:
            continue  # The file has a tensor of another shape.
        with pytest.raises(ValueError, match="storage"):
            CALLS[call](tensor, tmp_path)
