"""Tests of streamed weights need torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
