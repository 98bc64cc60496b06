"""Tests of the fuzz targets need torch."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
