"""Fixtures of the tests of offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from deepnvme._offload.passes import drop_stale_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    """Begin and end as the next pass does: an interrupt in the very exit of the hooks leaves them until then."""
    yield
    drop_stale_hooks()
