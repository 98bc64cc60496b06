"""``Stats`` and ``Probe``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import deepnvme

RandomBytes = Callable[[int], bytes]


def test_counters_add_up(engine: deepnvme.Engine, tmp_path: Path, random_bytes: RandomBytes) -> None:
    assert engine.stats().requests == engine.stats().bytes_written == engine.stats().latency_count == 0
    data, path = random_bytes(1_000_003), tmp_path / "file"
    engine.write(data, path)
    engine.read(bytearray(1_000_003), path)
    with pytest.raises(EOFError):
        engine.read(bytearray(1), path, 1_000_003)
    stats = engine.stats()
    assert (stats.requests, stats.requests_failed) == (3, 1)
    assert (stats.bytes_written, stats.bytes_read) == (1_000_003, 1_000_003)
    assert stats.bytes_direct + stats.bytes_bounced + stats.bytes_buffered == 2_000_006
    assert stats.ops >= 2_000_006 // 16384
    assert 0 < stats.latency_us_min <= stats.latency_us_p50 <= stats.latency_us_p99 <= stats.latency_us_max
    assert stats.latency_count > 100
    assert stats.backend == engine.backend
    assert stats.pool_bytes <= engine.pool_bytes


def test_buffered_transfers_say_why(random_bytes: RandomBytes) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("no tmpfs here")
    path = folder / f"deepnvme-test-{random_bytes(8).hex()}"
    try:
        with deepnvme.Engine() as engine:
            engine.write(random_bytes(100_000), path)
            stats = engine.stats()
            assert stats.bytes_buffered == 100_000
            assert stats.buffered_reason
        with deepnvme.Engine(direct="required") as strict:
            with pytest.raises(deepnvme.errors.UnsupportedError, match="direct I/O is required") as caught:
                strict.read(bytearray(10), path)
            assert caught.value.filename == str(path)
        with deepnvme.Engine(direct="disabled") as engine:
            engine.read(bytearray(100_000), path)
            assert engine.stats().buffered_reason in (None, "direct I/O was disabled")
    finally:
        path.unlink(missing_ok=True)


def figures(value: Any) -> dict[str, Any]:
    names = [name for name in dir(type(value)) if not name.startswith("_") and name != "to_dict"]
    return {name: getattr(value, name) for name in names}


def test_stats_are_a_value_for_json() -> None:
    stats = deepnvme.stats()
    assert stats.to_dict() == figures(stats)
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()
    assert repr(stats).startswith(f"Stats(backend='{stats.backend}', requests=")
    with pytest.raises(AttributeError):
        stats.requests = 3  # type: ignore[misc]


def test_the_probe_names_working_backends_and_reasons(engine: deepnvme.Engine) -> None:
    probe = engine.probe()
    assert probe.backend == engine.backend
    assert probe.backend_reason
    for name in ("io_uring", "aio", "threads"):
        found = getattr(probe, name)
        assert found.name == name
        assert found.works == (found.detail is not None) == (found.reason is None) == (found.remedy is None)
        assert found.to_dict() == figures(found)
        assert repr(found).startswith(f"BackendProbe(name='{name}', works={found.works}")
    assert getattr(probe, engine.backend).works
    assert json.loads(json.dumps(probe.to_dict()))["threads"]["works"] is True
    assert "threads works" in repr(probe)


def test_the_chosen_backend_is_the_first_that_works() -> None:
    probe = deepnvme.probe()
    works = [name for name in ("io_uring", "aio", "threads") if getattr(probe, name).works]
    assert probe.backend == works[0]
