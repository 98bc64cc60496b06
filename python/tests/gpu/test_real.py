"""Tests that need a real GPU: memory leaks, and concurrent streams."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import deepnvme
from deepnvme.deepspeed import _operations, aio_handle, gds_handle

from .test_transfer import bits, values

InThreads = Callable[[Callable[[int], object], int], None]

pytestmark = pytest.mark.gpu

# As many cycles as fit into this time.
CYCLES_S, CYCLES_MIN, CYCLES_MAX = 20.0, 100, 1000
# The driver's own memory grows in steps of 2 MiB, so the slack has a least size, and fewer cycles find only larger
# leaks: of 8 KiB of GPU memory a cycle in 1,000 cycles, of 41 KiB in 100, and of four times as much host memory.
SLACK_BYTES_MIN, SLACK_BYTES_PER_CYCLE = 4 << 20, 8 << 10


# torch has no types for these two.
new_stream: Any = torch.cuda.Stream
keep_busy: Any = torch.cuda._sleep


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmRSS:")[1].split()[0]) << 10


def expect_no_growth(cycle: Callable[[], None]) -> None:
    # The first cycles allocate what is kept: the context, streams, allocator caches.
    for _ in range(20):
        cycle()
    free, resident = free_bytes(), resident_bytes()
    cycles, end = 0, time.monotonic() + CYCLES_S
    while cycles < CYCLES_MAX and (cycles < CYCLES_MIN or time.monotonic() < end):
        cycle()
        cycles += 1
    slack = max(SLACK_BYTES_MIN, cycles * SLACK_BYTES_PER_CYCLE)
    assert free_bytes() >= free - slack, f"after {cycles} cycles"
    assert resident_bytes() <= resident + 4 * slack, f"after {cycles} cycles"


@pytest.mark.alone
def test_engines_register_and_unregister(tmp_path: Path) -> None:
    """An engine registers its bounce memory with the driver at its first GPU transfer."""
    path = tmp_path / "file"
    tensor = values((300_001,), torch.uint8).cuda()
    target = torch.zeros_like(tensor)

    def cycle() -> None:
        with deepnvme.Engine(workers=1, queue_depth=2, block_bytes=65536) as engine:
            engine.write(tensor, path)
            engine.read(target, path)

    expect_no_growth(cycle)
    assert torch.equal(target, tensor)


@pytest.mark.alone
@pytest.mark.parametrize("make", [aio_handle, gds_handle])
def test_handles_and_their_tensors(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "file"
    host = values((300_001,), torch.uint8)
    example = torch.empty(0, dtype=torch.uint8, device="cuda")

    def cycle() -> None:
        # Pooled engines stay. This one is created and closed in each cycle.
        handle = make(65536, 2)
        if make is gds_handle:
            tensor = handle.new_pinned_device_tensor(host.numel(), example)
        else:
            tensor = torch.empty_like(host, device="cuda")
        tensor.copy_(host)
        handle.async_pwrite(tensor, path)
        assert handle.wait() == 1
        if make is gds_handle:
            handle.free_pinned_device_tensor(tensor)
        del handle
        _operations.pool.clear()

    expect_no_growth(cycle)
    assert path.read_bytes() == bits(host)


def test_a_stream_does_not_wait_for_another_one(tmp_path: Path) -> None:
    old, new = values((1 << 20,), torch.uint8, 1), values((1 << 20,), torch.uint8, 2)
    slow, quick, source = old.cuda(), old.cuda(), new.cuda()
    torch.cuda.synchronize()
    busy, idle = new_stream(), new_stream()
    with deepnvme.Engine(workers=2) as engine:
        engine.write(quick, tmp_path / "first")
        with torch.cuda.stream(busy):
            # Some seconds, at 1 to 2 GHz.
            keep_busy(4_000_000_000)
            slow.copy_(source)
            late = engine.start_write(slow, tmp_path / "slow")
        with torch.cuda.stream(idle):
            quick.copy_(source)
            engine.start_write(quick, tmp_path / "quick").result()
        assert not late.done(), "it waits for its own stream, and nobody waits for it"
        late.result()
    assert (tmp_path / "quick").read_bytes() == bits(new)
    assert (tmp_path / "slow").read_bytes() == bits(new)


@pytest.mark.parametrize("make", [aio_handle, gds_handle])
def test_two_streams_of_two_threads_at_once(tmp_path: Path, make: Any, in_threads: InThreads) -> None:
    handle = make(1 << 20, 8, False, True, 2)

    def work(number: int) -> None:
        with torch.cuda.stream(new_stream()):
            path = tmp_path / str(number)
            for turn in range(20):
                tensor = torch.zeros(1_000_003, dtype=torch.uint8, device="cuda")
                keep_busy(2_000_000)
                tensor.fill_(10 * turn + number)
                handle.write(tensor, path, False)
                target = torch.empty_like(tensor)
                handle.read(target, path, False)
                # Ordered by this thread's stream, without telling the engine.
                assert int((target != 10 * turn + number).sum()) == 0

    in_threads(work, 2)


@pytest.mark.parametrize("make", [aio_handle, gds_handle])
def test_a_gibibyte(tmp_path: Path, make: Any) -> None:
    handle = make(8 << 20, 16, False, True, 2)
    tensor = torch.randint(-(1 << 30), 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    handle.async_pwrite(tensor, tmp_path / "file")
    assert handle.wait() == 1
    target = torch.empty_like(tensor)
    handle.async_pread(target, tmp_path / "file")
    assert handle.wait() == 1
    assert torch.equal(target, tensor)
    (tmp_path / "file").unlink()


@pytest.mark.parametrize("make", [aio_handle, gds_handle])
def test_strided_ones_that_other_kernels_fill(tmp_path: Path, make: Any) -> None:
    handle = make(1 << 20, 8, False, True, 2)
    tensor = torch.arange(1 << 20, dtype=torch.int32, device="cuda").view(1 << 10, 1 << 10)
    assert handle.sync_pwrite(tensor.T[100:900:2, 3:], tmp_path / "file") == 1
    target = torch.zeros_like(tensor)
    assert handle.sync_pread(target.T[100:900:2, 3:], tmp_path / "file") == 1
    expected = torch.zeros_like(tensor)
    expected.T[100:900:2, 3:] = tensor.T[100:900:2, 3:]
    assert torch.equal(target, expected)


def test_a_model_and_its_optimizer(gpu: Any, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 100, device="cuda")).sum().backward()
    optimizer.step()
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tied": [model[0].weight] * 2}
    path = tmp_path / "model.pt"
    deepnvme.save(whole, path)
    for loaded in (deepnvme.load(path, device="cuda"), torch.load(path, weights_only=True)):
        assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
        for name, tensor in model.state_dict().items():
            assert loaded["model"][name].is_cuda
            assert torch.equal(loaded["model"][name], tensor)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])


@pytest.mark.parametrize("make", [aio_handle, gds_handle])
def test_handles_validate_their_transfers(gpu: Any, make: Any, tmp_path: Path) -> None:
    handle = make()
    tensor = gpu.tensor(values((300, 1000), torch.float32)).T
    assert handle.write(tensor, tmp_path / "file", True) == 0
    assert handle.pread(tensor, tmp_path / "file", True, True) == 0
    assert handle.wait() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_a_swapper_takes_and_gives_tensors_of_a_gpu(tmp_path: Path, dtype: torch.dtype) -> None:
    """With so little memory that most tensors are on disk when they are requested."""
    hosts = {str(index): values((257, 129 + index), dtype) for index in range(12)}
    with deepnvme.Swapper(tmp_path, memory=3 * hosts["11"].nbytes + (1 << 16)) as swapper:
        for key, host in hosts.items():
            # Not contiguous, and its kernel has not run when `put` is called.
            swapper.put(key, host.cuda().t().contiguous().t())
        for key, host in hosts.items():
            with swapper.borrow(key, shared=True) as borrowed:
                assert bits(borrowed) == bits(host)
        for key, host in hosts.items():
            part = host.flatten()[100:4000]
            offset = 100 * host.element_size()
            target = torch.zeros_like(part, device="cuda")
            assert bits(swapper.read(key, offset, target).cpu()) == bits(part)
            swapper.write(key, offset, part.flip(0).cuda())
            host.flatten()[100:4000] = part.flip(0)
        for key, host in hosts.items():
            with swapper.borrow(key) as borrowed:
                assert bits(borrowed.cuda().cpu()) == bits(host)


def captured(work: Callable[[], object]) -> str | None:
    """Run `work` on another thread while this one captures a graph, in torch's strictest mode. Return its error."""
    layer, inputs = torch.nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    side = new_stream()
    with torch.cuda.stream(side), torch.no_grad():
        layer(inputs)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    begin, errors = threading.Event(), []

    def run() -> None:
        begin.wait()
        try:
            work()
        except Exception as error:
            errors.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    with torch.cuda.graph(graph, capture_error_mode="global"), torch.no_grad():
        outputs = layer(inputs)
        begin.set()
        thread.join()
        outputs = outputs + 1
    inputs.copy_(torch.randn(8, 64))
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert torch.allclose(outputs, layer(inputs) + 1, atol=1e-5)
    return errors[0] if errors else None


def test_a_graph_is_captured_while_other_threads_transfer(tmp_path: Path) -> None:
    """No call of ours invalidates the capture, and none fails."""
    tensor = values((8 << 20,), torch.uint8).cuda()
    target, state = torch.empty_like(tensor), {"a": tensor[: 1 << 20], "b": tensor[1 << 20 :]}
    with deepnvme.Engine(workers=2) as engine, deepnvme.Swapper(tmp_path, memory=4 << 20) as swapper:

        def transfer() -> None:
            engine.write(tensor, tmp_path / "file")
            engine.read(target, tmp_path / "file")

        def begin_and_end() -> None:
            with deepnvme.Engine(workers=1) as fresh:
                fresh.read(target, tmp_path / "file")

        def save_and_load() -> None:
            deepnvme.save(state, tmp_path / "state.safetensors", progress=False)
            deepnvme.load(tmp_path / "state.safetensors", into=state, progress=False)

        def swap() -> None:
            swapper.put("key", tensor[:100_000])
            swapper.read("key", 0, target[:100_000])

        def checkpoint() -> None:
            with deepnvme.Checkpointer(tmp_path / "checkpoints") as checkpointer:
                checkpointer.save(1, state)

        def pin() -> None:
            assert deepnvme.pinned_empty(1 << 20).is_pinned()

        for work in (transfer, begin_and_end, save_and_load, swap, checkpoint, pin):
            work()  # torch's own first allocations would end the capture
            target.zero_()
            torch.cuda.synchronize()
            assert captured(work) is None, work
        engine.read(target, tmp_path / "file")
        assert torch.equal(target, tensor)


def test_a_tensor_of_a_stream_that_is_captured_is_refused(tmp_path: Path) -> None:
    tensor = values((1 << 20,), torch.uint8).cuda()
    result = torch.zeros_like(tensor)
    graph: Any = torch.cuda.CUDAGraph()
    with deepnvme.Engine(workers=1) as engine:
        engine.write(tensor, tmp_path / "file")
        with torch.cuda.graph(graph):
            with pytest.raises(deepnvme.errors.UnsupportedError, match="before or after the capture"):
                engine.read(tensor, tmp_path / "file")
            torch.add(tensor, 1, out=result)
        graph.replay()
        engine.read(tensor, tmp_path / "file")
    assert torch.equal(result, tensor + 1)


def test_pinned_memory_is_pinned_for_torch() -> None:
    torch.cuda.synchronize()  # the context exists
    tensor = deepnvme.pinned_empty((1 << 10, 1 << 10), torch.float32)
    assert tensor.is_pinned()
    source = torch.randn(1 << 10, 1 << 10)
    tensor.copy_(source)
    assert torch.equal(tensor.to("cuda", non_blocking=True).cpu(), source)


def test_pinned_memory_from_before_the_first_use_of_the_gpu(tmp_path: Path) -> None:
    code = """
        import sys, torch, deepnvme
        early = deepnvme.pinned_empty(1 << 20)
        assert not torch.cuda.is_initialized()
        tensor = torch.arange(1000, device="cuda")
        assert not early.is_pinned()
        deepnvme.write(tensor, sys.argv[1])
        assert early.is_pinned() and deepnvme.pinned_empty(5).is_pinned()
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file")]
    subprocess.run(command, check=True, timeout=120)


def test_the_memory_of_a_swapper_is_pinned_for_torch(tmp_path: Path) -> None:
    with deepnvme.Swapper(tmp_path, memory=1 << 20) as swapper:
        swapper.put("key", torch.arange(1000, device="cuda"))
        with swapper.borrow("key") as borrowed:
            assert borrowed.is_pinned()


def test_a_borrow_ends_after_the_copies_of_its_memory(tmp_path: Path) -> None:
    """Their slot is reused at once."""
    hosts = [torch.full((60_000,), float(index)) for index in range(6)]
    with deepnvme.Swapper(tmp_path, memory=2 * hosts[0].nbytes + (1 << 16)) as swapper:
        for index, host in enumerate(hosts):
            swapper.put(str(index), host)
        copies = []
        for index in range(6):
            with swapper.borrow(str(index), shared=True) as borrowed:
                keep_busy(100_000_000)
                copies.append(borrowed.to("cuda", non_blocking=True))
        for host, copy in zip(hosts, copies, strict=True):
            assert torch.equal(copy.cpu(), host)
        # The other way: the slot is written to the disk after the copy.
        for index in range(6):
            with swapper.create(f"new {index}", (60_000,), torch.float32) as created:
                keep_busy(100_000_000)
                created.copy_(copies[index], non_blocking=True)
        for index, host in enumerate(hosts):
            with swapper.borrow(f"new {index}", shared=True) as borrowed:
                assert torch.equal(borrowed, host)


def move_weights(path: Path, shift: int) -> None:
    """Rewrite a safetensors file, so that its weights begin at `shift` modulo 16."""
    content = path.read_bytes()
    header = content[8 : 8 + int.from_bytes(content[:8], "little")].rstrip(b" ")
    header = header.ljust(-(-len(header) // 8) * 8)
    header = header if (8 + len(header)) % 16 == shift else header + b" " * 8
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + int.from_bytes(content[:8], "little") :])


@pytest.mark.parametrize("shift", [0, 8])
@pytest.mark.parametrize(("part", "dtype"), [(0.3, "auto"), (0.6, "auto"), (2.0, "auto"), (0.5, "float32")])
def test_a_model_is_streamed_through_a_gpu(tmp_path: Path, part: float, dtype: str, shift: int) -> None:
    """The tokens and logits of the same model in GPU memory. The output layer is tied to the embedding."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=3000, tie_word_embeddings=True, **shape)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    move_weights(tmp_path / "model.safetensors", shift)
    wanted = torch.bfloat16 if dtype == "auto" else torch.float32
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=wanted).cuda().eval()
    nbytes = sum(each.nbytes for each in expected.parameters())
    question = torch.randint(0, 3000, (3, 11), device="cuda")
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    model = deepnvme.stream(tmp_path, memory=int(nbytes * part), device="cuda", dtype=dtype)
    for _ in range(2):
        assert torch.equal(model.generate(question, **options), expected.generate(question, **options))
    with torch.inference_mode():
        assert torch.equal(model(question).logits, expected(question).logits)
    assert model.streaming.stats().bytes_read > 0
    model.streaming.close()


def test_ids_on_the_gpu(tmp_path: Path) -> None:
    """torch itself copies ids to the host."""
    table = torch.randn(5000, 300)
    deepnvme.save({"table": table}, tmp_path / "table.safetensors")
    with deepnvme.RowStore(tmp_path / "table.safetensors", "table", memory="2MB") as store:
        ids = torch.randint(0, 5000, (7, 30), device="cuda")
        store.prefetch(ids)
        assert torch.equal(store.gather(ids), table[ids.cpu()])
        embedding = deepnvme.nn.DiskEmbedding(store, padding_idx=3, scale=2.0)
        ids[0, :5] = 3
        expected = table[ids.cpu()] * 2.0
        expected[ids.cpu() == 3] = 0
        for module in (embedding, embedding.to("cuda")):
            rows = module(ids)
            assert rows.is_cuda
            assert torch.equal(rows.cpu(), expected)
        half = embedding.to(torch.bfloat16)(ids)
        assert torch.equal(half.cpu(), expected.to(torch.bfloat16))
