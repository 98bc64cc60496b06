"""The fake CUDA driver, and tensors that claim to be on its GPU."""

from __future__ import annotations

import ctypes
import os
import weakref
from pathlib import Path
from typing import Any, ClassVar

import torch

_ROOT = Path(__file__).resolve().parents[3]
# These variables lead the package to driver and cuFile. The real cuFile would look for the real driver itself.
_VARIABLES = ("DEEPNVME_LIBCUDA", "DEEPNVME_LIBCUFILE")


def library() -> Path | None:
    """Find the fake driver, if it has been built: `cargo build -p deepnvme-fake-driver`."""
    said = os.environ.get("DEEPNVME_FAKE_DRIVER")
    folders = [_ROOT / "target" / profile / below for profile in ("debug", "release") for below in ("", "deps")]
    built = [folder / "libdeepnvme_fake_driver.so" for folder in folders]
    found = [path for path in ([Path(said)] if said else built) if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


class FakeDriver:
    """The driver's functions, and its knowledge of their use."""

    def __init__(self, path: Path) -> None:
        os.environ.update(dict.fromkeys(_VARIABLES, str(path)))
        self._calls = ctypes.CDLL(str(path))
        self._calls.fake_driver_calls.restype = ctypes.c_uint64
        self._calls.fake_driver_live.restype = ctypes.c_int64
        self._calls.fake_driver_count.restype = ctypes.c_uint64
        self._calls.fake_driver_violations.restype = ctypes.c_size_t
        self._call("cuInit", ctypes.c_uint(0))
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._calls, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def enter(self, device: int) -> None:
        """Make the device's context current, as torch does."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
            self._contexts[device] = context
        self._call("cuCtxSetCurrent", self._contexts[device])

    def allocate(self, device: int, nbytes: int) -> int:
        """Allocate device memory."""
        self.enter(device)
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        return address.value

    def free(self, device: int, address: int) -> None:
        """Free device memory."""
        self.enter(device)
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def poke(self, address: int, data: bytes) -> None:
        """Write device memory directly."""
        if data:
            self._call("fake_driver_poke", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def peek(self, address: int, nbytes: int) -> bytearray:
        """Read device memory directly."""
        data = bytearray(nbytes)
        if nbytes:
            target = (ctypes.c_char * nbytes).from_buffer(data)
            self._call("fake_driver_peek", ctypes.c_uint64(address), target, ctypes.c_size_t(nbytes))
        return data

    def stream(self, device: int) -> int:
        """Create a stream."""
        self.enter(device)
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(1))
        assert stream.value is not None
        return stream.value

    def end_stream(self, device: int, stream: int) -> None:
        """Synchronise and destroy a stream."""
        self.enter(device)
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def copy_kernel(self, stream: int, target: int, source: int, nbytes: int, delay_us: int) -> None:
        """Launch a kernel that copies device memory after a delay."""
        self._call(
            "fake_driver_copy_kernel",
            ctypes.c_void_p(stream),
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint64(delay_us),
        )

    def fail(self, call: str, after: int, code: int) -> None:
        """Make a call fail."""
        self._calls.fake_driver_fail(call.encode(), ctypes.c_uint(after), ctypes.c_int(code))

    def clear(self) -> None:
        """Reset faults, counts and violations."""
        self._calls.fake_driver_clear()

    def live(self, kind: str) -> int:
        """Count objects that have not been freed."""
        return int(self._calls.fake_driver_live(kind.encode()))

    def count(self, what: str) -> int:
        """Count events."""
        return int(self._calls.fake_driver_count(what.encode()))

    def violations(self) -> str:
        """List violations that would have harmed a real GPU."""
        text = ctypes.create_string_buffer(1 << 16)
        length = self._calls.fake_driver_violations(text, ctypes.c_size_t(len(text)))
        return text.raw[:length].decode()


class FakeTensor(torch.Tensor):
    """A tensor whose bytes are in the fake driver's memory; sizes, strides and views are those of a CPU tensor."""

    bases: ClassVar[dict[int, tuple[int, int]]] = {}

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self._place()[1])

    def _place(self) -> tuple[int, int]:
        return FakeTensor.bases[torch.Tensor.untyped_storage(self).data_ptr()]

    def data_ptr(self) -> int:
        return self._place()[0] + int(self.storage_offset()) * self.element_size()


class FakeGpu:
    """A GPU as tests use it."""

    is_real = False

    def __init__(self, driver: FakeDriver, monkeypatch: Any) -> None:
        self.driver = driver
        self._current = dict.fromkeys(range(2), 0)
        self._streams: list[tuple[int, int]] = []
        monkeypatch.setattr(torch.cuda, "current_stream", self._current_stream)

    def _current_stream(self, device: int) -> Any:
        class Stream:
            cuda_stream = self._current[device]

        return Stream

    def tensor(self, host: torch.Tensor, device: int = 0) -> torch.Tensor:
        """Copy a tensor to the GPU, with its strides."""
        # The storage identifies the memory on the GPU.
        shadow = host.clone(memory_format=torch.preserve_format)
        storage = shadow.untyped_storage()
        nbytes = storage.nbytes()
        address = self.driver.allocate(device, nbytes)
        self.driver.poke(address, ctypes.string_at(storage.data_ptr(), nbytes))
        FakeTensor.bases[storage.data_ptr()] = address, device
        weakref.finalize(storage, self._free, storage.data_ptr(), address, device)
        tensor: torch.Tensor = shadow.as_subclass(FakeTensor)
        return tensor

    def _free(self, key: int, address: int, device: int) -> None:
        # A later storage may have the same address.
        if FakeTensor.bases.get(key) == (address, device):
            del FakeTensor.bases[key]
        self.driver.free(device, address)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy it back."""
        plain = tensor.as_subclass(torch.Tensor).clone(memory_format=torch.preserve_format)
        base, _ = FakeTensor.bases[torch.Tensor.untyped_storage(tensor).data_ptr()]
        nbytes = torch.Tensor.untyped_storage(tensor).nbytes()
        whole = torch.frombuffer(self.driver.peek(base, nbytes) or bytearray(1), dtype=torch.uint8)
        typed = whole[: nbytes - nbytes % tensor.element_size()].view(tensor.dtype)
        values = typed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return plain.copy_(values)

    def late(self, target: torch.Tensor, source: torch.Tensor, delay_ms: int) -> None:
        """Launch a slow copy on a new stream, which becomes the current one."""
        device = target.device.index
        stream = self.driver.stream(device)
        self._streams.append((device, stream))
        self._current[device] = stream
        self.driver.copy_kernel(stream, target.data_ptr(), source.data_ptr(), source.nbytes, delay_ms * 1000)

    def close(self) -> None:
        """Clean up."""
        while self._streams:
            self.driver.end_stream(*self._streams.pop())
        self._current = dict.fromkeys(self._current, 0)
