"""Sizes are the same wherever they are written, also on the command line: one parser reads them all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepnvme
from deepnvme._utils.public import parse_bytes, whole
from deepnvme.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GB", 4_000_000_000),
        ("4GiB", 4 << 30),
        ("4G", 4 << 30),
        ("512MB", 512_000_000),
        ("512MiB", 512 << 20),
        (" 1.5 kb ", 1500),
        (" 1.5 kib ", 1536),
        ("64K", 64 << 10),
        ("2TB", 2_000_000_000_000),
        ("2ti", 2 << 40),
        ("1 PB", 10**15),
        ("7", 7),
        (12, 12),
        (np.int64(12), 12),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GB", "4XB", "-1", "-1GB", "0", 0, -5, "1.2.3GB", "4 GBit", "1e9", "four", "0.1", 2**70, "9999PB", "\ud800"],
)
def test_invalid_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match=r"DEEPNVME_X is .*'4GB' .*'512MiB' .*'64K' .*between 1 and") as caught:
        parse_bytes(text, "DEEPNVME_X")
    assert isinstance(caught.value, deepnvme.Error)


@pytest.mark.parametrize("value", [True, None, 1.5, float("nan"), b"4GB", [4]])
def test_sizes_of_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match=r"memory is .*'4GB'"):
        parse_bytes(value)


class Unprintable:
    """A value whose ``__repr__`` fails."""

    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize("check", [parse_bytes, lambda value: whole(value, "memory")])
def test_values_that_cannot_be_printed_are_described(check: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="memory is an object of type Unprintable; it must be"):
        check(Unprintable())
    with pytest.raises(InvalidArgumentError, match="memory is a number of thousands of digits; it must be"):
        check(10**5000)


def test_all_sizes_of_the_engine_take_text(tmp_path: Path) -> None:
    with deepnvme.Engine(block_bytes="64KiB", pool_bytes="8MB") as engine:
        assert engine.block_bytes == 64 << 10
        # Rounded down to whole slots.
        assert 7_000_000 < engine.pool_bytes <= 8_000_000
    with pytest.raises(ValueError, match=r"block_bytes is 64000; .*multiple of 4096"):
        deepnvme.Engine(block_bytes="64KB")
    assert deepnvme.StripeSet([tmp_path / "a", tmp_path / "b"], stripe_bytes="64K").stripe_bytes == 64 << 10


@pytest.mark.parametrize(
    "call",
    [
        lambda: deepnvme.Engine(backend="disk"),  # type: ignore[arg-type]
        lambda: deepnvme.Engine(direct="never"),  # type: ignore[arg-type]
        lambda: deepnvme.write(np.ones(1), "x", durability="fsync"),  # type: ignore[arg-type]
        lambda: deepnvme.open("x", "r+"),
        lambda: deepnvme.Checkpointer("x", format="zip"),  # type: ignore[arg-type]
        lambda: deepnvme.Checkpointer("x", layout="one"),  # type: ignore[arg-type]
    ],
)
def test_unknown_words_are_an_error_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(deepnvme.errors.InvalidArgumentError, match="it must be "):
        call()
    assert list(tmp_path.iterdir()) == []


def test_a_number_without_an_upper_limit_names_the_lower_one() -> None:
    with pytest.raises(ValueError, match=r"^keep is 0; it must be a whole number of at least 1, or None to keep all$"):
        deepnvme.Checkpointer("x", keep=0)
