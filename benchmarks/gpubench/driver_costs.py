"""``python -m gpubench.driver_costs``: the cost of driver calls and of small transfers on the first GPU.

Prints the costs of a copy and its wait, the calls that a capture of another thread prohibits, the speed of copies
from pinned memory, the first request of an engine, and a load of 10,000 small tensors.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepnvme
import torch

_BLOCKING, _UNTIMED = 1, 2  # flags of events
_GLOBAL, _RELAXED = 0, 2  # capture modes
_SIZES = [4 << 10, 64 << 10, 512 << 10, 1 << 20, 4 << 20, 64 << 20]
_SMALL = 10_000
_COPIES = 100

# torch's annotation of the class is incomplete.
_new_stream: Any = torch.cuda.Stream


def microseconds(work: Callable[[], object], times: int = 1) -> float:
    """Return the mean time of a call."""
    began = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - began) * 1e6 / times


def waits(driver: Any, stream: Any) -> None:
    """Time copies of pinned memory to the GPU, with a wait that spins and with one that blocks."""
    source = torch.empty(_SIZES[-1], dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_SIZES[-1], dtype=torch.uint8, device="cuda")
    for name, flags in (("spinning", _UNTIMED), ("blocking", _UNTIMED | _BLOCKING)):
        event = ctypes.c_void_p()
        driver.cuEventCreate(ctypes.byref(event), flags)
        for nbytes in _SIZES:

            def copy(nbytes: int = nbytes, event: Any = event) -> None:
                on_gpu, on_host = ctypes.c_uint64(target.data_ptr()), ctypes.c_void_p(source.data_ptr())
                driver.cuMemcpyHtoDAsync_v2(on_gpu, on_host, ctypes.c_size_t(nbytes), stream)
                driver.cuEventRecord(event, stream)
                driver.cuEventSynchronize(event)

            copy()
            busy = time.process_time()
            took = microseconds(copy, _COPIES)
            busy = (time.process_time() - busy) * 1e6 / _COPIES
            print(f"{name} wait for a copy of {nbytes >> 10} KiB: {took:.1f} us, CPU {busy:.1f} us")


def prohibited(driver: Any, stream: Any) -> None:
    """Call the driver on another thread during a capture. Print the calls that fail or end the capture."""
    context, event, number = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    driver.cuEventCreate(ctypes.byref(event), _UNTIMED)
    other = ctypes.c_void_p(_new_stream().cuda_stream)
    page = torch.empty(1 << 20, dtype=torch.uint8)
    start = ctypes.c_void_p(-(-page.data_ptr() // 4096) * 4096)
    calls: dict[str, Callable[[], int]] = {
        "cuStreamQuery": lambda: driver.cuStreamQuery(other),
        "cuStreamSynchronize": lambda: driver.cuStreamSynchronize(other),
        "cuEventQuery": lambda: driver.cuEventQuery(event),
        "cuEventSynchronize": lambda: driver.cuEventSynchronize(event),
        "cuEventRecord": lambda: driver.cuEventRecord(event, other),
        "cuMemHostRegister": lambda: driver.cuMemHostRegister_v2(start, ctypes.c_size_t(4096), 1),
        "cuMemHostUnregister": lambda: driver.cuMemHostUnregister(start),
        "cuCtxSynchronize": driver.cuCtxSynchronize,
        "cuStreamIsCapturing": lambda: driver.cuStreamIsCapturing(other, ctypes.byref(number)),
    }
    for name, mode in (("global", _GLOBAL), ("relaxed", _RELAXED)):
        for call, work in calls.items():
            codes: list[int] = []

            def run(mode: int = mode, work: Callable[[], int] = work, codes: list[int] = codes) -> None:
                driver.cuCtxSetCurrent(context)
                driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))
                codes.append(work())

            torch.cuda.synchronize()
            driver.cuStreamBeginCapture_v2(stream, _GLOBAL)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            graph = ctypes.c_void_p()
            ended = driver.cuStreamEndCapture(stream, ctypes.byref(graph))
            if codes != [0] or ended:
                print(f"during a capture, on a thread in {name} mode: {call} {codes}, end of the capture {ended}")


def pinned() -> None:
    """Copy 256 MiB to the GPU from each kind of memory."""
    nbytes = 1 << 28
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    kinds = {
        "pinned_empty": deepnvme.pinned_empty(nbytes),
        "torch's pinned memory": torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        "ordinary memory": torch.empty(nbytes, dtype=torch.uint8),
    }
    for name, source in kinds.items():

        def copy(source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        copy()
        print(f"copy from {name}: {nbytes / microseconds(copy, 3) / 1e3:.1f} GB/s")


def requests(folder: Path) -> None:
    """Write a tensor with new engines, and load many small tensors."""
    tensor = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    for number in range(3):
        with deepnvme.Engine(workers=1, gds="preferred") as engine:
            took = microseconds(partial(engine.write, tensor, folder / "first"))
            print(f"first request of engine {number}: {took / 1e3:.1f} ms")
    state = {f"t{n}": torch.randint(0, 256, (4096 + 16 * (n % 700),), dtype=torch.uint8) for n in range(_SMALL)}
    path = folder / "small.safetensors"
    deepnvme.save(state, path, progress=False)
    on_gpu = {name: tensor.cuda() for name, tensor in state.items()}
    for name, into in (
        ("the GPU", on_gpu),
        ("the host", {key: torch.empty_like(old) for key, old in state.items()}),
    ):
        times = [microseconds(partial(deepnvme.load, path, into=into, progress=False)) for _ in range(3)]
        print(f"{_SMALL} small tensors into tensors of {name}: {min(times) / 1e3:.0f} ms")


def main() -> None:
    """Print all."""
    torch.zeros(1, device="cuda")
    driver: Any = ctypes.CDLL("libcuda.so.1")
    own = _new_stream()
    stream = ctypes.c_void_p(own.cuda_stream)
    waits(driver, stream)
    prohibited(driver, stream)
    pinned()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        requests(Path(folder))


if __name__ == "__main__":
    main()
