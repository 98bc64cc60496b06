"""The order of the tools in a round, which rotates and reverses."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

_Any = TypeVar("_Any")


def order(tools: Sequence[_Any], round_index: int) -> list[_Any]:
    """Return the order of a round: rotated by one each round, and reversed in every other round.

    With rotation alone, each tool would always follow the same predecessor and its effects on the disk.
    """
    turned = round_index % max(1, len(tools))
    line = [*tools[turned:], *tools[:turned]]
    return line[::-1] if round_index % 2 else line
