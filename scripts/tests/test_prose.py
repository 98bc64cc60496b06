"""The check of the language: what it finds, and what it leaves alone."""

from __future__ import annotations

import pytest

import prose

FOUND = {
    "a.rs": [
        "//! What is copied is gone.",
        "let x = 1; // by way of a slot",
        "/// The engine knows that, too.",
        "    // whoever waits goes on",
    ],
    "a.py": ['"""What is read is checked."""', "x = 1  # it is said twice", 'def f():\n    """As ever."""'],
    "a.md": ["Whoever saves waits.", "A setting, too, is a knob."],
}
LEFT_ALONE = {
    "a.rs": ['let text = "by way of";', "let whoever = 1;", "/// `whoever` is a name.", "// It is too large."],
    "a.py": ["whoever = 'as ever'", '"""Say what is wrong."""'],
    "a.md": ["```\nwhoever\n```", "The name `whoever` is code."],
}


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, texts in FOUND.items() for text in texts])
def test_found(path: str, text: str) -> None:
    assert list(prose.check(path, text))


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, texts in LEFT_ALONE.items() for text in texts])
def test_left_alone(path: str, text: str) -> None:
    assert list(prose.check(path, text)) == []
