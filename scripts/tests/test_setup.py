"""Tests of the translation of pip settings for uv."""

from __future__ import annotations

import os
from unittest import mock

import setup as project_setup


def test_settings_with_counterparts() -> None:
    settings = {"extra-index-url": "https://a.test\nhttps://b.test", "find-links": "one two", "retries": "9"}
    assert project_setup.uv_environment(settings) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_INDEX": "https://a.test https://b.test",
        "UV_FIND_LINKS": "one,two",
    }


def test_a_setting_without_counterpart_leaves_the_work_to_pip() -> None:
    assert project_setup.uv_environment({"constraint": "pins.txt"}) is None


def test_settings_of_the_user_for_uv_stay() -> None:
    with mock.patch.dict(os.environ, {"UV_DEFAULT_INDEX": "https://mine.test"}):
        assert "UV_DEFAULT_INDEX" not in (project_setup.uv_environment({"index-url": "https://pip.test"}) or {})


def test_extras_are_read_from_the_project() -> None:
    assert any(line.startswith("torch") for line in project_setup.extra("torch"))
