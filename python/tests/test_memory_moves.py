"""Memory that its owner would free or move while a transfer works on it: the owner is told no."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

SLOW = """
    import mmap, os, sys
    import numpy as np
    import deepnvme
    SIZE = 64 << 20
    engine = deepnvme.Engine(backend="threads", workers=1, queue_depth=1, block_bytes=4096)
    with open("file", "wb") as file:
        file.truncate(SIZE)

    def starts(memory):
        return [
            lambda: engine.start_read(memory, "file"),
            lambda: engine.start_write(memory, "new"),
            lambda: engine.start_read_batch([("file", 0, memory)]),
            lambda: engine.start_write_batch([("new", 0, memory)]),
        ]

    def give_up(*pendings):
        for pending in pendings:
            pending.cancel()
            try:
                pending.result()
            except deepnvme.errors.CancelledError:
                pass

    def refused(memory, act, error):
        for start in starts(memory):
            pending = start()
            try:
                act()
            except error:
                pass
            else:
                raise SystemExit("the owner was allowed to")
            give_up(pending)
"""

MEANWHILE = """
    import threading
    import torch

    def meanwhile(tensor, work):
        # Work, while another thread tries to free the tensor's memory.
        storage, done, refused = tensor.untyped_storage(), threading.Event(), []
        nbytes = storage.nbytes()

        def shrink():
            while not done.is_set():
                if not storage.resizable():
                    try:
                        storage.resize_(0)
                    except RuntimeError:
                        refused.append(True)
                    else:
                        # The transfer has ended since the question.
                        storage.resize_(nbytes)

        thread = threading.Thread(target=shrink, daemon=True)
        thread.start()
        work()
        done.set()
        thread.join()
        assert refused, "never held"
        assert storage.resizable() and storage.nbytes() == nbytes
"""


def test_a_storage_of_torch_keeps_its_size_during_a_transfer(python_fork: Run) -> None:
    pytest.importorskip("torch")
    python_fork(f"""{SLOW}
    import torch
    memory = torch.ones(SIZE, dtype=torch.uint8)
    view = memory[4096:].view(-1, 1024)[:, 1:]
    for act in (
        lambda: memory.untyped_storage().resize_(0),
        lambda: memory.untyped_storage().resize_(2 * SIZE),
        lambda: memory[:].resize_(2 * SIZE),
        lambda: view.untyped_storage().resize_(0),
    ):
        refused(memory, act, RuntimeError)
        assert memory.untyped_storage().resizable()

    # Of several transfers, the last lets go.
    small = torch.ones(8)
    for tensor in (small, small.view(2, 4).T, torch.nn.Parameter(small)):
        assert engine.write(tensor, "small") == 32
        assert engine.read(tensor.detach(), "small") == 32
        assert small.untyped_storage().resizable()
    first, last = engine.start_write(memory, "new"), engine.start_write(view, "strided")
    give_up(first)
    assert not memory.untyped_storage().resizable()
    give_up(last)
    assert memory.untyped_storage().resizable()

    # Nor does its memory move to another place.
    storage = memory.untyped_storage()
    moves = [memory.share_memory_, view.share_memory_, lambda: storage._share_fd_cpu_()]
    if hasattr(storage, "_swap_data_ptr_"):
        moves.append(lambda: storage._swap_data_ptr_(torch.empty(SIZE, dtype=torch.uint8).untyped_storage()))
    before = memory.data_ptr()
    for act in moves:
        refused(memory, act, RuntimeError)
        assert memory.data_ptr() == before and not memory.is_shared()
    numpys = torch.from_numpy(np.ones(SIZE, np.uint8))
    refused(numpys, numpys.share_memory_, RuntimeError)
    shared = torch.ones(SIZE, dtype=torch.uint8)
    assert shared.share_memory_().is_shared()
    assert engine.write(shared[:4096], "small") == 4096

    # A storage of fixed size keeps it.
    fixed = torch.from_numpy(np.ones(8, np.float32))
    assert not fixed.untyped_storage().resizable()
    engine.write(fixed, "small")
    assert not fixed.untyped_storage().resizable()

    # Another storage for the tensor leaves the transfer its own.
    for act in (lambda t: t.set_(torch.empty(4)), lambda t: setattr(t, "data", torch.empty(4))):
        tensor = torch.full((SIZE // 4,), 7.0)
        pending = engine.start_write(tensor, "sevens")
        act(tensor)
        filler = [torch.zeros(SIZE // 4) for _ in range(3)]
        assert not pending.done()
        pending.result()
        assert (np.fromfile("sevens", np.float32) == 7).all()

    memory.untyped_storage().resize_(0)
    """)


def test_saves_loads_and_files_hold_their_memory(python_fork: Run) -> None:
    pytest.importorskip("torch")
    python_fork(f"""{SLOW}{MEANWHILE}
    memory = torch.ones(SIZE, dtype=torch.uint8)

    def read():
        with deepnvme.open("file", "rb", engine=engine) as file:
            assert file.readinto(memory) == SIZE

    def write():
        with deepnvme.open("written", "wb", engine=engine) as file:
            assert file.write(memory) == SIZE

    meanwhile(memory, read)
    meanwhile(memory, write)
    meanwhile(memory, lambda: deepnvme.save({{"memory": memory}}, "saved.safetensors"))
    meanwhile(memory, lambda: deepnvme.load("saved.safetensors", into={{"memory": memory}}))

    with deepnvme.Swapper(".", memory=SIZE, engine=engine) as swapper:
        for key in "ab":
            swapper.put(key, memory)
        # There is memory for one, so that the first is on disk.
        meanwhile(memory, lambda: swapper.read("a", 0, memory))
        meanwhile(memory, lambda: swapper.write("a", 0, memory))
    """)


def test_a_step_holds_its_memory(python_fork: Run) -> None:
    """A step that has begun computes with memory that its owner cannot free."""
    pytest.importorskip("torch")
    python_fork(f"""{MEANWHILE}
    import deepnvme.optim

    for options in ({{}}, {{"swap_dir": ".", "memory": "64MiB"}}):
        param = torch.nn.Parameter(torch.ones(4 << 20))
        param.grad = torch.ones_like(param)
        optimizer = deepnvme.optim.AdamW([param], **options)
        optimizer.step()
        for tensor in (param, param.grad):
            meanwhile(tensor, lambda: [optimizer.step() for _ in range(2)])
    """)


def test_other_owners_keep_their_memory_during_a_transfer(python: Run) -> None:
    python(f"""{SLOW}
    array = np.ones(SIZE, np.uint8)
    refused(array, lambda: array.resize(10, refcheck=False), ValueError)
    refused(array[4096:], lambda: array.resize(10, refcheck=False), ValueError)
    array.resize(10, refcheck=False)
    assert array.size == 10

    grown = bytearray(SIZE)
    refused(grown, grown.clear, BufferError)
    refused(grown, lambda: grown.extend(b"x" * SIZE), BufferError)
    mapped = mmap.mmap(-1, SIZE)
    refused(memoryview(mapped), mapped.close, BufferError)
    refused(memoryview(mapped), lambda: mapped.resize(4096), BufferError)

    # A view of one's own may be released: the transfer has another.
    owner = bytearray(b"x" * SIZE)
    memory = memoryview(owner)
    pending = engine.start_write(memory, "new")
    memory.release()
    del memory, owner
    filler = [bytearray(SIZE) for _ in range(3)]
    assert not pending.done()
    pending.result()
    with open("new", "rb") as file:
        assert file.read() == b"x" * SIZE
    """)
