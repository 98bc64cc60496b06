"""Sizes are the same wherever they are written: powers of 1024, as on the command line."""

from __future__ import annotations

from typing import Any

import pytest

from deepnvme._utils.arguments import parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GB", 4 << 30),
        ("512MiB", 512 << 20),
        (" 1.5 kb ", 1536),
        ("7", 7),
        (12, 12),
        ("2ti", 2 << 40),
        ("3G", 3 << 30),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "4XB", "-1", "0", 0, -5, True, "1.2.3GB", "4 GBit", "1e9", "four", None, 1.5, "0.1"]
)
def test_invalid_sizes(text: Any) -> None:
    with pytest.raises(ValueError, match=r"DEEPNVME_X is .*'4GB'"):
        parse_bytes(text, "DEEPNVME_X")
