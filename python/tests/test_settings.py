"""The settings of an engine, and what is wrong with some."""

from pathlib import Path
from typing import Any

import pytest

import deepnvme


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"workers": 0}, "workers is 0; it must be between 1 and 64"),
        ({"workers": 65}, "workers is 65"),
        ({"workers": -1}, "workers is -1"),
        ({"workers": 1 << 40}, "workers is"),
        ({"queue_depth": 0}, "queue_depth is 0; it must be between 1 and 4096"),
        ({"block_bytes": 1000}, "block_bytes is 1000"),
        ({"block_bytes": 5000}, "multiple of 4096"),
        ({"block_bytes": 1 << 30}, "block_bytes is"),
        ({"pool_bytes": 1}, "pool_bytes is 1; it must be at least"),
        ({"backend": "uring"}, "'auto', 'io_uring', 'aio' or 'threads'"),
        ({"submit": "many"}, "'batch' or 'single'"),
        ({"direct": "yes"}, "'preferred', 'required' or 'disabled'"),
    ],
)
def test_settings_are_checked(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        deepnvme.Engine(**setting)


def test_settings_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        deepnvme.Engine(workers=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        deepnvme.Engine(4)  # type: ignore[arg-type, call-arg]
    with pytest.raises(TypeError):
        deepnvme.Engine(threads=4)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="'none', 'data' or 'full'"):
        deepnvme.write(b"x", tmp_path / "file", durability="yes")  # type: ignore[arg-type]


def test_settings_can_be_read() -> None:
    settings: dict[str, Any] = {"workers": 3, "queue_depth": 5, "block_bytes": 8192, "backend": "threads"}
    settings |= {"window": "drain", "submit": "single", "direct": "disabled", "gds": "preferred"}
    with deepnvme.Engine(**settings, pool_bytes=1 << 20, lock_pool=False, register_pool=False) as engine:
        assert {name: getattr(engine, name) for name in settings} == settings
        assert not engine.is_closed
        assert engine.pool_bytes <= 1 << 20
        assert "workers=3" in repr(engine)
