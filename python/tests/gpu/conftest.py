"""A GPU for tests: a real one (`-m gpu`), or the fake driver."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from .fake_driver import FakeDriver, FakeGpu, library  # noqa: E402

# A process has one driver: the real one if torch reaches a GPU and the fake driver is not requested.
_IS_REAL = torch.cuda.is_available() and "DEEPNVME_FAKE_DRIVER" not in os.environ
_LIBRARY = None if _IS_REAL else library()
_DRIVER = None if _LIBRARY is None else FakeDriver(_LIBRARY)


class RealGpu:
    """A GPU as tests use it."""

    is_real = True

    def tensor(self, host: Any, device: int = 0) -> Any:
        """Copy a tensor to the GPU, with its strides."""
        return host.to(torch.device("cuda", device % torch.cuda.device_count()))

    def to_host(self, tensor: Any) -> Any:
        """Copy it back."""
        return tensor.cpu()

    def late(self, target: Any, source: Any, delay_ms: int) -> None:
        """Launch a slow copy on a new stream, which becomes the current one."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        # About 1.5 GHz.
        torch.cuda._sleep(delay_ms * 1_500_000)
        target.copy_(source)

    def close(self) -> None:
        """Clean up."""
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())


# Tests that cannot exist here do not count as skipped.
KINDS = [pytest.param("real", marks=pytest.mark.gpu)] if _IS_REAL else ["fake"]
collect_ignore = ["test_fake_driver.py" if _IS_REAL else "test_real.py"]


@pytest.fixture(params=KINDS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a GPU. With the fake driver, check that nothing leaks and nothing violates the driver's rules."""
    if request.param == "real":
        gpu = RealGpu()
        yield gpu
        gpu.close()
        return
    if _DRIVER is None:
        pytest.fail("the fake driver has not been built: cargo build -p deepnvme-fake-driver")
    _DRIVER.clear()
    fake = FakeGpu(_DRIVER, monkeypatch)
    yield fake
    gc.collect()
    fake.close()
    assert _DRIVER.violations() == ""
    assert _DRIVER.count("device_synchronises") == 0
