"""DeepSpeed's swappers on our engine: individually, and in training with state and parameters on disk."""

from __future__ import annotations

import importlib
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch

from deepnvme.deepspeed import aio_handle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# DeepSpeed swaps nothing below 1 MiB, whatever the block size.
NUMEL = 300_000
AIO_CONFIG = {
    "block_size": 1 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
    "use_gds": False,
}


@pytest.fixture
def distributed(on_our_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DeepSpeed with a world of one process."""
    # ZeRO-3 replaces this one permanently, and its own rounds differently.
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    # DeepSpeed would compile this op of its own. It is not needed.
    monkeypatch.setitem(on_our_engine.ops.__compatible_ops__, "deepspeed_shm_comm", False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    if not on_our_engine.comm.is_initialized():
        on_our_engine.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    yield on_our_engine
    on_our_engine.comm.destroy_process_group()


def test_async_tensor_swapper(distributed: Any, tmp_path: Path) -> None:
    assert distributed
    module = importlib.import_module("deepspeed.runtime.swap_tensor.async_swapper")
    handle = aio_handle(intra_op_parallelism=2)
    buffers = [handle.new_cpu_locked_tensor(3 * NUMEL, torch.empty(0)) for _ in range(2)]
    swapper = module.AsyncTensorSwapper(aio_handle=handle, numel_alignment=512, timers=None)
    swapper.add_buffers(buffers)
    tensors = [torch.randn(NUMEL + index) for index in range(11)]
    paths = [str(tmp_path / f"{index}.swp") for index in range(11)]
    swapper.swap_out_tensors(tensors[:5], paths[:5])
    swapper.swap_out_tensors(tensors[5:], paths[5:])
    assert swapper.release_buffers() == buffers
    for tensor, path in zip(tensors, paths, strict=True):
        target = torch.empty_like(tensor)
        handle.sync_pread(target, path)
        assert torch.equal(target, tensor)


def test_partitioned_parameter_swapper(distributed: Any, tmp_path: Path) -> None:
    assert distributed
    module = importlib.import_module("deepspeed.runtime.swap_tensor.partitioned_param_swapper")
    offload = SimpleNamespace(nvme_path=str(tmp_path), buffer_size=NUMEL + 100, buffer_count=3)
    config = SimpleNamespace(zero_config=SimpleNamespace(offload_param=offload), aio_config=AIO_CONFIG)
    swapper = module.AsyncPartitionedParameterSwapper(config, torch.float32)
    status = module.PartitionedParamStatus
    expected = [torch.randn(NUMEL + index) for index in range(5)]
    params = []
    for index, values in enumerate(expected):
        partition = torch.empty(0)
        partition.ds_numel = values.numel()  # type: ignore[attr-defined]
        param = SimpleNamespace(ds_id=index, ds_tensor=partition)
        partition.data = swapper.get_buffer(param, values.numel()).copy_(values)
        partition.status = status.AVAILABLE  # type: ignore[attr-defined]
        swapper.swap_out_and_release([param])
        params.append(param)
    assert all(param.ds_tensor.status is status.NOT_AVAILABLE for param in params)
    for group in (params[:3], params[3:]):
        swapper.swap_in(group, async_op=True)
        assert all(param.ds_tensor.status is status.INFLIGHT for param in group)
        swapper.synchronize_reads()
        for param in group:
            assert torch.equal(param.ds_tensor, expected[param.ds_id])
        swapper.remove_partition_and_release_buffers(group)
    # As DeepSpeed requests a parameter whose forward and backward pass are both close.
    swapper.swap_in([params[1], params[0], params[1]], async_op=False)
    assert torch.equal(params[1].ds_tensor, expected[1])
    swapper.remove_partition_and_release_buffers(params[:2])
    assert swapper.available_swap_in_buffers() == 3
    # Directly into memory of the caller, pinned and aligned or not.
    for target in (torch.empty(NUMEL + 4), swapper.aio_read_handle.new_cpu_locked_tensor(300_032, torch.empty(0))):
        param = params[4]
        swapper.swap_into_buffer(param, target[: NUMEL + 4] if target.numel() == NUMEL + 4 else target)
        assert torch.equal(target[: NUMEL + 4], expected[4])
        param.ds_tensor.status = status.NOT_AVAILABLE
    # The next swapped-out data comes back, and nothing old.
    swapper.reserve_partitioned_swap_space([values.numel() for values in expected])
    newer = [torch.randn_like(values) for values in expected]
    swapper.swap_out_partitioned_params(params, newer)
    swapper.swap_in(params[:2], async_op=False)
    assert all(torch.equal(param.ds_tensor, newer[param.ds_id]) for param in params[:2])


def train(deepspeed: Any, device: str, folder: Path, *, pipelined: bool = False) -> tuple[list[float], Any]:
    """Make four steps of a small model under ZeRO-3, with Adam's state and the parameters on `device`."""
    torch.manual_seed(0)
    width = 1024
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width, bias=False), torch.nn.Tanh(), torch.nn.Linear(width, width, bias=False)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    offload = {"device": device, "nvme_path": str(folder), "pin_memory": False, "buffer_count": 16}
    zero = {
        "stage": 3,
        "sub_group_size": 1 << 20,
        "offload_optimizer": {**offload, "pipeline_read": pipelined, "pipeline_write": pipelined},
    }
    if device == "nvme":
        zero["offload_param"] = {**offload, "buffer_count": 8, "buffer_size": 2 << 20}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "aio": AIO_CONFIG,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=model.parameters()
    )
    swapper = getattr(engine.optimizer, "optimizer_swapper", None)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        inputs = torch.randn(4, width, generator=generator).bfloat16()
        loss = (engine(inputs).float() - 1).pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses, type(swapper).__name__


def test_training_from_disk_is_training_from_memory(distributed: Any, tmp_path: Path) -> None:
    expected, _ = train(distributed, "cpu", tmp_path)
    assert len(set(expected)) == 4
    for pipelined, swapper in ((False, "PartitionedOptimizerSwapper"), (True, "PipelinedOptimizerSwapper")):
        assert train(distributed, "nvme", tmp_path, pipelined=pipelined) == (expected, swapper)
    swapped = [path.name for path in tmp_path.rglob("*.swp")]
    assert any(name.startswith("exp_avg") for name in swapped)
    assert any("gradient" in name for name in swapped)
    assert any(name.endswith("_param.tensor.swp") for name in swapped)
