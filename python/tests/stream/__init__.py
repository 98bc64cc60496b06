"""Tests of streamed weights. They need torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
