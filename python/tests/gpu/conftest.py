"""A GPU for tests: a real one where there is one (`-m gpu`), or the fake driver."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from .fake_driver import FakeDriver, FakeDriverGpu, library  # noqa: E402

# A process has one driver: that of the GPU, where torch reaches one and the fake driver is not asked for by name.
_IS_REAL = torch.cuda.is_available() and "DEEPNVME_FAKE_DRIVER" not in os.environ
_LIBRARY = None if _IS_REAL else library()
_FAKE_DRIVER = None if _LIBRARY is None else FakeDriver(_LIBRARY)


class RealGpu:
    """What a test does with a GPU."""

    is_real = True

    def tensor(self, host: Any, device: int = 0) -> Any:
        """Copy a tensor to the GPU, with its strides."""
        return host.to(torch.device("cuda", device % torch.cuda.device_count()))

    def to_host(self, tensor: Any) -> Any:
        """Copy it back."""
        return tensor.cpu()

    def late(self, target: Any, source: Any, delay_ms: int) -> None:
        """Launch a copy on a new stream, which becomes the current one, and which takes some time."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        # About 1.5 GHz.
        torch.cuda._sleep(delay_ms * 1_500_000)
        target.copy_(source)

    def close(self) -> None:
        """End what was made."""
        torch.cuda.synchronize()
        torch.cuda.set_stream(torch.cuda.default_stream())


# What there is none of is no skipped test.
KINDS = [pytest.param("real", marks=pytest.mark.gpu)] if _IS_REAL else ["fake_driver"]
collect_ignore = ["test_fake_driver.py" if _IS_REAL else "test_real.py"]


@pytest.fixture(params=KINDS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A GPU; of the fake driver, nothing may be left behind, and nothing may have been done to it that hurts."""
    if request.param == "real":
        gpu = RealGpu()
        yield gpu
        gpu.close()
        return
    if _FAKE_DRIVER is None:
        pytest.fail("the fake driver has not been built: cargo build -p deepnvme-fake-driver")
    _FAKE_DRIVER.clear()
    fake = FakeDriverGpu(_FAKE_DRIVER, monkeypatch)
    yield fake
    gc.collect()
    fake.close()
    assert _FAKE_DRIVER.violations() == ""
    assert _FAKE_DRIVER.count("device_synchronises") == 0
