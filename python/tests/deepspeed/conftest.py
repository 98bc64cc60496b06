"""Fixtures for the drop-in tests: data, and a real DeepSpeed on our engine in which nothing may be compiled."""

from __future__ import annotations

import os
import resource
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# These tests ignore the machine's GPUs.
os.environ.setdefault("DS_ACCELERATOR", "cpu")

DEEPSPEED_OLDEST = (0, 19, 8)
FILE_BYTES_MAX = 2 << 20


@pytest.fixture
def random_bytes() -> Callable[[int], Any]:
    """Return a function that makes uint8 tensors of random content, different at each call."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(20_240_807)

    def make(count: int) -> Any:
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

    return make


@pytest.fixture
def configured() -> Callable[[Any], Any]:
    """Return a function that makes handles with other settings, and check that the getters return them."""

    def make(handle_class: Any) -> Any:
        handle = handle_class(
            block_size=1000, queue_depth=100_000, single_submit=True, overlap_events=True, intra_op_parallelism=100
        )
        assert handle.get_block_size() == 1000
        assert handle.get_queue_depth() == 100_000
        assert handle.get_single_submit() is True
        assert handle.get_overlap_events() is True
        assert handle.get_intra_op_parallelism() == 100
        return handle

    return make


@pytest.fixture
def no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn every way to compile an op into an error."""
    extension = pytest.importorskip("torch.utils.cpp_extension")

    def compile_op(*_args: object, **_keywords: object) -> None:
        pytest.fail("an op was about to be compiled")

    for name in ("load", "load_inline", "_jit_compile", "_write_ninja_file_and_build_library"):
        monkeypatch.setattr(extension, name, compile_op)


@pytest.fixture
def on_our_engine(no_compiling: None) -> Iterator[Any]:
    """The installed DeepSpeed, which uses our ops during a test."""
    deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: pip install 'deepspeed>=0.19.8'")
    version = tuple(int(part) for part in deepspeed.__version__.split("+")[0].split(".")[:3])
    if version < DEEPSPEED_OLDEST:
        pytest.skip(f"DeepSpeed {deepspeed.__version__} is older than 0.19.8")
    from deepnvme.deepspeed import install, uninstall

    install()
    try:
        yield deepspeed
    finally:
        uninstall()


@pytest.fixture
def file_size_limit() -> Iterator[int]:
    """Limit files to 2 MiB during a test, so that a write fails halfway as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES_MAX, before[1]))
    yield FILE_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)
