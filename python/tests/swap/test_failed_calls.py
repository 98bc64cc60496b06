"""Calls that fail or are interrupted leave a whole tensor or none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import deepnvme

from .bits import bits

if TYPE_CHECKING:
    from collections.abc import Callable

    Make = Callable[..., deepnvme.Swapper]


def test_a_shape_with_a_negative_dimension_is_refused_and_nothing_is_there(swapper: Make) -> None:
    mine = swapper()
    with pytest.raises(ValueError, match="a dimension of 'a' is -1"), mine.create("a", (-1, -4), torch.float32):
        pass
    # The borrower is told at once.
    with pytest.raises(KeyError), mine.borrow("a"):
        pass
    assert mine.keys() == []


def test_a_create_that_raises_leaves_nothing(swapper: Make) -> None:
    mine = swapper()
    for shape in [(5,), (9,)]:
        mine.put("a", torch.ones(5))
        with pytest.raises(ZeroDivisionError), mine.create("a", shape, torch.float32) as held:
            held.fill_(1 / 0)
        with pytest.raises(KeyError), mine.borrow("a"):
            pass
    with pytest.raises(RuntimeError, match="size"), mine.create("a", (5,), torch.float32) as held:
        held.copy_(torch.ones(6))
    assert "a" not in mine


# If a generator is discarded, Python swallows the interrupt and reports it. Nothing was interrupted then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("verb", ["put", "attach", "import_", "create"])
def test_a_put_that_is_interrupted_anywhere_is_all_there_or_not_at_all(
    swapper: Make, tmp_path: Path, verb: str, interrupted: Any
) -> None:
    mine = swapper("1MB")
    new, data = torch.arange(300.0), tmp_path / "data"
    data.write_bytes(bits(new))

    def act() -> None:
        if verb == "put":
            mine.put("a", new)
        elif verb == "attach":
            mine.attach("a", data, 0, 1200, dtype=torch.float32)
        elif verb == "import_":
            with data.open("rb") as file:
                mine.import_("a", file.fileno(), 0, 1200, dtype=torch.float32)
        else:
            with mine.create("a", (300,), torch.float32) as held:
                held.copy_(new)

    with interrupted() as points:
        act()
    for point in range(1, points.count + 1):
        mine.put("a", torch.zeros(3, 3, dtype=torch.int64))
        try:
            with interrupted(point):
                act()
        except KeyboardInterrupt:
            pass
        if "a" in mine:
            with mine.borrow("a", shared=True) as borrowed:
                assert torch.equal(
                    borrowed, new if borrowed.dtype is torch.float32 else torch.zeros(3, 3, dtype=torch.int64)
                )
        else:
            with pytest.raises(KeyError), mine.borrow("a"):
                pass
        act()
        with mine.borrow("a", shared=True) as borrowed:
            assert torch.equal(borrowed, new)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_lend_that_is_interrupted_anywhere_is_returned(swapper: Make, interrupted: Any) -> None:
    mine = swapper("1MB")
    mine.put("a", torch.ones(300))

    def act() -> None:
        with mine.borrow("a") as borrowed:
            borrowed.add_(0)

    with interrupted() as points:
        act()
    for point in range(1, points.count + 1):
        try:
            with interrupted(point):
                act()
        except KeyboardInterrupt:
            pass
        with mine.borrow("a") as borrowed:
            assert torch.equal(borrowed, torch.ones(300))
