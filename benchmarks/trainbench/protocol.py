"""What a tool's process answers, and who answers in it."""

from __future__ import annotations

from typing import Any, Protocol

Reply = dict[str, Any]
TOOK = ("took_s", "cpu_s", "read_bytes", "write_bytes")


class Served(Protocol):
    """Serves requests."""

    def open(self, setting: dict[str, Any]) -> Reply:
        """Prepare a setting."""

    def turn(self, steps: int) -> Reply:
        """Make steps."""

    def close(self) -> Reply:
        """Release all tensors."""


def took(before: tuple[float, ...], after: tuple[float, ...]) -> dict[str, float]:
    """Return the costs between two readings, by name."""
    return {name: end - begin for name, begin, end in zip(TOOK, before, after, strict=True)}
