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
        "// Initializes page-locked memory.",
    ],
    "a.py": ['"""What is read is checked."""', "x = 1  # it is said twice", 'def f():\n    """As ever."""'],
    "a.md": ["Whoever saves waits.", "A setting, too, is a knob.", "Weights are quantized."],
}
LEFT_ALONE = {
    "a.rs": [
        'let text = "by way of";',
        "let whoever = 1;",
        "/// `whoever` is a name.",
        "// It is too large.",
        "// The optimizer's size.",
    ],
    "a.py": ["whoever = 'as ever'", '"""Say what is wrong."""', '"""Call ``maximize`` of deepspeed.initialize."""'],
    "a.md": ["```\nwhoever\n```", "The name `whoever` is code."],
}


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, texts in FOUND.items() for text in texts])
def test_found(path: str, text: str) -> None:
    assert list(prose.check(path, text))


@pytest.mark.parametrize(("path", "text"), [(path, text) for path, texts in LEFT_ALONE.items() for text in texts])
def test_left_alone(path: str, text: str) -> None:
    assert list(prose.check(path, text)) == []


FULL = "a line that is about as long as the limit allows and that the sentence goes on after, which"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", f'"""First.\n\n{FULL}\nis\nlong.\n"""'),
        ("a.py", f"# {FULL}\n# is,\n# in fact, long."),
        ("a.rs", f"    /// {FULL}\n    /// is\n    /// long."),
    ],
)
def test_a_broken_line_is_found(path: str, text: str) -> None:
    assert [finding.split(":")[0] for finding in prose.check(path, text)] == [path]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", f'"""First.\n\n{FULL} is long.\nYes.\nIt is.\n"""'),
        ("a.py", f'"""First.\n\n>>> {FULL}\nTrue\n>>> 1\n"""'),
        ("a.py", f'"""First.\n\n{FULL}\nends.\n"""'),
        ("a.py", "# one\n# two\n# three"),
        ("a.rs", f"/// {FULL}\n/// ```\n/// x"),
        ("a.md", f"{FULL}\nis\nlong."),
    ],
)
def test_other_short_lines_are_left_alone(path: str, text: str) -> None:
    assert list(prose.check(path, text)) == []
