"""DeepSpeed's `FastFileWriter` and related classes on our engine."""

from __future__ import annotations

import gc
import importlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

import deepnvme
from deepnvme.deepspeed import aio_handle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

MIB = 1 << 20


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(5)
    weights = {f"layer{index}": torch.randn(300 + index, 257) for index in range(6)}
    odd = {"half": torch.randn(1001).half(), "flag": torch.tensor(True), "none": torch.zeros(0, 3), "step": 17}
    return {**weights, **odd, "view": weights["layer0"][3:, 5:]}


@pytest.fixture(params=[(1, True), (1, False), (3, True)], ids=["double", "single", "parallel"])
def make_writer(on_our_engine: Any, request: pytest.FixtureRequest) -> Callable[[Path], Any]:
    assert on_our_engine
    io = importlib.import_module("deepspeed.io")
    parallelism, double = request.param
    handle = aio_handle(intra_op_parallelism=parallelism)

    def make(path: Path) -> Any:
        # 192 KiB, so that every file uses it several times.
        pinned = handle.new_cpu_locked_tensor(3 * 64 << 10, torch.empty(0, dtype=torch.uint8))
        config = io.FastFileWriterConfig(dnvme_handle=handle, pinned_tensor=pinned, double_buffer=double)
        return io.FastFileWriter(file_path=str(path), config=config)

    return make


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        for key, value in left.items()
    )


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_save_and_load(tmp_path: Path, make_writer: Callable[[Path], Any], state: dict[str, Any], zipped: bool) -> None:
    path = tmp_path / "state.pt"
    writer = make_writer(path)
    torch.save(state, writer, _use_new_zipfile_serialization=zipped)
    writer.close()
    assert writer._stats["aio_bytes"] > 0
    assert same(torch.load(path), state)
    writer._dump_state()
    del writer
    gc.collect()


@pytest.mark.parametrize("size_bytes", [1, 511, 512, 192 << 10, (192 << 10) + 1, MIB + 1000])
def test_bytes(
    tmp_path: Path, make_writer: Callable[[Path], Any], random_bytes: Callable[[int], torch.Tensor], size_bytes: int
) -> None:
    content = random_bytes(size_bytes).numpy().tobytes()
    writer = make_writer(tmp_path / "file")
    assert writer.write(content) == size_bytes
    writer.close()
    assert (tmp_path / "file").read_bytes() == content


def test_storages_with_their_sizes(tmp_path: Path, make_writer: Callable[[Path], Any]) -> None:
    tensors = [torch.randn(100_000), torch.arange(77, dtype=torch.int16), torch.zeros(1, dtype=torch.uint8)]
    storages = [(tensor.untyped_storage(), tensor.dtype) for tensor in tensors]
    expected = b"".join(tensor.numel().to_bytes(8, "little") + tensor.numpy().tobytes() for tensor in tensors)
    writer = make_writer(tmp_path / "file")
    # Only the byte tensors made from the sizes keep those alive.
    assert writer.save_torch_storage_object_list(storages, True) == len(expected)
    writer.close()
    assert (tmp_path / "file").read_bytes() == expected


def test_a_checkpoint_that_does_not_fit_is_no_success(
    tmp_path: Path, make_writer: Callable[[Path], Any], file_size_limit: int
) -> None:
    writer = make_writer(tmp_path / "file")
    with pytest.raises(deepnvme.Error, match="file"):
        writer.write(bytes(2 * file_size_limit))
    # The writer cannot be cancelled, and asserts on deletion that it has written everything.
    writer._io_buffer.reset()
    writer._io_buffer._drain_index = -1
    writer._stats["bytes"] = writer._file_offset
    writer.close()


@pytest.fixture
def native_pinning(on_our_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DeepSpeed's own locked memory, from the op `pin_memory`."""
    assert on_our_engine
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    module = importlib.import_module("deepspeed.utils.pin_memory")
    monkeypatch.setattr(module, "_shared_native_pins", None)
    yield module.get_native_pinned_memory()
    gc.collect()


def test_native_pinned_memory(native_pinning: Any) -> None:
    source = torch.randn(100, 30)
    pinned = native_pinning.pin(source)
    assert torch.equal(pinned, source)
    assert native_pinning.is_pinned(pinned[3:])
    assert aio_handle().is_pinned(pinned)
    view = pinned[50:]
    del pinned
    gc.collect()
    assert aio_handle().is_pinned(view)
    assert torch.equal(view, source[50:])
    assert native_pinning.unpin(native_pinning.pin_empty(source, (10, 10))) is True


def test_checkpoint_writer_factory_without_cuda(native_pinning: Any, tmp_path: Path, state: dict[str, Any]) -> None:
    assert native_pinning
    factory_module = importlib.import_module("deepspeed.runtime.model_checkpointing.writer_factory")
    constants = importlib.import_module("deepspeed.runtime.model_checkpointing.constants")
    aio_config = importlib.import_module("deepspeed.runtime.swap_tensor.aio_config").AIO_DEFAULT_DICT
    writer_config = {
        constants.CHECKPOINT_WRITER_TYPE: constants.CheckpointWriterType.FAST,
        constants.CHECKPOINT_IO_BUFFER_SIZE: MIB,
        constants.CHECKPOINT_IO_BUFFER_DOUBLE: True,
        constants.CHECKPOINT_IO_MULTIPLIER: 1,
        constants.CHECKPOINT_IO_STATISTICS: True,
    }
    ranks = SimpleNamespace(world_size=1, rank=0, global_rank=0)
    factory = factory_module.CheckpointWriterFactory(writer_config, aio_config, ranks)
    for name in ("first.pt", "second.pt"):
        torch.save(state, factory.create_writer(str(tmp_path / name), optimize_dp_state=False))
        factory.release_writer()
        assert same(torch.load(tmp_path / name), state)
