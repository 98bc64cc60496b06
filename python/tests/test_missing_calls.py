"""Kernels and sandboxes that lack a system call: a backend is still found, and files still open."""

import ctypes
import platform
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

NUMBERS = {"memfd_create": 319, "statx": 332}

FORBID = """
    import ctypes, struct
    import deepnvme

    def forbid(number):
        # Load the number of the call; answer ENOSYS to that one, and allow the others.
        program = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 38), (0x06, 0, 0, 0x7FFF0000)]
        code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
        header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        if libc.prctl(22, 2, header) != 0:
            raise SystemExit(77)
"""


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_back_end_is_found_without(python: Run, name: str) -> None:
    assert struct.calcsize("HxxxxxxP") == 8 + ctypes.sizeof(ctypes.c_void_p)
    python(f"""{FORBID}
    forbid({NUMBERS[name]})
    found = deepnvme.probe()
    assert found.threads.works, found
    with deepnvme.Engine() as engine:
        assert engine.write(b"12345" * 5000, "file") == 25000
        target = bytearray(25000)
        assert engine.read(target, "file") == 25000
        assert target == b"12345" * 5000
    """)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64")
def test_gaps_of_a_stripe_set_are_zeros_without_fallocate(python: Run) -> None:
    python(f"""{FORBID}
    forbid(285)
    import random, threading
    for seed in range(40):
        rng = random.Random(seed)
        parts = deepnvme.StripeSet([f"{{seed}}-{{index}}" for index in range(rng.randint(2, 4))], stripe_bytes=4096)
        model = bytearray()
        def put(at, data):
            assert deepnvme.write(data, parts, at) == len(data)
        for step in range(4):
            pieces, end = [], 0
            for piece in range(rng.randint(1, 3)):
                # Gaps lie between the pieces, which threads write in any order.
                at = end + rng.randrange(30_000)
                data = rng.randbytes(rng.randint(1, 20_000))
                pieces.append((at, data))
                end = at + len(data)
                model.extend(bytes(max(0, end - len(model))))
                model[at:end] = data
            threads = [threading.Thread(target=put, args=piece) for piece in pieces]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            target = bytearray(len(model))
            assert deepnvme.read(target, parts) == len(model)
            assert target == model, seed
            with deepnvme.open(parts) as file:
                assert file.read() == model, seed
    """)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64")
def test_a_stripe_set_is_filled_without_fallocate_and_without_a_wait(python: Run) -> None:
    python(f"""{FORBID}
    import time
    forbid(285)
    parts = deepnvme.StripeSet(["a", "b"], stripe_bytes=4096)
    data = bytes(range(256)) * (16 << 12)
    began = time.monotonic()
    with deepnvme.open(parts, "wb") as file:
        file.write(data)
    # A wait for the lock that the writer itself holds took two seconds a block.
    assert time.monotonic() - began < 20, "waits"
    with deepnvme.open(parts, "rb") as file:
        assert file.read() == data
    """)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64")
def test_a_part_that_another_program_locks_is_waited_for_once(python: Run) -> None:
    python(f"""{FORBID}
    import fcntl, time
    forbid(285)
    parts = deepnvme.StripeSet(["a", "b"], stripe_bytes=4096)
    deepnvme.write(b"begin", parts)
    locks = [open(name) for name in ("a", "b")]
    for lock in locks:
        fcntl.flock(lock, fcntl.LOCK_EX)
    data = bytes(range(256)) * 16
    began = time.monotonic()
    deepnvme.write_batch((parts, index * len(data), data) for index in range(100))
    assert time.monotonic() - began < 20, "waits"
    target = bytearray(100 * len(data))
    deepnvme.read(target, parts)
    assert target == data * 100
    """)


@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="the numbers are those of x86-64")
def test_a_file_system_without_links_and_without_renames_that_do_not_replace(python: Run) -> None:
    pytest.importorskip("torch")
    python(f"""{FORBID}
    import os, torch
    # renameat2 and linkat.
    forbid(316)
    forbid(265)
    state = {{"a": torch.randn(1000), "b": torch.randn(1000)}}
    deepnvme.save(state, "one.safetensors")
    assert torch.equal(deepnvme.load("one.safetensors")["b"], state["b"])
    with deepnvme.Checkpointer("run") as checkpointer:
        checkpointer.save(1, state)
        assert torch.equal(checkpointer.restore()["a"], state["a"])
    try:
        deepnvme.save(state, "several.safetensors", max_shard_bytes=4000)
    except deepnvme.Error as error:
        assert "can neither rename without replacing nor make hard links; use another disk" in str(error), error
    else:
        raise SystemExit("it was saved")
    assert sorted(os.listdir()) == ["one.safetensors", "run"], os.listdir()
    """)
